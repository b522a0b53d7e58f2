"""Ditto: the server's half; the institution's half is `clients/ditto.py`.

Source: Li, Hu, Beirami and Smith 2021 (arXiv 2012.04221), Algorithm 1.
Idea: FedAvg, beside which every institution trains a personal model that stays near the global one.
Travels: as in FedAvg: the weights, to every institution (`TrainPersonal`, with λ) and back. Personal models stay.

    for each round:
        for each institution k in parallel:
            θ_k ← E passes at k over L(θ_k) from θ
            v_k ← E passes at k over L(v_k) + λ/2 ‖v_k - θ‖²
        θ ← Σ_k (n_k / n) θ_k

What is protected: Nothing. A personal model never leaves, but its institution's θ_k does.

Deviations: Those of FedAvg. λ is one for all; in the paper each device chooses its own on validation examples. Both
models make E passes over the same batches; the paper's v_k makes a number of steps of its own, s. v_k begins as the
first θ that its institution receives, and each round with fresh momentum. λ = 0 is Local with optimizer-state=reset,
bit for bit. Metrics are those of personal models, each on its institution's own test examples; the global model's have
the prefix global-. Numbers of steps and examples are those of the global model: with personal ones there are twice as
many.
"""

from dataclasses import dataclass, replace

from flwr_replay.config.sections import NOT_NEGATIVE_FINITE, within
from flwr_replay.payloads.ditto import EvaluatePersonal, PersonalEvaluation, TrainPersonal
from flwr_replay.strategies.fedavg import FedAvg, FedAvgConfig
from flwr_replay.wire.records import Weights

__all__ = ["Ditto", "DittoConfig"]


@dataclass(frozen=True, kw_only=True)
class DittoConfig(FedAvgConfig):
    """Options of Ditto."""

    name = "ditto"
    # not classifier: DP-SGD has no term beside the loss
    traits = replace(
        FedAvgConfig.traits,
        supports_draws=False,
        dp_mechanisms=("generator", "prior"),
        needs_roll_call=True,
        own_models=True,
        private_key="model",
        metrics_note="ditto tests each institution's personal model on that institution's test examples only",
    )
    lam: float = 1.0  # λ, weight of the personal models' distance from the global one; paper: 0.05 to 2

    def __post_init__(self) -> None:
        super().__post_init__()
        within("strategy.", self, lam=NOT_NEGATIVE_FINITE)


class Ditto(FedAvg):
    """FedAvg, with a personal model at each institution."""

    config_type = DittoConfig
    config: DittoConfig
    stages = ("train-personal", "evaluate-personal")
    evaluated = PersonalEvaluation

    def train_request(self, exchange: int, arrays: Weights) -> TrainPersonal:
        """Send θ and λ to every institution."""
        return TrainPersonal(**vars(super().train_request(exchange, arrays)), lam=self.config.lam)

    def evaluation(self, exchange: int, arrays: Weights) -> EvaluatePersonal:
        """Each institution tests its personal model, and the global one."""
        return EvaluatePersonal(exchange=exchange, arrays=arrays, run=self.settings.run)
