"""What travels in FedSGD: the weights down, one gradient up."""

from dataclasses import dataclass

from flwr_replay.payloads.common import ExpectsReplay, LabelScale, Spending, Summed, Trained
from flwr_replay.wire.fields import instruction, model
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import Weights

__all__ = ["Differentiate", "Gradient"]


@dataclass(frozen=True, kw_only=True)
class Gradient(Trained):
    """The gradient of the mean loss over all training examples, by parameter name.

    No step is taken here, so the number of steps is 0: the server takes one on the mean of the gradients.

    Under the names of buffers (running statistics of batch norm) are their new values. Without dp=gradient nothing
    protects it.
    """

    arrays: Weights = model(means="gradient", dp="gradient")


@dataclass(frozen=True, kw_only=True)
class Differentiate(Spending, ExpectsReplay, LabelScale, Summed, Request, stage="differentiate", answer=Gradient):
    """Compute the gradient of the loss at these weights over all your training examples."""

    arrays: Weights = model()
    run: str = instruction()
