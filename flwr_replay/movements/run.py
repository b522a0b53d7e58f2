"""The arguments of a strategy's `start`, and the result that it fills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

__all__ = ["EvaluateFn", "RunState"]

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(kw_only=True)
class RunState:
    """The arguments of `start`, and the result that it will return, by rounds."""

    grid: Grid
    num_rounds: int
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: EvaluateFn | None
    done: int = 0  # exchanges that were made before the run was resumed
    result: Result = field(default_factory=Result)
    losses: dict[int, list[float]] = field(default_factory=dict)  # by round: of each of its exchanges

    def trained(self, number: int, metrics: MetricRecord) -> None:
        """Enter the metrics of an exchange's training under its round; several exchanges' losses are averaged."""
        if isinstance(loss := metrics.get("train-loss"), float):
            self.losses.setdefault(number, []).append(loss)
            metrics = MetricRecord({**metrics, "train-loss": fmean(self.losses[number])})
        self.result.train_metrics_clientapp[number] = metrics
