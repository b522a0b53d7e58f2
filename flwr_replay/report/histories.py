"""What a metric was over the rounds of a finished run, and by the epsilon that had been spent by then."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from flwr_replay.files.lines import read_lines

__all__ = ["by_epsilon", "by_round"]


def by_round(folder: Path, metric: str) -> list[tuple[float, float]]:
    """Read a run's pooled metric by round."""
    return [(row["round"], row["value"]) for row in _pooled(folder, metric)]


def by_epsilon(folders: Sequence[Path], metric: str) -> list[list[tuple[float, float]]]:
    """Read the runs' pooled metric by the largest epsilon that any institution of any of them had stated by then."""
    rows = [row for folder in folders for row in read_lines(folder / "privacy.jsonl")]
    stated = sorted((row["round"], row["epsilon"]) for row in rows if row["epsilon"] is not None and "round" in row)
    most = dict(zip((at for at, _ in stated), accumulate((epsilon for _, epsilon in stated), max), strict=True))
    exchanges = list(most)  # empty for runs of older versions
    found = [
        [(bisect_right(exchanges, row.get("exchange", row["round"])), row["value"]) for row in _pooled(folder, metric)]
        for folder in folders
    ]
    return [[(most[exchanges[i - 1]], value) for i, value in history if i] for history in found]


def _pooled(folder: Path, metric: str) -> list[dict[str, Any]]:
    rows = read_lines(folder / "metrics.jsonl")
    return [row for row in rows if row["institution"] == "" and row["metric"] == metric]
