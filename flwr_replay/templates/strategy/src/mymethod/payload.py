"""What travels in MyMethod: as in FedAvg, and how far each institution has moved the model."""

from __future__ import annotations

from dataclasses import dataclass

from flwr_replay.payloads.common import Train, Trained
from flwr_replay.wire.fields import statistic
from flwr_replay.wire.records import Weights

__all__ = ["TrainMyMethod", "TrainedMyMethod"]


@dataclass(frozen=True, kw_only=True)
class TrainedMyMethod(Trained):
    """The trained weights, with counts, a loss, and the distance."""

    moved: float = statistic("Euclidean distance of the trained weights from those received")

    @classmethod
    def empty(cls, arrays: Weights) -> TrainedMyMethod:
        """Return the answer of a training without examples."""
        return cls(arrays=arrays, num_examples=0, examples_seen=0, num_steps=0, train_loss=0.0, moved=0.0)


@dataclass(frozen=True, kw_only=True)
class TrainMyMethod(Train, stage="train-mymethod", answer=TrainedMyMethod):
    """Train these weights on your data, and say how far they moved."""
