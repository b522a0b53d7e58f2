"""What travels in FedAvg+Share in addition to FedAvg's weights: raw examples of some patients, to all institutions."""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from flwr_replay.payloads.common import Train, Trained
from flwr_replay.wire.fields import instruction, per_sample, statistic
from flwr_replay.wire.payload import Payload, Request

__all__ = ["Give", "Given", "Receive", "Received", "TrainEnlarged", "number_shared"]


@dataclass(frozen=True, kw_only=True)
class Given(Payload):
    """Some of an institution's raw training examples."""

    images: NDArray[Any] = per_sample("N C H W", "uint8", "float32", means="images", raw=True)
    labels: NDArray[Any] = per_sample("N ...", "int64", "float32", "uint8", means="labels", raw=True)
    num_examples: int = statistic("examples, all that the institution has")
    raw_bytes: int = statistic("bytes of these examples as the institution holds them")


@dataclass(frozen=True, kw_only=True)
class Give(Request, stage="give", answer=Given):
    """Give this share of your training examples with all institutions."""

    run: str = instruction()
    share: float = instruction("fraction of the examples")


@dataclass(frozen=True, kw_only=True)
class TrainEnlarged(Train, stage="train-enlarged", answer=Trained):
    """Train these weights on your data and on the examples of others that you have received."""

    held: int = instruction("examples of others that you have received", default=0)
    received_in: int = instruction("exchange in which you received them; 0: none", default=0)


@dataclass(frozen=True, kw_only=True)
class Received(Payload):
    """Confirms that the institution has saved the others' examples."""

    num_examples: int = statistic("examples of others that the institution now holds")


@dataclass(frozen=True, kw_only=True)
class Receive(Request, stage="receive", answer=Received):
    """Save these examples of other institutions and train on them too; they replace those received before."""

    run: str = instruction()
    images: NDArray[Any] = per_sample("N C H W", "uint8", "float32", means="images", raw=True)
    labels: NDArray[Any] = per_sample("N ...", "int64", "float32", "uint8", means="labels", raw=True)


def number_shared(examples: int, share: float) -> int:
    """Return the number of examples in a share, at least one."""
    return max(1, round(share * examples))
