"""What travels where institutions draw synthetic images: buffers with labels, up once and to each receiver once.

A generator stays with the institution that trains it. An image that it draws is no patient's image, but it depends on
all of them: without DP nothing bounds how much it shows of one. Labels are uniform over some classes, under DP over
those that the institution declares, whatever its examples are.
"""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from flwr_replay.payloads.common import Spending, Spent
from flwr_replay.payloads.replay import Kept, Trains
from flwr_replay.wire.fields import instruction, statistic, synthetic
from flwr_replay.wire.payload import Request

__all__ = ["Buffer", "DrawBuffer", "KeepBuffer", "TrainPiece", "TrainedPiece"]


@dataclass(frozen=True, kw_only=True)
class TrainedPiece(Trains):
    """How far the training of an institution's generator is; the generator stays there."""

    num_examples: int = statistic("examples", public=True)
    loss: float | None = statistic("mean over the steps of this message", default=None, dp="generator", withheld=True)
    margin: float | None = statistic("at the end: m of the privacy loss", default=None, withheld=True)
    diversity: float | None = statistic(
        "at the end: of images drawn, over that of real ones", default=None, withheld=True
    )
    precision: float | None = statistic(
        "at the end: share of images drawn among real ones", default=None, withheld=True
    )


@dataclass(frozen=True, kw_only=True)
class TrainPiece(Spending, Request, stage="train-piece", answer=TrainedPiece):
    """Train your generator for some more steps on your own images."""

    run: str = instruction()


@dataclass(frozen=True, kw_only=True)
class Buffer(Spent):
    """Images that an institution's generator has drawn, with the labels for which they were drawn."""

    images: NDArray[Any] = synthetic("N C H W", "uint8", means="images", dp="generator")
    labels: NDArray[Any] = synthetic("N", "int64", means="labels", dp="generator")
    num_examples: int = statistic("examples, real ones that the generator has learned", public=True)


@dataclass(frozen=True, kw_only=True)
class DrawBuffer(Spending, Request, stage="draw-buffer", answer=Buffer):
    """Draw this number of images from your trained generator."""

    run: str = instruction()
    buffer: int = instruction("images")
    buffer_refresh: str = instruction("never: always the same images | round: others in every exchange")


@dataclass(frozen=True, kw_only=True)
class KeepBuffer(Request, stage="keep-buffer", answer=Kept):
    """Save another institution's buffer; later requests name it by its number."""

    run: str = instruction()
    number: int = instruction("the number of this buffer in the run")
    buffer: int = instruction("images in it: as many as the run's options say")
    images: NDArray[Any] = synthetic("N C H W", "uint8", means="images")
    labels: NDArray[Any] = synthetic("N", "int64", means="labels")
