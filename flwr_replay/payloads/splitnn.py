"""What travels in SplitNN: activations and gradients at the cut, batch by batch; the institution's part of the model.

Activations are functions of single patients' images, and the gradients that come back are functions of the same
patients' images and labels; nothing here is differentially private. With `share-labels=false` none of the payloads has
a field for labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from flwr_replay.payloads.common import ExpectsReplay, LabelScale
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
    """What the part before the cut makes of the batches of one message."""

    activations: NDArray[Any] = per_sample("N ...", "float32")
    num_examples: int = statistic("examples, the institution's")


@dataclass(frozen=True, kw_only=True)
class LabelledActivations(Activations):
    """The same with their labels."""

    labels: NDArray[Any] = per_sample("N ...", "int64", "float32", "uint8")


@dataclass(frozen=True, kw_only=True)
class HeadGradients(Payload):
    """Gradients of the batches' losses at the head's input; they tell about labels."""

    gradients: NDArray[Any] = per_sample("N ...", "float32")
    losses: list[float] = statistic("as the task has it, a mean for each batch")
    num_examples: int = statistic("examples, the institution's")


@dataclass(frozen=True, kw_only=True)
class Half(Payload):
    """The institution's part of the model at the end of a visit."""

    arrays: Weights = model(part=True)
    num_examples: int = statistic("examples")


@dataclass(frozen=True, kw_only=True)
class VisitRequest(ExpectsReplay):
    """Where in a visit a message belongs, and how to train: no process need remember it."""

    run: str = instruction()
    cut: str = instruction("stage")
    with_head: bool = instruction("the institution has the head, too")
    lr: float = instruction("per step")
    optimizer_state: str = instruction("keep or reset")
    micro_batches: int = instruction("batches that a message holds")
    message: int = instruction("of this visit, from 0")
    group: int = instruction("of micro_batches batches, from 0: whose activations are asked for, or whose loss")


@dataclass(frozen=True, kw_only=True)
class Enter(VisitRequest, Request, stage="enter", answer=LabelledActivations):
    """Take this part of the model and upload the first activations."""

    arrays: Weights = model(part=True)
    continues: bool = instruction("the institution has trained in this run before", default=False)


@dataclass(frozen=True, kw_only=True)
class NextBatch(VisitRequest, Request, stage="next-batch", answer=LabelledActivations):
    """Step on the gradients of the group before, then upload the activations of this one."""

    gradients: NDArray[Any] = per_sample("N ...", "float32")


@dataclass(frozen=True, kw_only=True)
class EnterUnlabelled(Enter, stage="enter-unlabelled", answer=Activations):
    """As `Enter`; labels stay."""


@dataclass(frozen=True, kw_only=True)
class NextBatchUnlabelled(NextBatch, stage="next-batch-unlabelled", answer=Activations):
    """As `NextBatch`; labels stay."""


@dataclass(frozen=True, kw_only=True)
class HeadLoss(VisitRequest, LabelScale, Request, stage="head-loss", answer=HeadGradients):
    """Step the head on this group, whose outputs of the server's part are here."""

    outputs: NDArray[Any] = per_sample("N ...", "float32")


@dataclass(frozen=True, kw_only=True)
class Leave(VisitRequest, Request, stage="leave", answer=Half):
    """Step on the last gradients, then give your part of the model back."""

    gradients: NDArray[Any] = per_sample("N ...", "float32")
