"""What travels where every institution trains a private model and a proxy: the proxies, and nothing of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from flwr_replay.payloads.common import Evaluation, LabelScale, Pooling, Spending, Trained
from flwr_replay.payloads.relay import Released, TrainPeer
from flwr_replay.wire.fields import instruction, model, statistic
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import Weights

__all__ = [
    "EvaluatePair",
    "EvaluateWithProxy",
    "Mutual",
    "PairEvaluation",
    "ReleasedProxy",
    "TrainMutually",
    "TrainProxy",
    "TrainedMutually",
]

STEPS = "of DP-SGD that the proxy took, or plain ones; 0: the institution's budget is used up"
HALVES = ("loss", "confusion", "hits_in_group", "scores")  # of an evaluation


@dataclass(frozen=True, kw_only=True)
class Mutual(LabelScale):
    """What a request says of the private model, and of what both learn from each other (Kalra et al. 2023, eq. 4-5)."""

    alpha: float = instruction("weight of the proxy's predictions in the private model's loss")
    beta: float = instruction("weight of the private model's predictions in the proxy's loss")
    private_seed: int = instruction("of the private model's fresh weights, used at the first training")
    private_optimizer: str = instruction("sgd or adam")
    private_lr: float = instruction("per step")
    private_epochs: int = instruction("passes of the private model alone, before both learn")
    private_batch_size: int = instruction("examples, in these passes")
    private_shift: int = instruction("pixels, in these passes")


@dataclass(frozen=True, kw_only=True)
class ReleasedProxy(Released):
    """A proxy after its training; the loss is the private model's."""

    arrays: Weights = model(dp="proxy")
    proxy_steps: int = statistic(STEPS, default=0, public=True)


@dataclass(frozen=True, kw_only=True)
class TrainProxy(Mutual, TrainPeer, Request, stage="train-proxy", answer=ReleasedProxy):
    """Kalra et al. 2023, Algorithm 1, lines 2-6: train the proxy and the private model that you keep."""


@dataclass(frozen=True, kw_only=True)
class TrainedMutually(Trained):
    """The same where a server averages the proxies."""

    arrays: Weights = model(dp="proxy")
    proxy_steps: int = statistic(STEPS, default=0, public=True)


@dataclass(frozen=True, kw_only=True)
class TrainMutually(Spending, Mutual, Request, stage="train-mutually", answer=TrainedMutually):
    """Train this proxy together with the private model that you keep."""

    arrays: Weights = model()
    run: str = instruction()
    lr: float = instruction("of the proxy, per step")
    optimizer_state: str = instruction("keep or reset", default="keep")
    continues: bool = instruction("the institution has trained in this run before", default=False)


@dataclass(frozen=True, kw_only=True)
class PairEvaluation(Evaluation):
    """Sums over the test shard of the private model and of the proxy."""

    proxy_loss: float | None = statistic("as the task has it, mean over the shard; none: as above", default=None)
    proxy_confusion: Sequence[int] = statistic("examples; C x C, as above", default=(), counted=True)
    proxy_hits_in_group: int | None = statistic(
        "examples; with task.class-groups only, as above", default=None, counted=True
    )
    proxy_scores: Sequence[int] = statistic("examples; two classes only, as above", default=())

    @classmethod
    def of_pair(cls, private: Evaluation, proxy: Evaluation) -> PairEvaluation:
        """Put two evaluations on the same shard side by side."""
        own = {field.name: getattr(private, field.name) for field in fields(private)}
        return cls(**own, **{f"proxy_{name}": getattr(proxy, name) for name in HALVES})

    @classmethod
    def empty(cls, task: Pooling) -> PairEvaluation:
        """Return evaluations of nothing."""
        return cls.of_pair(task.empty(), task.empty())

    @classmethod
    def metrics(cls, task: Pooling) -> tuple[str, ...]:
        """Return a task's metrics of both."""
        return (*task.metrics, *(f"proxy-{name}" for name in task.metrics))

    @classmethod
    def pool(cls, task: Pooling, evaluations: Sequence[Any]) -> dict[str, float]:
        """Pool the private models' metrics, and under names with proxy- the proxies'."""
        proxies = [
            Evaluation(num_examples=one.num_examples, **{name: getattr(one, f"proxy_{name}") for name in HALVES})
            for one in evaluations
        ]
        return {**task.pool(evaluations), **{f"proxy-{name}": value for name, value in task.pool(proxies).items()}}


@dataclass(frozen=True, kw_only=True)
class EvaluatePair(LabelScale, Request, stage="evaluate-pair", answer=PairEvaluation, message_type="evaluate"):
    """Test the private model and the proxy that you keep on your test shard."""

    run: str = instruction()
    split: str = instruction("test, train or external", default="test")


@dataclass(frozen=True, kw_only=True)
class EvaluateWithProxy(
    LabelScale, Request, stage="evaluate-with-proxy", answer=PairEvaluation, message_type="evaluate"
):
    """Test the private model that you keep, and this proxy, on your test shard."""

    arrays: Weights = model()
    run: str = instruction()
    split: str = instruction("test, train or external", default="test")
