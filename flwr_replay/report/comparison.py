"""The report of a comparison: means, paired differences with intervals, a table, and notes that explain it.

Letters: S seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import filterfalse
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flwr_replay.data.class_counts import starving, summary, warnings
from flwr_replay.report.epsilon import largest, shown_epsilon
from flwr_replay.report.progress import shown_bytes
from flwr_replay.terminal import fitted

__all__ = [
    "cells_of",
    "interval",
    "markdown",
    "notes",
    "of_partition",
    "overview",
    "paired_difference",
    "summarise",
    "table",
]

CONFIDENCE = 0.95
FEWEST = 3  # seeds; a t interval of two is 9 standard deviations wide on either side


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
        Lower and upper end; None for fewer than three values, of which an interval says nothing.

    Examples
    --------
    >>> low, high = interval([1.0, 2.0, 3.0])
    >>> print(f"{low:.3f} {high:.3f}")
    -0.484 4.484
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
        institution states, and whether it is proven. A value is None if no run finished or no epsilon is stated.
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
            "mean": _mean(numbers),
            "sd": float(np.std(numbers, ddof=1)) if len(numbers) > 1 else None,
            "interval": interval(numbers),
            "against": reference[label],
            "difference": paired_difference(values[label], values[reference[label]])
            if label != reference[label]
            else None,
            "epsilon": largest(one for result in results for one in result.get("privacy", {}).values()),
            "worst-institution": _mean(worsts),
            "bytes-up": _mean([r["bytes"]["up"] for r in results]),
            "bytes-down": _mean([r["bytes"]["down"] for r in results]),
            "examples-seen": _mean([r["examples-seen"] for r in results]),
            "seconds": _mean([r["wall-seconds"] for r in results]),
        }
    return summary


def of_partition(option: str) -> bool:
    """Say whether a method's own option changes how the data are dealt."""
    return option.startswith(("partition=", "partition."))


def references(cells: Sequence[Mapping[str, Any]], labels: Sequence[str], against: str) -> dict[str, str]:
    """Return, for every method, the one that it is compared with: `against`, on the method's own partition.

    Methods that differ in nothing but the partition are all compared with `against` itself.

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
    apart = {label: (name, *filterfalse(of_partition, options)) for label, (name, options) in own.items()}
    if len({*apart.values()}) == 1:
        return dict.fromkeys(labels, against)
    found = {
        (*filter(of_partition, options),): label
        for label, (_, options) in own.items()
        if apart[label] == apart[against]
    }
    return {label: found.get((*filter(of_partition, own[label][1]),), against) for label in labels}


def table(report: Mapping[str, Any]) -> str:
    """Write a comparison as plain text: a row for each method, then notes on the columns and on failures.

    Parameters
    ----------
    report : Mapping
        As `flwr_replay.studies.compare.compare_strategies` returns it.
    """
    return "\n".join([fitted(report["title"], *cells_of(report)), *notes(report)])


def markdown(report: Mapping[str, Any]) -> list[str]:
    """Write a comparison as the lines of a Markdown table."""
    columns, rows = cells_of(report)
    return _markdown(columns, rows)


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
        rows.append([label, *(_mean_sd(row) if row and row["mean"] is not None else "–" for row in shown)])
    headings = [f"{name} ({report['metric']})" for name, report in reports.items()]
    return _markdown(["method", *headings], rows)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def cells_of(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of a table, as text."""
    compared = {row.get("against", report["against"]) for row in report["strategies"].values()}
    less = "difference, 95 %" if len(compared) > 1 else f"less {report['against']}, 95 %"
    columns = ["method", report["metric"], less, "worst institution", "up", "down"]
    columns += ["examples", "s"]
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
                _shown_difference(row["difference"]) if label not in compared else "",
                f"{row['worst-institution']:.4f}",
                shown_bytes(row["bytes-up"]),
                shown_bytes(row["bytes-down"]),
                f"{row['examples-seen']:,.0f}",
                f"{row['seconds']:.1f}",
            ]
        )
    return columns, rows


def _mean_sd(row: Mapping[str, Any]) -> str:
    text = f"{row['mean']:.4f}" + (f" ± {row['sd']:.4f}" if row["sd"] is not None else "")
    return f"{text}, {shown_epsilon([row['epsilon']])}" if row["epsilon"] else text


