"""What travels in MOON: what FedAvg sends, and two numbers."""

from dataclasses import dataclass

from flwr_replay.payloads.common import Train, Trained
from flwr_replay.wire.fields import instruction

__all__ = ["TrainContrasted"]


@dataclass(frozen=True, kw_only=True)
class TrainContrasted(Train, stage="train-contrasted", answer=Trained):
    """Train these weights near the features that they give now, and off those of what you have trained last."""

    mu: float = instruction("weight of the contrastive term")
    temperature: float = instruction("of the contrast, a number above 0")
