"""What travels in Ditto: what FedAvg sends; personal models stay, and their metrics come beside the global one's."""

from collections.abc import Sequence
from dataclasses import dataclass

from flwr_replay.payloads.common import Evaluate, Train, Trained
from flwr_replay.payloads.two import TwoEvaluations
from flwr_replay.wire.fields import instruction, statistic

__all__ = ["EvaluatePersonal", "PersonalEvaluation", "TrainPersonal"]


@dataclass(frozen=True, kw_only=True)
class TrainPersonal(Train, stage="train-personal", answer=Trained):
    """Train these weights, and your personal model near them."""

    lam: float = instruction("weight of half the squared distance between the personal model and these weights")


@dataclass(frozen=True, kw_only=True)
class PersonalEvaluation(TwoEvaluations):
    """Sums over the test shard of the personal model and of the global one."""

    other = "global"

    global_loss: float | None = statistic(
        "the task's loss, mean over the shard; none: the policy allows counts only", default=None
    )
    global_confusion: Sequence[int] = statistic("examples; as confusion", default=(), counted=True)
    global_hits_in_group: int | None = statistic("examples; as hits_in_group", default=None, counted=True)
    global_scores: Sequence[int] = statistic("examples; as scores", default=())
    global_absolute_error: float | None = statistic("as absolute_error", default=None)
    global_squared_error: float | None = statistic("as squared_error", default=None)


@dataclass(frozen=True, kw_only=True)
class EvaluatePersonal(Evaluate, stage="evaluate-personal", answer=PersonalEvaluation, message_type="evaluate"):
    """Test your personal model and these weights."""
