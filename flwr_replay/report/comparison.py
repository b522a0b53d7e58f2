"""The report of a comparison: means, paired differences with intervals, a table, and the gap that replay closes.

A `report` is what `flwr_replay.studies.compare.compare_strategies` returns. Letters: S seeds.
"""

from collections.abc import Mapping, Sequence
from itertools import filterfalse
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from flwr_replay.privacy.accounting import rounded_up
from flwr_replay.report.metrics import largest, shared, shown_epsilon
from flwr_replay.report.progress import shown_bytes
from flwr_replay.report.ranks import FEWEST, MeanRanks
from flwr_replay.report.templates import numbers

__all__ = [
    "cells_of",
    "gaps",
    "interval",
    "markdown",
    "markdown_table",
    "mean_of",
    "mean_ranks_of",
    "of_data",
    "overview",
    "paired_difference",
    "ranks",
    "summarise",
]

COSTS = ("leaves", "up", "down", "examples", "s")  # the last columns of a table
TOLD = ("per-sample-raw", "per-sample", "synthetic", "model")  # kinds of field; statistics every method sends


def interval(values: ArrayLike, confidence: float = 0.95) -> tuple[float, float] | None:
    r"""Compute Student's t interval of a mean.

    .. math:: \bar d \pm t_{(1 + c) / 2,\; S - 1} \; s_d / \sqrt S

    `values` are d, shape (S,), one for each seed, and `confidence` is c, in (0, 1). Returned are the lower and the
    upper end; None for fewer than five values.

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
    """Compare two methods, by seed their metric, over the seeds that both have finished.

    Returned are `mean` (ours minus theirs), `interval` (95 %, or None) and `seeds`; None if no seed is in both.
    """
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return None
    d_S = [ours[seed] - theirs[seed] for seed in seeds]
    return {"mean": float(np.mean(d_S)), "interval": interval(d_S), "seeds": seeds}


def summarise(
    cells: Sequence[Mapping[str, Any]], labels: Sequence[str], against: str, metric: str, higher_is_better: bool
) -> dict[str, dict[str, Any]]:
    """Summarise the cells of every method, in the order of `labels`.

    A cell has `label`, `strategy`, its own `options`, `seed` and, if the run finished, `result`, the content of
    `result.json`, with the metric under `final.global`. The worst institution is the one with the lowest metric, or
    with the highest if that is not better.

    Returned are by label: `values` by seed, `mean`, `sd`, `interval`, `difference` to the method `against` (None if it
    is that method; see `references`), `shared` (mean and sd of the model that institutions share, if they are tested
    with their own), `worst-institution`, `leaves` (kinds of what went up), `bytes-up`, `bytes-down`,
    `examples-seen`, `seconds` (means over seeds); `epsilon`: the largest that any institution states, with the largest
    delta, and whether it is proven. A value is None if no run finished or no epsilon is stated. Metrics are of runs in
    which every institution was tested: others' do not compare.
    """
    worst, reference = min if higher_is_better else max, references(cells, labels, against)
    done: dict[str, dict[int, Mapping[str, Any]]] = {label: {} for label in labels}
    for cell in cells:
        # external-… and before-mixing-… are missing if no institution answered the last of these tests
        if cell.get("result") and metric in cell["result"]["final"]["global"]:
            done[cell["label"]][cell["seed"]] = cell["result"]
    whole = {label: {seed: r for seed, r in of.items() if not r.get("untested")} for label, of in done.items()}
    values = {
        label: {seed: float(result["final"]["global"][metric]) for seed, result in by_seed.items()}
        for label, by_seed in whole.items()
    }
    summary = {}
    for label, by_seed in done.items():
        results, tested = list(by_seed.values()), list(whole[label].values())
        worsts = [
            worst(float(own[metric]) for own in r["final"]["institutions"].values() if metric in own) for r in tested
        ]
        numbers, other = list(values[label].values()), reference[label]
        finals = [r["final"]["global"] for r in tested]
        both = [final[name] for final in finals if (name := shared(metric, final))]
        kinds = {kind for r in results for kind in r.get("bytes-by-kind", {}).get("up", {})}
        summary[label] = {
            "values": values[label],
            "mean": mean_of(numbers),
            "sd": _sd(numbers),
            "shared": {"mean": mean_of(both), "sd": _sd(both)} if both else None,
            "interval": interval(numbers),
            "against": other,
            "difference": paired_difference(values[label], values[other]) if label != other else None,
            "epsilon": largest(account for result in results for account in result.get("privacy", {}).values()),
            "worst-institution": mean_of(worsts),
            "leaves": [kind for kind in TOLD if kind in kinds] or ["statistic"],
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


def ranks(report: Mapping[str, Any]) -> MeanRanks | None:
    """Rank a comparison's methods seed by seed; None where seeds or methods are few, or where their data differ."""
    rows = {label: row for label, row in report["strategies"].items() if row["mean"] is not None}
    if len({row.get("against", report["against"]) for row in rows.values()}) > 1 or any(
        of_data(option) for cell in report["cells"] for option in cell.get("options", [])
    ):
        return None
    values = {label: {str(seed): value for seed, value in row["values"].items()} for label, row in rows.items()}
    return MeanRanks.of(values, report["higher-is-better"])


