"""The forgetting matrix: the current model's metric on each institution's own training examples.

Source: Qu et al. 2022, Table 1, for CWT. A row is an exchange (a visit or a round), a column an institution.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr_replay.files.atomic import write_atomic
from flwr_replay.files.lines import add_line, read_lines
from flwr_replay.report.comparison import markdown_table
from flwr_replay.report.plots import heat_map
from flwr_replay.report.run_files import FORMS
from flwr_replay.report.templates import spared

__all__ = ["ForgettingMatrix", "after_last_visits", "drops", "last_visits"]


class ForgettingMatrix:
    """A run's matrix, written row by row to `forgetting.jsonl`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, exchange: int, trained_on: Sequence[str], own: dict[str, float]) -> None:
        """Add a row: the institutions the exchange trained on, and the main metric on each institution's own data."""
        add_line(self.path, {"round": exchange, "taught": list(trained_on), "own": own})

    def rewind(self, exchange: int) -> None:
        """Drop the rows written after a checkpoint."""
        if self.path.exists():
            kept = [row for row in read_lines(self.path, FORMS["forgetting.jsonl"]) if row["round"] <= exchange]
            write_atomic(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def summary(self, metric: str, higher_is_better: bool) -> dict[str, Any] | None:
        """Return the summary for `result.json`; None if nothing was recorded."""
        rows = read_lines(self.path, FORMS["forgetting.jsonl"])
        if not rows:
            return None
        names = sorted({name for row in rows for name in row["own"]})
        lost = [value for _, _, value in drops(rows, higher_is_better)]
        return {
            "metric": metric,
            "institutions": names,
            "exchanges": [{"round": row["round"], "taught": row["taught"]} for row in rows],
            "matrix": [[row["own"].get(name) for name in names] for row in rows],
            "mean-drop": sum(lost) / len(lost) if lost else 0.0,
            "largest-drop": max(lost, default=0.0),
        }

    def draw(self, summary: dict[str, Any] | None) -> None:
        """Draw the heat map of a summary, if there is one."""
        with spared(file := self.path.with_suffix(".png")):
            if summary:
                write_atomic(file, heat_map(summary).file("png"))


def drops(rows: Sequence[dict[str, Any]], higher_is_better: bool = True) -> list[tuple[int, str, float]]:
    """List the drop of the model's metric on each institution that an exchange did not train on.

    If an exchange trained on all institutions at once, or on none, every institution counts. The drop is the best value
    since the institution was first trained on, minus the value now (Chaudhry et al. 2018, arXiv:1801.10112, eq. 3).
    An institution has no drop before its first training.

    >>> own = [{"a": 0.9, "b": 0.1}, {"a": 0.3, "b": 0.8}]
    >>> rows = [{"round": 1, "taught": ["a"], "own": own[0]}, {"round": 2, "taught": ["b"], "own": own[1]}]
    >>> [(at, name, round(lost, 2)) for at, name, lost in drops(rows)]
    [(2, 'a', 0.6)]
    """
    sign = 1 if higher_is_better else -1
    best: dict[str, float] = {}
    dropped = []
    for row in rows:
        all_alike = not row["taught"] or set(row["taught"]) >= set(row["own"])
        for name, value in row["own"].items():
            if name in best and (all_alike or name not in row["taught"]):
                dropped.append((row["round"], name, sign * (best[name] - value)))
            if all_alike or name in row["taught"] or name in best:
                best[name] = sign * max(sign * best.get(name, value), sign * value)
    return dropped


def last_visits(matrix: Mapping[str, Any]) -> list[str]:
    """Write a forgetting matrix as a Markdown table in the form of Qu et al.'s Table 1.

    A row is an institution's own training examples, a column the model after its last visit to an institution. There
    are no lines if exchanges train on several institutions at once. `ForgettingMatrix.summary` returns a matrix.

    >>> exchanges = [{"round": 1, "taught": ["a"]}, {"round": 2, "taught": ["b"]}]
    >>> matrix = {"metric": "accuracy", "institutions": ["a", "b"], "exchanges": exchanges}
    >>> last_visits({**matrix, "matrix": [[0.9, 0.1], [0.3, None]]})[2:]
    ['| a | 0.900 | 0.300 |', '| b | 0.100 | – |']
    """
    after, names = after_last_visits(matrix), matrix["institutions"]
    rows = [
        [name, *("–" if (value := after[name, visited]) is None else f"{value:.3f}" for visited in names)]
        for name in names
        if after
    ]
    return (
        markdown_table([f"{matrix['metric']} on the data of", *(f"after {name}" for name in names)], rows)
        if rows
        else []
    )


def after_last_visits(matrix: Mapping[str, Any] | None) -> dict[tuple[str, str], float | None]:
    """Return the metric by institution whose own data it is of, and institution after whose last visit it was taken.

    It is empty without a matrix, or if exchanges train on several institutions at once; None if one was away.
    """
    names, exchanges = (matrix["institutions"], matrix["exchanges"]) if matrix else ([], [])
    last = {exchange["taught"][0]: at for at, exchange in enumerate(exchanges) if len(exchange["taught"]) == 1}
    if not matrix or set(last) != set(names):
        return {}
    return {
        (name, visited): matrix["matrix"][last[visited]][column]
        for column, name in enumerate(names)
        for visited in names
    }
