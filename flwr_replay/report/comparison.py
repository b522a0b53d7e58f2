"""The report of a comparison: means, paired differences with intervals, and a table.

Letters: S seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import filterfalse
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flwr_replay.report.epsilon import largest, shown_epsilon
from flwr_replay.report.progress import shown_bytes

__all__ = [
    "cells_of",
    "interval",
    "markdown",
    "mean_of",
    "of_data",
    "overview",
    "paired_difference",
    "shown_difference",
    "summarise",
]

CONFIDENCE = 0.95
COSTS = ("up", "down", "examples", "s")  # the last columns of a table
FEWEST = 5  # seeds; of three, the true standard deviation may be six times the measured one


def interval(values: ArrayLike, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    r"""Compute Student's t interval of a mean.

    .. math:: \bar d \pm t_{(1 + c) / 2,\; S - 1} \; s_d / \sqrt S

    Parameters
    ----------
    values : array_like, shape (S,)
        d, one value for each seed.
    confidence : float
        c, in (0, 1).

    Returns
    -------
    tuple of float, or None
        Lower and upper end; None for fewer than five values.

    Examples
    --------
    >>> low, high = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    >>> print(f"{low:.3f} {high:.3f}")
    1.037 4.963
    """
    d_S = np.asarray(values, np.float64)
    if len(d_S) < FEWEST:
        return None
    from scipy.stats import t

    half = float(t.ppf((1 + confidence) / 2, len(d_S) - 1) * d_S.std(ddof=1) / np.sqrt(len(d_S)))
    return float(d_S.mean()) - half, float(d_S.mean()) + half


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[str, Any] | None:
    """Compare two methods seed by seed, over the seeds that both have finished.

    Parameters
    ----------
    ours, theirs : Mapping[int, float]
        Seed to metric.

    Returns
    -------
    dict or None
        `mean` (ours minus theirs), `interval` (95 %, or None), `seeds`; None if no seed is in both.
    """
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    d_S = [ours[seed] - theirs[seed] for seed in seeds]
    return {"mean": float(np.mean(d_S)), "interval": interval(d_S), "seeds": seeds}


def summarise(
    cells: Sequence[Mapping[str, Any]], labels: Sequence[str], against: str, metric: str, higher_is_better: bool
) -> dict[str, dict[str, Any]]:
    """Summarise the cells of every method.

    Parameters
    ----------
    cells : sequence of mappings
        `label`, `strategy`, its own `options`, `seed` and, if the run finished, `result`, the content of `result.json`.
    labels : sequence of str
        The methods, in the order of the table.
    against : str
        The label of the method that the others are compared with.
    metric : str
        A name under `final.global` of the results.
    higher_is_better : bool
        If true, the worst institution is the one with the lowest metric, otherwise the one with the highest.

    Returns
    -------
    dict
        By label: `values` by seed, `mean`, `sd`, `interval`, `difference` to the method `against` (None if it is that
        method; see `references`), `worst-institution` (mean over seeds),
        `bytes-up`, `bytes-down`, `examples-seen`, `seconds` (means over seeds); `epsilon`: the largest that any
        institution states, with the largest delta, and whether it is proven. A value is None if no run finished or no
        epsilon is stated.
    """
    worst, reference = min if higher_is_better else max, references(cells, labels, against)
    done: dict[str, dict[int, Mapping[str, Any]]] = {label: {} for label in labels}
    for cell in cells:
        # external-… and before-mixing-… are missing if no institution answered the last of these tests
        if cell.get("result") and metric in cell["result"]["final"]["global"]:
            done[cell["label"]][cell["seed"]] = cell["result"]
    values = {
        label: {seed: float(result["final"]["global"][metric]) for seed, result in by_seed.items()}
        for label, by_seed in done.items()
    }
    summary = {}
    for label, by_seed in done.items():
        results = list(by_seed.values())
        worsts = [
            worst(float(own[metric]) for own in r["final"]["institutions"].values() if metric in own) for r in results
        ]
        numbers = list(values[label].values())
        summary[label] = {
            "values": values[label],
            "mean": mean_of(numbers),
            "sd": float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None,
            "interval": interval(numbers),
            "against": reference[label],
            "difference": paired_difference(values[label], values[reference[label]])
            if label != reference[label]
            else None,
            "epsilon": largest(account for result in results for account in result.get("privacy", {}).values()),
            "worst-institution": mean_of(worsts),
            "bytes-up": mean_of([r["bytes"]["up"] for r in results]),
            "bytes-down": mean_of([r["bytes"]["down"] for r in results]),
            "examples-seen": mean_of([r["examples-seen"] for r in results]),
            "seconds": mean_of([r["wall-seconds"] for r in results]),
        }
    return summary


def of_data(option: str) -> bool:
    """Say whether a method's own option changes the data, or how they are dealt."""
    return option.partition("=")[0].partition(".")[0] in ("task", "partition", "nodes")


