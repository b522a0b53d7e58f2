"""What travels in Local: counts and losses; no weights."""

from dataclasses import dataclass

from flwr_replay.payloads.common import LAST_TRAINING, STEPS, Evaluation, LabelScale, Spending, Spent
from flwr_replay.wire.fields import instruction, statistic
from flwr_replay.wire.payload import Request

__all__ = ["EvaluateOwn", "TrainOwn", "TrainedOwn"]


@dataclass(frozen=True, kw_only=True)
class TrainedOwn(Spent):
    """Counts and a loss of a training; the model stays at the institution."""

    num_examples: int = statistic("examples", public=True)
    examples_seen: int = statistic("examples; with repetition", public=True)
    num_steps: int = statistic(STEPS, public=True)
    train_loss: float | None = statistic(
        "the task's loss, mean over the training", default=None, dp="classifier", withheld=True
    )


@dataclass(frozen=True, kw_only=True)
class TrainOwn(Spending, LabelScale, Request, stage="train-own", answer=TrainedOwn):
    """Train your own model."""

    run: str = instruction()
    lr: float = instruction("per step")
    init_seed: int = instruction("seed of the fresh weights, used at the first training")
    optimizer_state: str = instruction("keep or reset", default="keep")
    continues: int = instruction(LAST_TRAINING, default=0)


@dataclass(frozen=True, kw_only=True)
class EvaluateOwn(LabelScale, Request, stage="evaluate-own", answer=Evaluation, message_type="evaluate"):
    """Test your own model on your test shard."""

    run: str = instruction()
    split: str = instruction("test, validation, train or external", default="test")
