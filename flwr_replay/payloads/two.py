"""The evaluation of two models on one shard: the institution's own, and another that it shares."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from flwr_replay.payloads.common import Evaluation

__all__ = ["TwoEvaluations"]


@dataclass(frozen=True, kw_only=True)
class TwoEvaluations(Evaluation):
    """Base of such an evaluation; a subclass declares the fields of the other model's, with that model's name before.

    Attributes
    ----------
    other : str
        The other model's name, which begins its metrics, too: `proxy-accuracy`.
    """

    other: ClassVar[str]

    @classmethod
    def of_pair(cls, own: Evaluation, other: Evaluation) -> Self:
        """Combine the evaluations of both models on the same shard."""
        first = {field.name: getattr(own, field.name) for field in fields(own)}
        return cls(**first, **{f"{cls.other}_{name}": getattr(other, name) for name in cls.of_other()})

    @classmethod
    def of_other(cls) -> list[str]:
        """Return the names, in an evaluation, of what is declared of the other model."""
        mark = f"{cls.other}_"
        return [field.name.removeprefix(mark) for field in fields(cls) if field.name.startswith(mark)]

    @classmethod
    def empty(cls, task: Any) -> Self:
        """Return the evaluations of nothing."""
        return cls.of_pair(task.empty(), task.empty())

    @classmethod
    def metrics(cls, task: Any) -> tuple[str, ...]:
        """Return the names of a task's metrics for both models."""
        return (*task.metrics, *(f"{cls.other}-{name}" for name in task.metrics))

    @classmethod
    def pool(cls, task: Any, evaluations: Sequence[Any]) -> dict[str, float]:
        """Compute the own models' metrics, and those of the others if they left."""
        names = cls.of_other()
        others = [
            Evaluation(num_examples=both.num_examples, **{name: getattr(both, f"{cls.other}_{name}") for name in names})
            for both in evaluations
        ]
        if any(not len(other.confusion) and other.absolute_error is None for other in others):
            return task.pool(evaluations)  # type: ignore[no-any-return]  # a policy's min-count keeps one of them
        further = {f"{cls.other}-{name}": value for name, value in task.pool(others).items()}
        return {**task.pool(evaluations), **further}
