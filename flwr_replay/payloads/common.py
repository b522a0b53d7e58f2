"""The payloads that all methods share: roll call, training, evaluation, failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from flwr.app import RecordDict

from flwr_replay.errors import WireError
from flwr_replay.wire.bounds import LARGEST_NUMBER
from flwr_replay.wire.fields import instruction, model, notice, statistic
from flwr_replay.wire.payload import Payload, Request
from flwr_replay.wire.records import Weights

__all__ = [
    "LAST_TRAINING",
    "MOST",
    "OPEN_STAGES",
    "STEPS",
    "ChargedRequest",
    "DPRequest",
    "Evaluate",
    "Evaluation",
    "ExpectsReplay",
    "Failure",
    "LabelScale",
    "Present",
    "ResumeRequest",
    "RollCall",
    "RunRequest",
    "Spending",
    "Spent",
    "Summed",
    "SuspendRequest",
    "Train",
    "Trained",
    "Unmask",
    "Unmasked",
    "whole_number",
]

MOST = 10**9  # the most examples that an institution may report
STEPS = "optimizer steps; they follow from numbers of examples, batch size and passes, under DP-SGD too"
LAST_TRAINING = "exchange of the institution's last training in this run; 0: none"
OPEN_STAGES = ("roll-call", "train", "evaluate")  # a user's own ClientApp may answer these with its own records


class RunRequest(Protocol):
    """A request of a run: its state at the institution depends on these."""

    @property
    def run(self) -> str:
        """The run's id."""

    @property
    def exchange(self) -> int:
        """The number of the exchange."""


class SuspendRequest(RunRequest, Protocol):
    """A request after which an institution may keep its optimizer's state."""

    @property
    def optimizer_state(self) -> str:
        """Either `keep` or `reset`."""


class ResumeRequest(SuspendRequest, Protocol):
    """A request to train, possibly from the optimizer state that the institution has kept."""

    @property
    def lr(self) -> float:
        """The learning rate, per step."""

    @property
    def continues(self) -> int:
        """The exchange of the institution's last training in this run that the server knows of; 0: none."""


class ChargedRequest(RunRequest, Protocol):
    """A request that an account is charged for where its answer is under DP."""

    @property
    def stated(self) -> float:
        """The epsilon that the institution stated last in this run."""


class DPRequest(ResumeRequest, ChargedRequest, Protocol):
    """A request to train on from what was kept, charged where it is under DP."""


@dataclass(frozen=True, kw_only=True)
class Failure(Payload):
    """Sent in place of an answer by an institution that refuses or fails."""

    failure: str = notice()  # one line: the rule, the value, what to do
    error: str = notice()  # the class of flwr_replay.errors
    name: str = notice(default="")  # the institution's, if it is known


@dataclass(frozen=True, kw_only=True)
class Present(Payload):
    """An institution's answer to the roll call."""

    name: str = notice("the institution's name")
    num_examples: int = statistic("examples", public=True)
    raw_bytes: int = statistic("bytes of the training examples as the institution holds them", public=True)
    label_sum: float | None = statistic(
        "label's unit; sum over the training labels, regression only", default=None, withheld=True
    )
    label_squares: float | None = statistic(
        "label's unit squared; sum over the training labels", default=None, withheld=True
    )
    proof: str = notice(  # for when it returns as another node: flwr_replay/state/store.py
        "proof that it is the same institution as before", default=""
    )
    pins: str = notice("SHA-256 of the names and public keys that it has pinned", default="")  # sealed or masked run


@dataclass(frozen=True, kw_only=True)
class RollCall(Request, stage="roll-call", answer=Present, message_type="query"):
    """Ask a node that joins for its name and its number of examples."""

    strategy: str = instruction()
    run: str = instruction()
    stages: Sequence[str] = instruction("all stages that the run will request", default=())
    record: str = instruction("which messages the server keeps for attacks: up or all; empty: none", default="")
    sealed: str = instruction(
        "all: arrays are sealed for other institutions; sums: under masks; empty: neither", default=""
    )
    form: str = instruction("digest of names, shapes and dtypes of the model that institutions exchange", default="")
    frozen: str = instruction("SHA-256 of the model's stages that do not train; empty: all train", default="")
    training: str = instruction("digest of the server's optimizer, batch size and so on", default="")


@dataclass(frozen=True, kw_only=True)
class LabelScale(Payload):
    """Fields of a request where labels are standardised: mean and scale for all, computed from what all reported."""

    label_mean: float | None = statistic("label's unit", default=None)
    label_scale: float | None = statistic("label's unit; standard deviation", default=None)


@dataclass(frozen=True, kw_only=True)
class Spending(Payload):
    """Field of a request whose answer may be under DP: the last ε stated, which reveals a restored old account."""

    stated: float = instruction("epsilon that the institution stated last in this run; 0: none yet", default=0.0)


@dataclass(frozen=True, kw_only=True)
class Spent(Payload):
    """Fields of an answer that is under DP: its epsilon and delta, computed from numbers of examples alone."""

    epsilon: float | None = statistic(
        "of all releases of the institution in this run; by Renyi DP, or exactly, of latents and where steps take all "
        "examples; none: its noise is not secret",
        default=None,
        public=True,
    )
    delta: float | None = statistic("probability", default=None, public=True)


