"""A comparison's metric against the values of a swept option, as a chart for each option with several numbers.

Methods that are alike but for this option are one line. Methods without the option are level. All that is drawn is of
test examples. The value that is called best is the best on validation examples, where these judged the rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from flwr_replay.report.charts import Curves, curves
from flwr_replay.report.judged import VALIDATION, judged

__all__ = ["sweeps"]

Point = tuple[float, Mapping[str, Any]]  # the option's value, and the summary of the method that has it


def sweeps(report: Mapping[str, Any]) -> list[tuple[Curves, str, str]]:
    """Return a chart, a caption and a text in place of the picture for every swept option.

    Parameters
    ----------
    report : Mapping
        The content of `compare.json`.
    """
    cells = {cell["label"]: cell for cell in report["cells"]}
    own = {
        label: (cell["strategy"], dict(option.split("=", 1) for option in cell["options"]))
        for label, cell in cells.items()
        if report["strategies"][label]["mean"] is not None
    }
    drawn = []
    for key in dict.fromkeys(key for _, options in own.values() for key in options):
        groups: dict[tuple[Any, ...], dict[str, float]] = {}  # by all that is alike: the value of every label
        for label, (strategy, options) in own.items():
            if (value := _number(options.get(key, ""))) is not None:
                alike = strategy, *sorted(pair for pair in options.items() if pair[0] != key)
                groups.setdefault(alike, {})[label] = value
        swept = [group for group in groups.values() if len({*group.values()}) > 1]
        if swept:
            level = [label for label, (_, options) in own.items() if key not in options]
            drawn.append(_drawn(report, key, swept, level))
    return [chart for chart in drawn if chart]


def _drawn(
    report: Mapping[str, Any], key: str, swept: Sequence[Mapping[str, float]], level: Sequence[str]
) -> tuple[Curves, str, str] | None:
    rows, metric = report["strategies"], report["metric"]
    lines: dict[str, list[Point]] = {}
    told, best, (judging, by) = {}, max if report["higher-is-better"] else min, _judging(report)
    for group in swept:
        name = next(iter(stems)) if len(stems := {_stem(label, key) for label in group}) == 1 else " / ".join(group)
        lines[name] = sorted(((value, rows[label]) for label, value in group.items()), key=lambda point: point[0])
        chosen = best(group, key=lambda label: judging.get(label, rows[label]["mean"]))
        told[name] = f"best {rows[chosen]['mean']:.3f} at {group[chosen]:g}{by}"
    values = sorted({value for line in lines.values() for value, _ in line})
    for label in level:
        lines[label] = [(end, rows[label]) for end in (values[0], values[-1])]
        told[label] = f"{rows[label]['mean']:.3f}, without this option"
    seeds = len(report["seeds"]) > 1
    chart = curves(
        {name: [(value, row["mean"]) for value, row in line] for name, line in lines.items()},
        key,
        bands={
            name: [(value, min(row["values"].values()), max(row["values"].values())) for value, row in line]
            for name, line in lines.items()
            if seeds
        },
        values=values,
        told=told,
    )
    if chart is None:
        return None
    caption = f"{metric} by {key}" + ", mean over seeds; band: lowest to highest seed" * seeds
    points = {name: ", ".join(f"{row['mean']:.3f} at {value:g}" for value, row in line) for name, line in lines.items()}
    shown = "; ".join(f"{name}: {text}" for name, text in points.items())
    return chart, caption, f"{caption}. {shown}."


def _judging(report: Mapping[str, Any]) -> tuple[dict[str, float], str]:
    """Return the mean over seeds of the metric that chooses, by label; words for it if it is of validation examples."""
    judging: dict[str, list[float]] = {}
    by = ""
    for cell in report["cells"]:
        metrics = cell["result"]["final"]["global"] if "result" in cell else {}
        if (name := judged(report["metric"], metrics)) in metrics:
            judging.setdefault(cell["label"], []).append(metrics[name])
            by = ", by validation examples" if name.startswith(VALIDATION) else by
    return {label: fmean(values) for label, values in judging.items()}, by


def _stem(label: str, key: str) -> str:
    """Return a label without the swept option.

    >>> _stem("deep:lr=0.1:local-epochs=2", "training.lr")
    'deep:local-epochs=2'
    """
    names = {key, key.rpartition(".")[2]}
    return ":".join(part for part in label.split(":") if part.partition("=")[0].replace("-", "_") not in names)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
