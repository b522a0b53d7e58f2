"""What travels in MyMethod: as in FedAvg, and how far each institution has moved the model."""

from dataclasses import dataclass

from flwr_replay.payloads.common import Train, Trained
from flwr_replay.wire.fields import statistic

__all__ = ["TrainMyMethod", "TrainedMyMethod"]


@dataclass(frozen=True, kw_only=True)
class TrainedMyMethod(Trained):
    """The trained weights, with counts, a loss, and the distance."""

    moved: float = statistic("Euclidean distance of the trained weights from those received")


@dataclass(frozen=True, kw_only=True)
class TrainMyMethod(Train, stage="train-mymethod", answer=TrainedMyMethod):
    """Train these weights on your data, and say how far they moved."""
