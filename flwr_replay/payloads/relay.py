"""What travels where institutions exchange models over a graph: released models up, parcels of the others' down.

A model goes up once, whoever receives it, beside its weight; the server deals out shares as numbers and forwards the
models as they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from flwr_replay.payloads.common import LabelScale, Spending, Spent
from flwr_replay.wire.fields import instruction, model, statistic
from flwr_replay.wire.payload import Payload, Request
from flwr_replay.wire.records import Weights

__all__ = ["Committed", "Deliver", "Released", "TrainPeer"]


@dataclass(frozen=True, kw_only=True)
class Released(Spent):
    """A model that an institution has trained and gives away, none where nobody can receive it, and how that went."""

    arrays: Weights = model(dp="classifier")
    weight: float = statistic("w of PushSum, 1 on average; it follows from the topology", public=True)
    num_examples: int = statistic("examples", public=True)
    examples_seen: int = statistic("examples; with repetition", public=True)
    train_loss: float | None = statistic("as the task has it, mean over the training", default=None, withheld=True)

    @classmethod
    def empty(cls, arrays: Weights) -> Self:
        """Return the answer of a training without any example."""
        return cls(arrays=arrays, weight=1.0, num_examples=0, examples_seen=0, train_loss=0.0)


@dataclass(frozen=True, kw_only=True)
class TrainPeer(Spending, LabelScale):
    """What a request to train says where the model lives at the institution."""

    run: str = instruction()
    lr: float = instruction("per step")
    init_seed: int = instruction("of the fresh weights, used at the first training")
    committed: int = instruction("exchange of the last parcels that the institution has acknowledged; 0: none yet")
    exchanged: bool = instruction("somebody may receive the model; else it stays", default=True)
    optimizer_state: str = instruction("keep or reset", default="keep")
    continues: bool = instruction("the institution has trained in this run before", default=False)


@dataclass(frozen=True, kw_only=True)
class Committed(Payload):
    """The parcels of an exchange have been mixed and are on the institution's disk."""

    num_examples: int = statistic("examples", public=True)
    parcels: Sequence[int] = statistic("numbers of those that it holds", default=(), public=True)


@dataclass(frozen=True, kw_only=True)
class Deliver(Request, stage="deliver", answer=Committed):
    """Kalra et al. 2023, Algorithm 1, lines 7-10: mix what you keep of your model with these shares of the others'."""

    arrays: Weights = model()  # of every parcel a state dict, under its number
    run: str = instruction()
    exchange: int = instruction("in which these were released, and the institution's own")
    kept: float = instruction("share of its own that the institution keeps")
    parcels: Sequence[int] = instruction("numbers of the models, senders by name", default=())
    shares: Sequence[float] = instruction("of each sender's model", default=())
    weights: Sequence[float] = instruction("w of each sender", default=())
