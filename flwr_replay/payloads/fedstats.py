"""What travels in FedStats: a head with what lies before it down, once the sums of features by class up."""

from __future__ import annotations

from dataclasses import dataclass

from flwr_replay.payloads.common import Spending, Summed, Trained
from flwr_replay.wire.fields import instruction, model
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import Weights

__all__ = ["ClassSums", "Summarise"]


@dataclass(frozen=True, kw_only=True)
class ClassSums(Trained):
    """Sums over the training examples, in the place of the head's weights: by class of features, and of examples.

    Both are in units of the noise (`flwr_replay.privacy.sums.noises`), and divided by the number of examples. All other
    weights are as they were sent. No step is taken.
    """

    arrays: Weights = model(means="class sums", dp="statistics")

    @classmethod
    def empty(cls, arrays: Weights) -> ClassSums:
        """Return the sums of nothing; there is no loss."""
        return cls(arrays=arrays, num_examples=0, examples_seen=0, num_steps=0)


@dataclass(frozen=True, kw_only=True)
class Summarise(Spending, Summed, Request, stage="summarise", answer=ClassSums):
    """Sum the features that these weights make of your training examples, class by class."""

    arrays: Weights = model()
    run: str = instruction()
    clip: float = instruction("the largest L2 norm of an image's features")
