"""What travels in FedReplay: an encoder, and once per institution the latent variables with their labels.

A latent variable is a function of one patient's image. Anybody who has it and the encoder can try to invert it. With
dp=encoder the encoder is differentially private, with dp=latents the latent variables and labels are, each by itself.
"""

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from flwr_replay.payloads.common import Evaluate, LabelScale, Spending, Spent
from flwr_replay.payloads.ditto import PersonalEvaluation
from flwr_replay.payloads.mutual import Listening
from flwr_replay.wire.fields import instruction, model, per_sample, statistic
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import Weights

__all__ = ["Encode", "Encoder", "EvaluatePooled", "Extract", "Latents"]


@dataclass(frozen=True, kw_only=True)
class Encoder(Spent):
    """The part before the cut of a backbone that one institution has trained."""

    arrays: Weights = model(part=True, dp="encoder")
    num_examples: int = statistic("examples", public=True)
    examples_seen: int = statistic("examples", public=True)
    train_loss: float | None = statistic("the task's loss, mean over the best epoch", default=None, withheld=True)
    validation_loss: float | None = statistic("the task's loss, of the best epoch", default=None, withheld=True)
    epochs: int = statistic("epochs until training stopped; under DP all that were requested", public=True)


@dataclass(frozen=True, kw_only=True)
class Encode(Spending, LabelScale, Request, stage="encode", answer=Encoder):
    """Stage 1: train this whole backbone until it stops improving; return the part before the cut."""

    arrays: Weights = model()
    run: str = instruction()
    cut: str = instruction("stage")
    lr: float = instruction("per step")
    max_epochs: int = instruction("epochs")
    patience: int = instruction("epochs without a better validation loss")


@dataclass(frozen=True, kw_only=True)
class Latents(Spent):
    """One chunk of an institution's latent variables and labels."""

    latents: NDArray[Any] = per_sample("N ...", "float32", "float16", "int8", means="activations", dp="latents")
    labels: NDArray[Any] = per_sample("N ...", "int64", "float32", "uint8", means="labels", dp="latents")
    # int8 only: value = scale * code
    scales: NDArray[Any] | None = per_sample("N", "float32", means="scales", dp="latents", default=None)
    num_examples: int = statistic("examples, the institution's, before views", public=True)
    first: int = statistic("row of the upload at which this chunk begins", public=True)
    total: int = statistic("rows of the whole upload: examples times views", public=True)
    raw_bytes: int = statistic("bytes of the raw examples that this chunk stands for", public=True)


@dataclass(frozen=True, kw_only=True)
class Extract(Spending, Request, stage="extract", answer=Latents):
    """Stage 2: encode your training examples with this encoder and upload the rows from `first` on."""

    arrays: Weights = model()
    run: str = instruction()
    cut: str = instruction("stage")
    latent_dtype: str = instruction("float32, float16 or int8")
    first: int = instruction("row")
    chunk_bytes: int = instruction("most bytes of the answer")
    views: int = instruction("views of each example")


@dataclass(frozen=True, kw_only=True)
class EvaluatePooled(Listening, Evaluate, stage="evaluate-pooled", answer=PersonalEvaluation, message_type="evaluate"):
    """Test these weights pooled with a model of your own, and alone."""

    own_epochs: int = instruction("passes that the own model trains, once in a run", default=10)
