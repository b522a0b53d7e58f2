"""FedBN: the server's half; the institution's half is `clients/fedbn.py`.

Source: Li et al. 2021 (arXiv 2102.07623), Algorithm 1.
Idea: FedAvg of all layers but batch norm, of which each institution has its own: for images that look different.
Travels: the weights, to every institution (`TrainShared`), and back without batch norm's (`TrainedShared`).

    for each round:
        for each institution k in parallel: θ_k, ν_k ← train (θ, ν_k) at k
        θ ← Σ_k (n_k / n) θ_k

    ν: weights and statistics of batch norm

What is protected: Nothing. That batch norm stays protects nobody: the other weights depend on the same images.

Deviations: Those of FedAvg; the paper weighs all institutions alike. The batch norm with which all begin is sent in
every round, and used in the first. Batch norm is what keeps a running mean, so instance norm that does is, too. Without
it this is FedAvg, bit for bit, and the log says so. There is no common model: institutions test, and keep, θ with their
own ν_k.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flwr_replay.payloads.common import Trained
from flwr_replay.payloads.fedbn import TrainedShared, TrainShared, of_norms
from flwr_replay.server.members import Member
from flwr_replay.strategies.fedavg import FedAvg, FedAvgConfig
from flwr_replay.wire.records import StateDict, Weights, array_record, opened

__all__ = ["FedBN", "FedBNConfig"]


@dataclass(frozen=True, kw_only=True)
class FedBNConfig(FedAvgConfig):
    """Options of FedBN."""

    name = "fedbn"
    traits = replace(
        FedAvgConfig.traits,
        supports_draws=False,
        summed=False,
        dp_mechanisms=("generator", "prior"),
        needs_roll_call=True,
        own_models=True,
        global_model=False,
        private_key="model",
        metrics_note="fedbn tests each institution's own model, with its own batch norm, on its own test examples",
    )


class FedBN(FedAvg):
    """FedAvg of all layers but batch norm."""

    config_type = FedBNConfig
    config: FedBNConfig
    stages = ("train-shared", "evaluate")
    answer = TrainedShared

    def begin_run(self) -> None:
        """Say once if there is no batch norm."""
        super().begin_run()
        if self.settings.model and not of_norms(self.settings.model(0).state_dict()):
            self.recorder.log("FedBN: the model has no batch norm that keeps statistics, so this is FedAvg")

    def train_request(self, exchange: int, arrays: Weights) -> TrainShared:
        """Send θ, and the batch norm with which all begin."""
        return TrainShared(**vars(super().train_request(exchange, arrays)))

    def combine(self, answers: Sequence[Trained]) -> StateDict:
        """Average what is shared."""
        return {**self.sent, **super().combine(answers)}

    def tested_on(self, split: str, member: Member, arrays: Weights) -> Weights | None:
        """Return θ, or θ_k with the batch norm of the beginning, which institutions replace."""
        tested = super().tested_on(split, member, arrays)
        return tested if tested is None or tested is arrays else array_record({**of_norms(self.sent), **opened(tested)})

    def models_at_end(self, arrays: StateDict) -> Mapping[str, StateDict]:
        """Return none: nobody's batch norm is here."""
        return {}