def notes(report: Mapping[str, Any]) -> list[str]:
    """Explain the columns, say how the methods differ, and list failures."""
    over = ", [ ] a 95 % t interval" if len(report["seeds"]) >= FEWEST else ""
    lines = [
        f"seeds {', '.join(map(str, report['seeds']))}, paired; ± is the standard deviation over seeds{over}; worst "
        "institution, bytes, examples (with repetitions) and seconds are means over seeds"
    ]
    lines += _skews(report)
    if (seeds := len(report["seeds"])) < FEWEST:
        lines.append(f"no intervals: {seeds} seed{'s' * (seeds > 1)} cannot show the variation by chance, {FEWEST} can")
    said = (cell.get("result", {}).get("metrics-note", "") for cell in report["cells"])
    lines += [note for note in dict.fromkeys(said) if note]
    lines += [f"{label}: {claim}" for label, claim in _claims(report).items()]
    lines += _agreements(report)
    for cell in report["cells"]:
        where = f"{cell['label']} seed {cell['seed']}"
        if "error" in cell:
            lines.append(f"{where} failed: {cell['error']}")
        absent = {f["institution"]: f["reason"] for f in cell.get("result", {}).get("failures", [])}
        lines += [f"{where}: {name} did not always take part: {reason}" for name, reason in absent.items()]
    found = {tuple(sorted(cell["result"]["versions"].items())) for cell in report["cells"] if "result" in cell}
    if len(found) > 1:
        differing = sorted({n for pairs in found for n, _ in pairs if len({dict(p).get(n) for p in found}) > 1})
        lines.append(f"the runs used different versions of {', '.join(differing)}: see compare.json")
    return lines


def _skews(report: Mapping[str, Any]) -> list[str]:
    """Say how the training labels differ, for every way in which the methods' data are dealt."""
    found: dict[str, dict[int, Mapping[str, Any]]] = {}
    for cell in report["cells"]:
        if "skew" in cell.get("result", {}):
            dealt = " ".join(filter(of_partition, cell["options"]))
            found.setdefault(dealt, {})[cell["seed"]] = cell["result"]["skew"]
    lines = []
    for dealt, skews in found.items():
        ks, tv, dropped = (sum(skew[key] for skew in skews.values()) / len(skews) for key in ("ks", "tv", "dropped"))
        lines.append(
            f"training labels{dealt and f' with {dealt}'}, means over seeds: KS {ks:.3f} and TV {tv:.3f} between two "
            f"institutions, {dropped:,.0f} examples left out"
        )
        seed, worst = max(skews.items(), key=lambda one: starving(one[1]))
        lines += [f"seed {seed}: {line}" for line in (*summary(worst), *warnings(worst))]
    if len(found) > 1:
        against = list(dict.fromkeys(row["against"] for row in report["strategies"].values()))
        lines.append(
            f"a difference is to the method on the same partition: {', '.join(against)}"
            if len(against) > 1
            else f"a difference to {against[0]} pairs runs of one seed; where partitions differ, so do the data, and "
            "pairing takes out less chance than on the same data"
        )
    return lines


def _claims(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the privacy claim of the runs with differential privacy, by method."""
    found: dict[str, str] = {}
    for label in dict.fromkeys(cell["label"] for cell in report["cells"]):
        results = [cell["result"] for cell in report["cells"] if cell["label"] == label and "result" in cell]
        if any(one for result in results for one in result.get("privacy", {}).values()):
            found[label] = results[0]["privacy-claim"]
    return found


def _agreements(report: Mapping[str, Any]) -> list[str]:
    """Say how far the models of runs with `agreement=true` differ at the institutions, by method."""
    found: dict[str, list[str]] = {}
    for cell in report["cells"]:
        if agreement := cell.get("result", {}).get("agreement"):
            spread = _mean([*agreement["standard-deviation"].values()])
            found.setdefault(cell["label"], []).append("–" if spread is None else f"{spread:.3f}")
    return [
        f"{label}: standard deviation of balanced accuracy over all models, mean over institutions, by seed: "
        f"{', '.join(shown)}"
        for label, shown in found.items()
    ]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _shown_difference(difference: Mapping[str, Any] | None) -> str:
    if difference is None:
        return "–"
    if difference["interval"] is None:
        return f"{difference['mean']:+.4f}"
    low, high = difference["interval"]
    return f"{difference['mean']:+.4f} [{low:+.4f}, {high:+.4f}]"
