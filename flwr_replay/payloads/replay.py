"""What travels for generative replay: a generator, and codes of patients' images with their labels, or priors.

A code is a function of one patient's image: anybody who has it and the decoder sees the reconstruction. Labels travel
with the codes, unprotected. With priors neither codes nor labels travel; the number of examples of each label does.

Training a generator or a prior may take several messages. The first request has the weights, the last answer has them
after the training. All between say how many steps were made and how many are left.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from flwr_replay.payloads.common import LabelScale, Spending, Spent
from flwr_replay.wire.fields import instruction, model, per_sample, statistic
from flwr_replay.wire.payload import Payload, Request
from flwr_replay.wire.records import Weights

__all__ = [
    "Codes",
    "EncodeImages",
    "Generated",
    "KeepCodes",
    "KeepDecoder",
    "KeepPrior",
    "Kept",
    "TrainGenerator",
    "TrainPrior",
    "TrainedPrior",
    "Trains",
]


@dataclass(frozen=True, kw_only=True)
class Trains(Spent):
    """Fields of an answer to a message of a training that may take several: how far it is."""

    steps: int = statistic("steps made so far", public=True)
    steps_left: int = statistic("steps to the end of the training", public=True)


@dataclass(frozen=True, kw_only=True)
class Generated(Trains):
    """How far an institution's training of the generator is; at its end the generator, with losses."""

    arrays: Weights | None = model(dp="generator", means="generator weights", optional=True)
    num_examples: int = statistic("examples", public=True)
    examples_seen: int = statistic("examples so far, replayed ones included", public=True)
    losses: Sequence[float] = statistic("mean over each epoch", default=(), withheld=True)
    perplexity: Sequence[float] = statistic("codes in use, top and bottom, last batch", default=(), withheld=True)


@dataclass(frozen=True, kw_only=True)
class TrainGenerator(Spending, Request, stage="train-generator", answer=Generated):
    """Algorithm 1, lines 7-18: train this generator on your images and on replayed ones; none: go on training."""

    arrays: Weights | None = model(means="generator weights", optional=True)
    run: str = instruction()
    replayed: int = instruction("examples that the institution keeps for replay")


@dataclass(frozen=True, kw_only=True)
class Codes(Payload):
    """Packed codes of images, with their labels."""

    codes: NDArray[Any] = per_sample("N bytes", "uint8", means="codes")
    labels: NDArray[Any] = per_sample("N", "int64", "float32", means="labels")
    num_examples: int = statistic("examples, the institution's own", public=True)
    raw_bytes: int = statistic("bytes of the raw examples behind the institution's own codes", public=True)


@dataclass(frozen=True, kw_only=True)
class EncodeImages(Request, stage="encode-images", answer=Codes):
    """Algorithm 1, line 19: encode the replayed images, then your own, with this generator."""

    arrays: Weights = model(means="generator weights")
    run: str = instruction()
    replayed: int = instruction("examples that the institution keeps for replay; 0: encode none of them")


@dataclass(frozen=True, kw_only=True)
class Kept(Payload):
    """Confirms that the institution has saved what it received."""

    num_examples: int = statistic("examples that the saved codes or the prior stand for", public=True)


@dataclass(frozen=True, kw_only=True)
class KeepCodes(Request, stage="keep-codes", answer=Kept):
    """Save these codes; they replace those received before."""

    run: str = instruction()
    codes: NDArray[Any] = per_sample("N bytes", "uint8", means="codes")
    labels: NDArray[Any] = per_sample("N", "int64", "float32", means="labels")


@dataclass(frozen=True, kw_only=True)
class KeepDecoder(Request, stage="keep-decoder", answer=Kept):
    """Save this decoder, which turns the codes into images."""

    run: str = instruction()
    arrays: Weights = model(means="generator weights")


@dataclass(frozen=True, kw_only=True)
class TrainedPrior(Trains):
    """How far the training of a prior is; at its end the prior.

    The decoder of the codes that it draws is not in its state dict.
    """

    arrays: Weights | None = model(part=True, dp="prior", means="generator weights", optional=True)
    num_examples: int = statistic("examples", public=True)
    examples_seen: int = statistic("examples so far", public=True)
    losses: Sequence[float] = statistic("nats per code, mean over each epoch", default=(), withheld=True)
    label_counts: Sequence[int] = statistic("examples of each class, or bin of a number", default=(), dp="label counts")


@dataclass(frozen=True, kw_only=True)
class TrainPrior(Spending, LabelScale, Request, stage="train-prior", answer=TrainedPrior):
    """Footnote 1: train this prior on the codes of your images by this generator; none: go on training."""

    arrays: Weights | None = model(means="generator weights", optional=True)  # under generator. and prior.
    run: str = instruction()


@dataclass(frozen=True, kw_only=True)
class KeepPrior(LabelScale, Request, stage="keep-prior", answer=Kept):
    """Draw as many codes of each label from this prior as `label_counts` says; save them with its decoder."""

    arrays: Weights = model(means="generator weights")  # under decoder. and prior.
    run: str = instruction()
    source: int = instruction("number of the prior, from 0 in the order of training")
    label_counts: Sequence[int] = statistic("examples of each class, or bin of a number")