def mean_ranks_of(reports: Mapping[str, Mapping[str, Any]]) -> MeanRanks | None:
    """Rank methods comparison by comparison, by their means over seeds; None where these or methods are few."""
    labels = dict.fromkeys(label for report in reports.values() for label in report["strategies"])
    means = {
        label: {
            name: row["mean"]
            for name, report in reports.items()
            if (row := report["strategies"].get(label)) and row["mean"] is not None
        }
        for label in labels
    }
    return MeanRanks.of(means, all(report["higher-is-better"] for report in reports.values()))


def markdown(report: Mapping[str, Any], costs: bool = True) -> list[str]:
    """Write a comparison as the lines of a Markdown table; without `costs`: no bytes, examples and seconds."""
    columns, rows = cells_of(report)
    shown = len(columns) - (0 if costs else len(COSTS))
    return markdown_table(columns[:shown], [row[:shown] for row in rows])


def overview(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Write several comparisons of the same methods, by heading, as one table: mean and standard deviation."""
    labels = list(dict.fromkeys(label for report in reports.values() for label in report["strategies"]))
    rows = []
    for label in labels:
        cells = [label]
        for report in reports.values():
            row = report["strategies"].get(label)
            known = [_mean_sd(row), shown_epsilon([row["epsilon"]])] if row and row["mean"] is not None else ["–"]
            cells.append(", ".join(filter(None, known)))
        rows.append(cells)
    headings = [f"{name} ({report['metric']})" for name, report in reports.items()]
    return markdown_table(["method", *headings], rows)


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table, columns of numbers aligned on the right."""
    right = numbers(rows)
    rule = "".join("---:|" if at in right else "---|" for at in range(len(columns)))
    lines = [f"| {' | '.join(columns)} |", f"|{rule}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows)]


def cells_of(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the headings and the rows of a table, as text."""
    compared = {row.get("against", report["against"]) for row in report["strategies"].values()}
    less = "difference, 95 %" if len(compared) > 1 else f"minus {report['against']}, 95 %"
    private = any(row["epsilon"] for row in report["strategies"].values())
    both = any(row.get("shared") for row in report["strategies"].values())
    columns = ["method", report["metric"], *(["of the global model or proxy"] if both else [])]
    columns += [*(["privacy of what left"] if private else []), less, "worst institution", *COSTS]
    rows = []
    for label, row in report["strategies"].items():
        failed = sum(cell["label"] == label and "error" in cell for cell in report["cells"])
        part = sum(cell["label"] == label and bool(cell.get("result", {}).get("untested")) for cell in report["cells"])
        lost = [f"{n} of {len(report['seeds'])} {how}" for n, how in ((failed, "failed"), (part, "left out")) if n]
        name = f"{label} ({', '.join(lost)})" if lost else label
        if row["mean"] is None:
            rows.append([name, *["–"] * (len(columns) - 1)])
            continue
        rows.append(
            [
                name,
                _mean_sd(row),
                *([_mean_sd(row["shared"]) if row["shared"] else "–"] if both else []),
                *([shown_epsilon([row["epsilon"]]) or "no epsilon"] if private else []),
                _difference(row["difference"]) if label not in compared else "",
                f"{row['worst-institution']:.4f}",
                ", ".join(row.get("leaves", [])) or "–",  # older versions did not say so
                shown_bytes(row["bytes-up"]),
                shown_bytes(row["bytes-down"]),
                f"{row['examples-seen']:,.0f}",
                f"{row['seconds']:.1f}",
            ]
        )
    return columns, rows


def _mean_sd(row: Mapping[str, Any]) -> str:
    return f"{row['mean']:.4f}" + (f" ± {row['sd']:.4f}" if row["sd"] is not None else "")


def _sd(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def mean_of(values: Sequence[float]) -> float | None:
    """Return the mean; None of no values."""
    return float(np.mean(values)) if values else None


def _difference(difference: Mapping[str, Any] | None) -> str:
    """Write a paired difference with its interval, if it has one: `+0.0123 [-0.0100, +0.0346]`."""
    if difference is None:
        return "–"
    if difference["interval"] is None:
        return f"{difference['mean']:+.4f}"
    low, high = difference["interval"]
    return f"{difference['mean']:+.4f} [{low:+.4f}, {high:+.4f}]"


def gaps(report: Mapping[str, Any]) -> list[str]:
    """Write a Markdown table of the methods with replay; no lines if there are none, or no Central.

    A gap is what a method lacks to training on pooled data; to any other method its share means nothing. The plain
    method is the one with the same options of its strategy, such as the optimizer's state, and no others. A row has the
    mean of the metric over seeds, the closed share of the gap, (metric - plain) / (central - plain) of these means, and
    the largest epsilon of any institution in any run.
    """
    if report["against"] != "central":
        return []
    metrics: dict[str, list[float]] = {}
    stated: dict[str, list[dict[str, Any]]] = {}
    replayed: dict[str, dict[str, Any]] = {}
    plain_of: dict[tuple[str, ...], str] = {}
    for cell in report["cells"]:
        if "result" in cell:
            metrics.setdefault(cell["label"], []).append(cell["result"]["final"]["global"][report["metric"]])
            stated.setdefault(cell["label"], []).extend(
                account for account in cell["result"]["privacy"].values() if account
            )
            if cell["result"].get("replay", "none") != "none":  # a run of an earlier version has none
                replayed[cell["label"]] = cell
            else:
                plain_of.setdefault((cell["strategy"], *cell.get("options", [])), cell["label"])
    reference, rows = metrics.get("central"), []
    for label, cell in replayed.items():
        own = (option for option in cell.get("options", []) if option.startswith("strategy."))
        plain, values = metrics.get(plain_of.get((cell["strategy"], *own), "")), metrics[label]
        if not plain or not reference:
            continue
        gap = fmean(reference) - fmean(plain)
        share = f"{(fmean(values) - fmean(plain)) / gap:.1%}" if gap else "no gap"
        rows.append([label, f"{fmean(values):.4f}", share, _epsilon(stated[label])])
    return markdown_table(["with replay", report["metric"], "of the gap to central", "largest ε"], rows) if rows else []


def _epsilon(stated: list[dict[str, Any]]) -> str:
    if not stated:
        return "none"
    known = [account for account in stated if account["epsilon"] is not None]
    if len(known) < len(stated):
        return "not protected"
    worst = max(known, key=lambda each: each["epsilon"])
    whole = worst["dp"] == "end-to-end"
    what = "everything that depends on training examples" if whole else "these weights only"
    return f"{rounded_up(worst['epsilon'])} at δ = {rounded_up(worst['delta'], 2)}, {what}"