def references(cells: Sequence[Mapping[str, Any]], labels: Sequence[str], against: str) -> dict[str, str]:
    """Return, for every method, the one that it is compared with: `against`, on the method's own data.

    Methods that differ in nothing but their data are all compared with `against` itself.

    >>> cells = [
    ...     {"label": f"{name} {way}", "strategy": name, "options": [f"partition={way}"]}
    ...     for name in ("cwt", "local")
    ...     for way in ("iid", "ks")
    ... ]
    >>> references(cells, ["cwt iid", "cwt ks"], "local ks")
    {'cwt iid': 'local iid', 'cwt ks': 'local ks'}
    >>> references(cells[:2], ["cwt iid", "cwt ks"], "cwt iid")
    {'cwt iid': 'cwt iid', 'cwt ks': 'cwt iid'}
    """
    own = {cell["label"]: (cell["strategy"], cell.get("options", [])) for cell in cells}
    apart = {label: (name, *filterfalse(of_data, options)) for label, (name, options) in own.items()}
    if len({*apart.values()}) == 1:
        return dict.fromkeys(labels, against)
    reference = {
        (*filter(of_data, options),): label for label, (_, options) in own.items() if apart[label] == apart[against]
    }
    return {label: reference.get((*filter(of_data, own[label][1]),), against) for label in labels}


def markdown(report: Mapping[str, Any], costs: bool = True) -> list[str]:
    """Write a comparison as the lines of a Markdown table; without `costs`: no bytes, examples and seconds."""
    columns, rows = cells_of(report)
    shown = len(columns) - (0 if costs else len(COSTS))
    return _markdown(columns[:shown], [row[:shown] for row in rows])


def overview(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Write several comparisons of the same methods as one table: mean and standard deviation of the metric.

    Parameters
    ----------
    reports : Mapping
        By column heading: a report of `flwr_replay.studies.compare.compare_strategies`.
    """
    labels = list(dict.fromkeys(label for report in reports.values() for label in report["strategies"]))
    rows = []
    for label in labels:
        shown = [report["strategies"].get(label) for report in reports.values()]
        rows.append([label, *(_with_epsilon(row) if row and row["mean"] is not None else "–" for row in shown)])
    headings = [f"{name} ({report['metric']})" for name, report in reports.items()]
    return _markdown(["method", *headings], rows)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def cells_of(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of a table, as text."""
    compared = {row.get("against", report["against"]) for row in report["strategies"].values()}
    less = "difference, 95 %" if len(compared) > 1 else f"minus {report['against']}, 95 %"
    private = any(row["epsilon"] for row in report["strategies"].values())
    columns = ["method", report["metric"], *(["privacy of what left"] if private else []), less, "worst institution"]
    columns += COSTS
    rows = []
    for label, row in report["strategies"].items():
        failed = sum(cell["label"] == label and "error" in cell for cell in report["cells"])
        name = f"{label} ({failed} of {len(report['seeds'])} failed)" if failed else label
        if row["mean"] is None:
            rows.append([name, *["–"] * (len(columns) - 1)])
            continue
        rows.append(
            [
                name,
                _mean_sd(row),
                *([shown_epsilon([row["epsilon"]]) or "no epsilon"] if private else []),
                shown_difference(row["difference"]) if label not in compared else "",
                f"{row['worst-institution']:.4f}",
                shown_bytes(row["bytes-up"]),
                shown_bytes(row["bytes-down"]),
                f"{row['examples-seen']:,.0f}",
                f"{row['seconds']:.1f}",
            ]
        )
    return columns, rows


def _mean_sd(row: Mapping[str, Any]) -> str:
    return f"{row['mean']:.4f}" + (f" ± {row['sd']:.4f}" if row["sd"] is not None else "")


def _with_epsilon(row: Mapping[str, Any]) -> str:
    return ", ".join(filter(None, [_mean_sd(row), shown_epsilon([row["epsilon"]])]))


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean; None of no values."""
    return float(np.mean(values)) if values else None


def shown_difference(difference: Mapping[str, Any] | None) -> str:
    """Write a paired difference with its interval, if it has one: `+0.0123 [-0.0100, +0.0346]`."""
    if difference is None:
        return "–"
    if difference["interval"] is None:
        return f"{difference['mean']:+.4f}"
    low, high = difference["interval"]
    return f"{difference['mean']:+.4f} [{low:+.4f}, {high:+.4f}]"