@dataclass(frozen=True, kw_only=True)
class Trained(Spent):
    """The answer to a training request: the weights, with counts and a loss."""

    arrays: Weights = model(dp="classifier+update")  # of the latter: the update, over the number of examples
    num_examples: int = statistic("examples", public=True)
    examples_seen: int = statistic("examples; with repetition", public=True)
    num_steps: int = statistic(STEPS, public=True)
    train_loss: float | None = statistic("the task's loss, mean over the training", default=None, withheld=True)
    points: bytes | None = notice(
        "points of its masks' keys, which tell nothing without shares of others; none: all must answer", default=None
    )

    @classmethod
    def from_foreign(cls, content: RecordDict) -> Trained:
        """Read the reply of a user's own ClientApp: one array record, perhaps metrics.

        An institution without `num-examples` counts as one example, one without `num-steps` as one step.

        Raises
        ------
        WireError
            If there is not exactly one array record, or the number of examples, of steps or the loss is impossible.
        """
        if len(content.array_records) != 1:
            raise WireError(f"a training reply must hold one ArrayRecord; got {len(content.array_records)}")
        metrics: dict[str, Any] = {}
        for record in content.metric_records.values():
            metrics |= record
        n = whole_number("num-examples", metrics.get("num-examples", 1))
        steps = whole_number("num-steps", metrics.get("num-steps", 1), least=0)  # FedSGD takes no step here
        loss = metrics.get("train-loss", metrics.get("train_loss"))
        if loss is not None and (isinstance(loss, list) or not abs(loss) <= LARGEST_NUMBER):  # NaN is not
            raise WireError(f"train-loss must be a number of at most {LARGEST_NUMBER:g} in size; got {str(loss)[:40]}")
        arrays = next(iter(content.array_records.values()))
        return cls(arrays=arrays, num_examples=n, examples_seen=n, num_steps=steps, train_loss=loss)


def whole_number(name: str, number: Any, least: int = 1) -> int:
    """Return a number that a user's own ClientApp has counted; a WireError if it is none from `least` to `MOST`."""
    if isinstance(number, list) or not least <= number <= MOST or number != int(number):  # NaN too
        raise WireError(f"{name} must be a whole number from {least} to {MOST:,}; got {number}")
    return int(number)


@dataclass(frozen=True, kw_only=True)
class ExpectsReplay(Payload):
    """Fields of a request to train with replay: how many examples the institution should have kept for it."""

    replayed: int | None = instruction("examples that the institution keeps for replay; none: no replay", default=None)
    buffers: Sequence[int] | None = instruction("replay=buffer: numbers of the buffers to replay", default=None)


@dataclass(frozen=True, kw_only=True)
class Summed(Payload):
    """Fields of a request whose answers the server only sums, so that they can be masked."""

    total: int | None = instruction("examples of all institutions together; none: not under masks", default=None)
    cohort: Sequence[str] = instruction("whose answers are summed, where some may be missing", default=())
    spare: int | None = instruction("how many of these may fail yet; none: all must answer", default=None)


@dataclass(frozen=True, kw_only=True)
class Unmasked(Payload):
    """An institution's shares of the keys by which a sum is read, and no institution's answer alone."""

    shares: bytes = notice("shares of this exchange's keys: of each survivor, and of it with each that failed")


@dataclass(frozen=True, kw_only=True)
class Unmask(Request, stage="unmask", answer=Unmasked, message_type="query"):
    """Tell the shares by which the sum of those that have answered an exchange can be read: once, for one sum."""

    run: str = instruction()
    survivors: Sequence[str] = instruction("names of those that have answered")


@dataclass(frozen=True, kw_only=True)
class Train(Spending, ExpectsReplay, LabelScale, Summed, Request, stage="train", answer=Trained):
    """Train these weights on your data."""

    arrays: Weights = model()
    run: str = instruction()
    lr: float = instruction("per step")
    local_epochs: int = instruction("passes", default=1)
    proximal_mu: float | None = instruction("weight of the proximal term, FedProx only", default=None)
    optimizer_state: str = instruction("keep or reset", default="reset")
    continues: int = instruction(LAST_TRAINING, default=0)
    pooled: bool = instruction("simulation only: train on the union of all institutions", default=False)


@dataclass(frozen=True, kw_only=True)
class Evaluation(Payload):
    """An institution's sums over its test shard, from which the server computes every metric."""

    num_examples: int = statistic("examples", counted=True)
    loss: float | None = statistic(
        "the task's loss, mean over the shard; none: the policy allows counts only", default=None
    )
    confusion: Sequence[int] = statistic(
        "examples, or pixels of masks; C x C, row = label, column = prediction, row by row", default=(), counted=True
    )
    hits: int | None = statistic(
        "examples; right answers, at least, where a policy's min-count lets no cell leave", default=None, counted=True
    )
    hits_in_group: int | None = statistic(
        "examples; with task.class-groups only: correct among the classes of the label's group",
        default=None,
        counted=True,
    )
    scores: Sequence[int] = statistic("examples; two classes only: label x bin of the score, row by row", default=())
    absolute_error: float | None = statistic("label's unit; regression only: sum over the shard", default=None)
    squared_error: float | None = statistic("label's unit squared; regression only: sum", default=None)

    @classmethod
    def empty(cls, task: Any) -> Evaluation:
        """Return the evaluation of nothing for a task, see `flwr_replay.learning.tasks.Task`."""
        nothing: Evaluation = task.empty()
        return nothing

    @classmethod
    def metrics(cls, task: Any) -> tuple[str, ...]:
        """Return the names of all metrics that `pool` may return."""
        names: tuple[str, ...] = task.metrics
        return names

    @classmethod
    def pool(cls, task: Any, evaluations: Sequence[Any]) -> dict[str, float]:
        """Compute a task's metrics from institutions' sums."""
        pooled: dict[str, float] = task.pool(evaluations)
        return pooled


@dataclass(frozen=True, kw_only=True)
class Evaluate(LabelScale, Request, stage="evaluate", answer=Evaluation, message_type="evaluate"):
    """Test these weights on your test shard."""

    arrays: Weights = model()
    run: str = instruction()
    split: str = instruction("test, validation, train or external", default="test")
