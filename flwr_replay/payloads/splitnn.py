"""What travels in SplitNN: activations and gradients at the cut, batch by batch; the institution's part of the model.

Activations are functions of single patients' images. The gradients that come back are functions of the same patients'
images and labels. Nothing here is differentially private. With `share-labels=false` no payload has a field for labels.
"""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from flwr_replay.payloads.common import LAST_TRAINING, ExpectsReplay, LabelScale
from flwr_replay.wire.fields import instruction, model, per_sample, statistic
from flwr_replay.wire.payload import Payload, Request
from flwr_replay.wire.records import Weights

__all__ = [
    "Activations",
    "Enter",
    "EnterUnlabelled",
    "Half",
    "HeadGradients",
    "HeadLoss",
    "LabelledActivations",
    "Leave",
    "NextBatch",
    "NextBatchUnlabelled",
    "VisitRequest",
]


@dataclass(frozen=True, kw_only=True)
class Activations(Payload):
    """The activations at the cut for the batches of one message."""

    activations: NDArray[Any] = per_sample("N ...", "float32", means="activations")
    num_examples: int = statistic("examples, the institution's")


@dataclass(frozen=True, kw_only=True)
class LabelledActivations(Activations):
    """Activations with their labels."""

    labels: NDArray[Any] = per_sample("N ...", "int64", "float32", "uint8", means="labels")


@dataclass(frozen=True, kw_only=True)
class HeadGradients(Payload):
    """Gradients of the batches' losses at the head's input; they reveal something about the labels."""

    gradients: NDArray[Any] = per_sample("N ...", "float32", means="gradients at a cut")
    losses: list[float] = statistic("the task's loss, a mean for each batch")
    num_examples: int = statistic("examples, the institution's")


@dataclass(frozen=True, kw_only=True)
class Half(Payload):
    """The institution's part of the model at the end of a visit."""

    arrays: Weights = model(part=True)
    num_examples: int = statistic("examples")


@dataclass(frozen=True, kw_only=True)
class VisitRequest(ExpectsReplay):
    """Fields of every request of a visit: its place in the visit, and how to train. No process has to remember them."""

    run: str = instruction()
    cut: str = instruction("stage")
    with_head: bool = instruction("whether the institution has the head")
    lr: float = instruction("per step")
    optimizer_state: str = instruction("keep or reset")
    micro_batches: int = instruction("batches that a message holds")
    message: int = instruction("number in this visit, from 0")
    group: int = instruction("number of the requested group of micro_batches batches, from 0")


@dataclass(frozen=True, kw_only=True)
class Enter(VisitRequest, Request, stage="enter", answer=LabelledActivations):
    """Use this part of the model and upload the first activations."""

    arrays: Weights = model(part=True)
    continues: int = instruction(LAST_TRAINING, default=0)


@dataclass(frozen=True, kw_only=True)
class NextBatch(VisitRequest, Request, stage="next-batch", answer=LabelledActivations):
    """Step on the gradients of the previous group, then upload the activations of this one."""

    gradients: NDArray[Any] = per_sample("N ...", "float32", means="gradients at a cut")


@dataclass(frozen=True, kw_only=True)
class EnterUnlabelled(Enter, stage="enter-unlabelled", answer=Activations):
    """`Enter` for an answer without labels."""


@dataclass(frozen=True, kw_only=True)
class NextBatchUnlabelled(NextBatch, stage="next-batch-unlabelled", answer=Activations):
    """`NextBatch` for an answer without labels."""


@dataclass(frozen=True, kw_only=True)
class HeadLoss(VisitRequest, LabelScale, Request, stage="head-loss", answer=HeadGradients):
    """Step the head on this group; `outputs` are those of the server's part."""

    outputs: NDArray[Any] = per_sample("N ...", "float32", means="activations")


@dataclass(frozen=True, kw_only=True)
class Leave(VisitRequest, Request, stage="leave", answer=Half):
    """Step on the last gradients, then return your part of the model."""

    gradients: NDArray[Any] = per_sample("N ...", "float32", means="gradients at a cut")
