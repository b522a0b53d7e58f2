"""Methods whose institutions may pool the global model with one of their own, which never leaves: listen=pool.

A pool is never worse than its better half on the held-out examples that weigh it (`flwr_replay.learning.pooling`). Its
metrics are those of its institution's own test examples; the global model's have the prefix global-.
"""

from dataclasses import dataclass
from typing import Any

from flwr_replay.config.sections import PASSES, Range, TaskConfig, one_of, require, within
from flwr_replay.config.strategy import StrategyConfig
from flwr_replay.movements.base import Movement
from flwr_replay.payloads.common import Evaluate
from flwr_replay.payloads.ditto import PersonalEvaluation
from flwr_replay.payloads.fedreplay import EvaluatePooled
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import Weights

__all__ = ["Listens", "ListensConfig"]


@dataclass(frozen=True, kw_only=True)
class ListensConfig(StrategyConfig):
    """Options of such a method."""

    listen: str = "none"  # none | pool: institutions pool the model with one of their own, by held-out examples
    own_epochs: int = 10  # listen=pool: passes of the own model over an institution's examples, once in a run
    holdout: float = 0.1  # listen=pool: share of these that are held out where there is no validation split

    def __post_init__(self) -> None:
        one_of("strategy.listen", self.listen, ("none", "pool"))
        within("strategy.", self, own_epochs=(1, PASSES), holdout=Range(0, 1, "is a share between 0 and 1", "()"))

    def check_task(self, task: TaskConfig) -> None:
        """Refuse to pool answers that are no classes."""
        require(
            self.listen == "none" or task.kind == "classification",
            f"listen=pool pools probabilities of classes; got task={task.name}: set listen=none",
        )

    @property
    def classifiers(self) -> str:
        """Those that institutions train alone stay there, and are tested."""
        return "kept" if self.listen == "pool" else "none"


class Listens(Movement):
    """Base of these methods, whose last stage is the evaluation."""

    config: ListensConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.listen == "pool":
            self.evaluated, self.stages = PersonalEvaluation, (*self.stages[:-1], EvaluatePooled.stage_name)

    def evaluation(self, exchange: int, arrays: Weights) -> Request:
        """Each institution tests the model, with listen=pool also together with its own."""
        test, config = Evaluate(exchange=exchange, arrays=arrays, run=self.settings.run), self.config
        if config.listen == "none":
            return test
        how = vars(test) | {"listen": config.listen, "holdout": config.holdout, "own_epochs": config.own_epochs}
        return EvaluatePooled(**how)
