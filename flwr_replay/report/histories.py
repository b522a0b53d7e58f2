"""What a metric was over the rounds of a finished run, and by the epsilon that had been spent by then."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from flwr_replay.errors import DamagedError
from flwr_replay.files.lines import sound_lines
from flwr_replay.report.judged import judged
from flwr_replay.report.run_files import FORMS, METRICS, check_grown, rows_of

__all__ = ["by_epsilon", "by_round", "metric_rows"]


def metric_rows(folder: Path, rounds: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Read what can be read of a finished run's `metrics.jsonl`, and say what its curves lack: nothing, or a sentence.

    Parameters
    ----------
    folder : Path
        The run directory.
    rounds : int
        The rounds that it must have.
    """
    rows, fault = sound_lines(folder / METRICS, {**FORMS[METRICS], "exchange": int | None})
    last = max((row["round"] for row in rows), default=0)
    if not fault and last < rounds:
        fault = f"metrics.jsonl ends with round {last:g} of {rounds}"
    if not fault:
        try:
            check_grown(folder, METRICS)
        except DamagedError:
            fault = "metrics.jsonl is not as the run left it; what its lines say may be wrong"
    return (
        rows,
        f"{folder.name}: {fault}. The curves lack that; the other figures are from result.json." if fault else "",
    )


def by_round(folder: Path, metric: str) -> list[tuple[float, float]]:
    """Read a run's pooled metric by round, of the examples by which rounds were judged."""
    return [(row["round"], row["value"]) for row in _pooled(folder, metric)]


def by_epsilon(folders: Sequence[Path], metric: str) -> list[list[tuple[float, float]]]:
    """Read the runs' pooled metric by the largest epsilon that any institution of any of them had stated by then."""
    rows = [row for folder in folders for row in rows_of(folder, "privacy.jsonl")]
    stated = sorted((row["round"], row["epsilon"]) for row in rows if row["epsilon"] is not None and "round" in row)
    most = dict(zip((at for at, _ in stated), accumulate((epsilon for _, epsilon in stated), max), strict=True))
    exchanges = list(most)  # empty for runs of older versions
    histories = [
        [(bisect_right(exchanges, row.get("exchange", row["round"])), row["value"]) for row in _pooled(folder, metric)]
        for folder in folders
    ]
    return [[(most[exchanges[i - 1]], value) for i, value in history if i] for history in histories]


def _pooled(folder: Path, metric: str) -> list[dict[str, Any]]:
    rows, _ = metric_rows(folder)
    judging = judged(metric, {row["metric"] for row in rows})
    return [row for row in rows if row["institution"] == "" and row["metric"] == judging]
