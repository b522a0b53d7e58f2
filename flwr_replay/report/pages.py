"""Pages of comparisons and studies, and of whatever has one.

A comparison's has the paired table, the metric by method and by round, and against the values of a swept option, and
how to read them. Methods that are alike but for a swept option are one line of its chart; methods without the option
are level. All that is drawn there is of test examples. The value that is called best is the best on validation
examples, where these judged the rounds.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

from flwr_replay.errors import RunError
from flwr_replay.files.atomic import fits, read_bytes, read_json, read_text, write_atomic
from flwr_replay.files.disk import there
from flwr_replay.report.charts import Curves, bars, curves
from flwr_replay.report.comparison import cells_of, summarise
from flwr_replay.report.metrics import VALIDATION, by_round, judged, judging, metric_rows
from flwr_replay.report.run_files import FORMS, RESULT
from flwr_replay.report.run_page import PAGE, write_run_page
from flwr_replay.report.templates import render
from flwr_replay.report.texts import notes, verdicts

__all__ = ["sweeps", "write_compare_page", "write_page", "write_study_page"]

PICTURE = re.compile(r'<img src="([\w.-]+\.png)"')
COMPARISON = "compare.json"
CELL = {"label": str, "strategy": str, "seed": int, "folder": str, "options": [str]}
COMPARED = {
    **dict.fromkeys(("title", "against", "metric"), str),
    "options": [str],
    "higher-is-better": bool,
    "seeds": [int],
    "strategies": {...: dict},
    "cells": [lambda cell: fits(cell, CELL | ({"error": str} if "error" in cell else {"result": FORMS[RESULT]}))],
}

Point = tuple[float, Mapping[str, Any]]  # the value of a swept option, and the summary of the method that has it


def write_page(place: Path) -> Path:
    """Write the page of a run, a comparison or a study; return its path.

    `place` is the directory of a run or comparison, or a study's `study-<name>.md`; a folder of runs with one
    comparison means that one. It is a RunError if it is none of these, has not finished, or is damaged.
    """
    if place.suffix == ".md" and place.is_file():
        return write_study_page(place)
    if there(place / RESULT):
        return write_run_page(place)
    if len(comparisons := [file.parent.name for file in sorted(place.glob("*/compare.json"))]) > 1:
        raise RunError(
            f"a report is of one comparison; {place} has {', '.join(comparisons)}: give one of these folders in it"
        )
    place = place / comparisons[0] if comparisons else place
    if there(place / COMPARISON):
        report = read_json(place / COMPARISON, COMPARED)
        known = report["cells"], list(report["strategies"]), report["against"], report["metric"]
        report["strategies"] = summarise(*known, report["higher-is-better"])
        return write_compare_page(place, report)
    raise RunError(
        f"a report is of a finished run (result.json), a comparison (compare.json) or a study (study-….md); {place} is "
        "none of these"
    )


def write_study_page(file: Path) -> Path:
    """Write a study's page beside its `study-<name>.md`; return its path."""
    from markdown_it import MarkdownIt
    from markupsafe import Markup

    def inside(match: re.Match[str]) -> str:
        picture = file.parent / match[1]
        text = base64.b64encode(read_bytes(picture)).decode() if picture.exists() else ""
        return f'<img src="data:image/png;base64,{text}"'

    heading, _, text = read_text(file).partition("\n")
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    page = file.with_suffix(".html")
    title, version = heading.removeprefix("# "), metadata.version("flwr-replay")
    write_atomic(page, render("study", title=title, body=Markup(PICTURE.sub(inside, body)), version=version))
    return page


def write_compare_page(folder: Path, report: Mapping[str, Any]) -> Path:
    """Write the page of a comparison, the content of `compare.json`, into its folder; return its path."""
    columns, rows = cells_of(report)
    metric = report["metric"]
    against = ", ".join(dict.fromkeys(row["against"] for row in report["strategies"].values()))
    means = {label: row["mean"] for label, row in report["strategies"].items() if row["mean"] is not None}
    runs = [(cell, folder / cell["folder"]) for cell in report["cells"] if "result" in cell]
    lines, bands = {}, {}
    for label in means:
        histories = [dict(by_round(run, metric)) for cell, run in runs if cell["label"] == label]
        rounds = sorted(set.intersection(*map(set, histories)))
        lines[label] = [(at, fmean(history[at] for history in histories)) for at in rounds]
        if len(histories) > 1:
            ends = [[history[at] for history in histories] for at in rounds]
            bands[label] = [(at, min(values), max(values)) for at, values in zip(rounds, ends, strict=True)]
    faults = [metric_rows(run, cell["result"]["rounds"])[1] for cell, run in runs]
    verdict_lines = verdicts(report)
    seeds = len(report["seeds"])
    over = f"over {seeds} seeds" if seeds > 1 else "on one seed"
    methods = list(report["strategies"])
    better = "" if report["higher-is-better"] else "; less is better"
    text = render(
        "compare",
        title=report["title"],
        question=f"Which of {len(methods)} methods has the best {metric} {over}: {', '.join(methods)}?",
        verdicts=verdict_lines,
        table={"caption": f"{metric}, and the difference to {against} seed by seed", "heads": columns, "rows": rows},
        bars=bars({label: (mean, means.get(report["strategies"][label]["against"])) for label, mean in means.items()})
        if means
        else None,
        bars_caption=f"{metric}, mean over seeds{better}; dashed: {against}",
        sweeps=sweeps(report),
        chart=curves(lines, "round", bands),
        chart_caption=f"{judging(report)} by round, mean over seeds" + "; band: lowest to highest seed" * bool(bands),
        notes=[*filter(None, faults), *(note for note in notes(report) if note not in verdict_lines)],
        pages=[
            (f"{cell['label']}, seed {cell['seed']}", f"{cell['folder']}/{PAGE}")
            for cell, run in runs
            if (run / PAGE).exists()
        ],
        options=report["options"],
        version=next((cell["result"]["versions"]["flwr-replay"] for cell, _ in runs), ""),
    )
    write_atomic(folder / PAGE, text)
    return folder / PAGE


def sweeps(report: Mapping[str, Any]) -> list[tuple[Curves, str, str]]:
    """Return a chart, a caption and a text in place of the picture for every swept option of a comparison."""
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
