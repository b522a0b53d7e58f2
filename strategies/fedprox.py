"""FedProx: the server's half; the institution's half is `clients/fedprox.py`.

Source: Li et al. 2020 (arXiv:1812.06127), Algorithm 2; Qu et al. 2022, section 4.1.
Idea: FedAvg with a proximal term that keeps local training near the global weights.
Travels: as in FedAvg: the weights, to every institution (`Train`, with μ) and back (`Trained`, with counts and a loss).

    for each round:
        for each institution k in parallel: θ_k ← E passes at k over L(θ_k) + μ/2 ‖θ_k - θ‖²
        θ ← Σ_k (n_k / n) θ_k

Deviations: Those of FedAvg. μ = 0 is FedAvg, bit for bit. With fraction= institutions are drawn uniformly and averaged
by their numbers of examples, as in FedAvg; Li et al. draw in proportion to these numbers and average without weights.
A user's own ClientApp finds μ as `proximal-mu` in the config record, as with Flower's FedProx. As `serve.ProximalApp`
it has the term; else it must add it to its loss. The server cannot see whether it does; if not, this is FedAvg. The
log says so once.
"""

from dataclasses import dataclass, replace

from flwr_replay.config.sections import NOT_NEGATIVE_FINITE, within
from flwr_replay.payloads.common import Train
from flwr_replay.privacy.plan import UPDATE
from flwr_replay.strategies.fedavg import FedAvg, FedAvgConfig
from flwr_replay.wire.records import Weights

__all__ = ["FedProx", "FedProxConfig"]


@dataclass(frozen=True, kw_only=True)
class FedProxConfig(FedAvgConfig):
    """Options of FedProx."""

    name = "fedprox"
    # not classifier: DP-SGD has no proximal term
    traits = replace(FedAvgConfig.traits, supports_draws=False, dp_mechanisms=("generator", "prior", UPDATE))
    mu: float = 0.001  # weight of the proximal term; paper: 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        within("strategy.", self, mu=NOT_NEGATIVE_FINITE)


class FedProx(FedAvg):
    """FedAvg with a proximal term at the institutions, which a ClientApp of your own must add itself."""

    config_type = FedProxConfig
    config: FedProxConfig

    def begin_run(self) -> None:
        """Say once what a user's own ClientApp must do."""
        super().begin_run()
        if any(not member.ours for member in self.members):
            self.recorder.log(
                "FedProx: a ClientApp of your own must be a flwr_replay.serve.ProximalApp, or add proximal-mu / 2 "
                "times the squared distance from the weights received to its loss; if it ignores proximal-mu in the "
                "config record, this is FedAvg"
            )

    def train_request(self, exchange: int, arrays: Weights) -> Train:
        """Send θ and μ to every institution."""
        return replace(super().train_request(exchange, arrays), proximal_mu=self.config.mu)
