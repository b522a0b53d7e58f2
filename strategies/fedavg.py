"""Federated averaging: the server's half; the institution's half is `clients/fedavg.py`.

Source: McMahan et al. 2017 (arXiv:1602.05629), Algorithm 1; C is the option fraction. Qu et al. 2022, section 4.1.
Idea: All institutions train the same model at once. The server averages the results, weighted by numbers of examples.
Travels: the weights, to every institution that trains (`Train`) and back (`Trained`, with counts and a loss).

    for each round:
        for each institution k of this round's, in parallel: θ_k ← train θ at k, E passes of max(1, ⌊n_k/b⌋) iterations
        θ ← Σ_k (n_k / n) θ_k

With dp=update, in every round, with C privacy.clip and all data of an institution exchanged for any others at once

    Δ_k ← θ_k - θ;  u_k ← Δ_k / max(1, ‖Δ_k‖ / C), or 0 if Δ_k is not finite;  θ ← θ + (Σ_k u_k + N(0, σ²(2C)² I)) / K

as in McMahan et al. 2018 (arXiv 1710.06963), Algorithm 1, where all take part with equal weights. An institution's
u_k takes the place of any other, which moves the sum by 2C. Without noise=shared each u_k has this noise.

Deviations: A pass has max(1, ⌊n_k/b⌋) full batches, as in Qu et al. The sum runs in float64. It averages the
running statistics of batch norm too, in the same way as the weights. Local steps have momentum by default;
training.momentum=0 is McMahan's SGD. Flower's own FedAvg is not the base class: it samples with the global random state
and writes into the caller's configuration.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flwr_replay.config.sections import PASSES, one_of, within
from flwr_replay.config.strategy import StrategyConfig, Traits
from flwr_replay.movements.parallel import Parallel
from flwr_replay.payloads.common import Train, Trained
from flwr_replay.privacy.plan import UPDATE
from flwr_replay.wire.records import StateDict, Weights

__all__ = ["FedAvg", "FedAvgConfig"]


@dataclass(frozen=True, kw_only=True)
class FedAvgConfig(StrategyConfig):
    """Options of FedAvg."""

    name = "fedavg"
    traits = Traits(
        mixes=True,
        summed=True,
        supports_replay=True,
        supports_draws=True,
        takes_fraction=True,
        own_batches=True,
        dp_mechanisms=("generator", "prior", "classifier", "statistics", UPDATE),
    )
    local_epochs: int = 1  # E, passes over an institution's data per round
    optimizer_state: str = "reset"  # reset: fresh momentum in every round | keep: each institution keeps its own

    def __post_init__(self) -> None:
        within("strategy.", self, local_epochs=(1, PASSES))
        one_of("strategy.optimizer-state", self.optimizer_state, ("keep", "reset"))

    def dp_passes(self, rounds: int) -> Mapping[str, int]:
        """E passes a round, and one update."""
        return {"classifier": rounds * self.local_epochs, UPDATE: rounds}


class FedAvg(Parallel):
    """All train at once; the server averages."""

    config_type = FedAvgConfig
    config: FedAvgConfig

    def train_request(self, exchange: int, arrays: Weights) -> Train:
        """Send θ to every institution."""
        return Train(
            exchange=exchange,
            arrays=arrays,
            run=self.settings.run,
            lr=self.lr(exchange),
            local_epochs=self.config.local_epochs,
            optimizer_state=self.config.optimizer_state,
        )

    def combine(self, answers: Sequence[Trained]) -> StateDict:
        """Average: θ ← Σ_k (n_k / n) θ_k; with dp=update θ ← θ + the mean of noisy updates."""
        return self.mean(answers)
