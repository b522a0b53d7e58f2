"""MyMethod: the server's half; the institution's half is `client.py`.

Source: yours.
Idea: As FedAvg, but an institution that moves the model much further than the others is drawn back.
Travels: the weights, to every institution (`TrainMyMethod`) and back (`TrainedMyMethod`, with the distance moved).

    for each round:
        for each institution k in parallel: θ_k ← train θ at k; d_k ← |θ_k - θ|
        c ← bound · median of all d_k
        θ ← Σ_k (n_k / n) (θ + min(1, c / d_k) (θ_k - θ))
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flwr_replay.config.strategy import Traits
from flwr_replay.errors import ConfigError
from flwr_replay.movements.parallel import weighted_mean
from flwr_replay.strategies.fedavg import FedAvg, FedAvgConfig
from flwr_replay.wire.records import StateDict, Weights, opened
from mymethod.payload import TrainedMyMethod, TrainMyMethod

__all__ = ["MyMethod", "MyMethodConfig"]


@dataclass(frozen=True, kw_only=True)
class MyMethodConfig(FedAvgConfig):
    """Options of MyMethod: FedAvg's, and the bound."""

    name = "mymethod"
    traits = Traits(takes_fraction=True, needs_roll_call=True, own_batches=True)  # no DP: the distance has no noise
    bound: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bound > 0:
            raise ConfigError(f"strategy.bound must be positive; got {self.bound}")


class MyMethod(FedAvg):
    """All train at once; the server draws back who moved too far, and averages."""

    config_type = MyMethodConfig
    config: MyMethodConfig
    stages = ("train-mymethod", "evaluate")
    answer = TrainedMyMethod

    def train_request(self, exchange: int, arrays: Weights) -> TrainMyMethod:
        """Send θ to every institution."""
        return TrainMyMethod(**vars(super().train_request(exchange, arrays)))

    def combine(self, answers: Sequence[TrainedMyMethod]) -> StateDict:  # type: ignore[override]
        """Average what was drawn back: θ ← Σ_k (n_k / n) (θ + min(1, c / d_k) (θ_k - θ))."""
        c = self.config.bound * float(np.median([answer.moved for answer in answers]))
        shares = [c / answer.moved if answer.moved > c else 1.0 for answer in answers]
        states = [drawn_back(self.sent, opened(a.arrays), share) for a, share in zip(answers, shares, strict=True)]
        return weighted_mean(states, [answer.num_examples for answer in answers])


def drawn_back(sent: StateDict, state: StateDict, share: float) -> StateDict:
    """Return θ + share · (θ_k - θ), each array in its own dtype; whole numbers, as of batch counters, stay θ_k's."""
    return {
        name: (sent[name] + share * (array - sent[name])).astype(array.dtype)
        if share < 1 and np.issubdtype(array.dtype, np.floating)
        else array
        for name, array in state.items()
    }
