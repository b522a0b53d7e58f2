"""FedAvgM: the server's half; the institution's half is `clients/fedavgm.py`.

Source: Hsu et al. 2019 (arXiv:1909.06335), section 4.3; Qu et al. 2022, section 4.1.
Idea: FedAvg with momentum at the server.
Travels: as in FedAvg: the weights, to every institution (`Train`) and back (`Trained`, with counts and a loss).

    v ← 0
    for each round:
        for each institution k in parallel: θ_k ← train θ at k
        v ← β v + Σ_k (n_k / n) (θ - θ_k)
        θ ← θ - v

Deviations: The running statistics of batch norm are averaged as in FedAvg. Momentum could make a variance negative.
β = 0 is FedAvg, bit for bit. Flower's own FedAvgM is not the base class: it applies momentum to these statistics too,
and it has the faults of Flower's FedAvg.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flwr_replay.config.sections import FRACTION, within
from flwr_replay.payloads.common import Trained
from flwr_replay.strategies.fedavg import FedAvg, FedAvgConfig
from flwr_replay.wire.records import StateDict

__all__ = ["FedAvgM", "FedAvgMConfig"]

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # names in PyTorch's norm layers


@dataclass(frozen=True, kw_only=True)
class FedAvgMConfig(FedAvgConfig):
    """Options of FedAvgM."""

    name = "fedavgm"
    traits = FedAvgConfig.traits
    server_momentum: float = 0.9  # β

    def __post_init__(self) -> None:
        super().__post_init__()
        within("strategy.", self, server_momentum=FRACTION)


class FedAvgM(FedAvg):
    """FedAvg with momentum at the server."""

    config_type = FedAvgMConfig
    config: FedAvgMConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.velocity: StateDict = {}

    def combine(self, answers: Sequence[Trained]) -> StateDict:
        """Average, then add momentum: θ - (β v + θ - mean) = mean - β v."""
        mean, beta = super().combine(answers), self.config.server_momentum
        for name, array in mean.items():
            if name.rsplit(".", 1)[-1] in STATISTICS or not np.issubdtype(array.dtype, np.floating):
                continue
            before = self.velocity.get(name, np.zeros_like(array))
            self.velocity[name] = beta * before + (self.sent[name] - array)
            mean[name] = array - beta * before
        return mean

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return v."""
        return self.velocity, {}

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Restore v."""
        self.velocity = dict(arrays)
