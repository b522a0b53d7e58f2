"""Pages of comparisons and studies, and of whatever has one.

A comparison's has the paired table, the metric by method and by round, and against the values of a swept option, and
how to read them. Methods that are alike but for a swept option are one line of its chart; methods without the option
are level. All that is drawn there is of test examples. The value that is called best is the best on validation
examples, where these judged the rounds.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

from flwr_replay.errors import RunError
from flwr_replay.files.atomic import fits, read_bytes, read_json, read_text, write_atomic
from flwr_replay.files.disk import there
from flwr_replay.report.charts import FORMS as FIGURES
from flwr_replay.report.charts import Chart, Row, curves, dots, write_figures
from flwr_replay.report.comparison import cells_of, ranks, summarise
from flwr_replay.report.metrics import (
    VALIDATION,
    by_epsilon,
    by_round,
    judged,
    judging,
    metric_rows,
    shown_epsilon,
)
from flwr_replay.report.run_files import FORMS, RESULT
from flwr_replay.report.run_page import PAGE, write_run_page
from flwr_replay.report.templates import render, spared
from flwr_replay.report.texts import notes, verdicts

__all__ = ["PICTURES", "sweeps", "write_compare_page", "write_page", "write_study_page"]

PICTURE = re.compile(r'<p><img src="([\w.-]+\.png)" alt="([^"]*)" /></p>')
BESIDE = re.compile(r'(<div class="scroll"(?:(?!</div>).)*</div>)\s*(<figure>.*?</figure>)', re.DOTALL)
COMPARISON, PICTURES = "compare.json", ("compare", "curves", "epsilon")
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


def write_page(place: Path, figures: Path | None = None) -> Path:
    """Write the page of a run, a comparison or a study; return its path.

    `place` is the directory of a run or comparison, or a study's `study-<name>.md`; a folder of runs with one
    comparison means that one. It is a RunError if it is none of these, has not finished, or is damaged. With `figures`,
    a folder that exists, every figure is there, too, as SVG and PDF, with the numbers behind it as CSV.
    """
    if place.suffix == ".md" and place.is_file():
        for file in sorted(place.parent.glob(f"{place.stem}-*")):
            if figures and file.suffix[1:] in (*FIGURES, "csv"):
                write_atomic(figures / file.name, read_bytes(file))
        return write_study_page(place)
    if there(place / RESULT):
        return write_run_page(place, figures)
    if len(comparisons := [file.parent.name for file in sorted(place.glob("*/compare.json"))]) > 1:
        raise RunError(
            f"a report is of one comparison; {place} has {', '.join(comparisons)}: give one of these folders in it"
        )
    place = place / comparisons[0] if comparisons else place
    if there(place / COMPARISON):
        report = read_json(place / COMPARISON, COMPARED)
        known = report["cells"], list(report["strategies"]), report["against"], report["metric"]
        report["strategies"] = summarise(*known, report["higher-is-better"])
        return write_compare_page(place, report, figures)
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
        return f'<figure><img class="drawn" src="data:image/png;base64,{text}" alt="{match[2]}"></figure>'

    heading, _, text = read_text(file).partition("\n")
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    body = BESIDE.sub(r'<div class="beside">\1\2</div>', PICTURE.sub(inside, body))
    page = file.with_suffix(".html")
    title, version = heading.removeprefix("# "), metadata.version("flwr-replay")
    write_atomic(page, render("study", title=title, body=Markup(body), version=version))
    return page


def write_compare_page(folder: Path, report: Mapping[str, Any], figures: Path | None = None) -> Path:
    """Write the page of a comparison, the content of `compare.json`, and its pictures into its folder; return its path.

    With `figures`, a folder, every picture is there, too, as SVG and PDF, with the numbers behind it.
    """
    columns, rows = cells_of(report)
    metric, charts = report["metric"], _charts(folder, report)
    known = {name: chart for name, (chart, _) in charts.items()}
    for name in PICTURES:
        if name in known:
            with spared(file := folder / f"{name}.png"):
                write_atomic(file, known[name].file("png", report["title"]))
    if figures:
        write_figures(figures, known)
    against = ", ".join(dict.fromkeys(row["against"] for row in report["strategies"].values()))
    runs = [(cell, folder / cell["folder"]) for cell in report["cells"] if "result" in cell]
    faults = [metric_rows(run, cell["result"]["rounds"])[1] for cell, run in runs]
    verdict_lines = verdicts(report)
    seeds = len(report["seeds"])
    over = f"over {seeds} seeds" if seeds > 1 else "on one seed"
    methods = list(report["strategies"])
    text = render(
        "compare",
        title=report["title"],
        question=f"Which of {len(methods)} methods has the best {metric} {over}: {', '.join(methods)}?",
        verdicts=verdict_lines,
        table={"caption": f"{metric}, and the difference to {against} seed by seed", "heads": columns, "rows": rows},
        charts=charts,
        judged=_judged_by(report),
        notes=[*filter(None, faults), *(note for note in notes(report) if note not in verdict_lines)],
        count=len(report["cells"]),
        seeds=report["seeds"],
        runs=[
            (
                label,
                [
                    (
                        "–" if (value := row["values"].get(seed)) is None else f"{value:.4f}",
                        next(
                            (f"{c['folder']}/{PAGE}" for c, run in runs if (c["label"], c["seed"]) == (label, seed)), ""
                        ),
                    )
                    for seed in report["seeds"]
                ],
            )
            for label, row in report["strategies"].items()
        ],
        options=dict.fromkeys(
            [*report["options"], *(f"{c['label']}: {o}" for c in report["cells"] for o in c["options"])]
        ),
        version=next((cell["result"]["versions"]["flwr-replay"] for cell, _ in runs), ""),
    )
    write_atomic(folder / PAGE, text)
    return folder / PAGE


def _charts(folder: Path, report: Mapping[str, Any]) -> dict[str, tuple[Chart, str]]:
    """Return a comparison's charts with their captions, by the names of their files."""
    metric, table = report["metric"], report["strategies"]
    rows = {label: row for label, row in table.items() if row["mean"] is not None}
    seeds = len(report["seeds"]) > 1
    charts: dict[str, tuple[Chart | None, str]] = {}
    if rows:
        named = {
            label: Row(
                {str(seed): value for seed, value in row["values"].items()},
                row["mean"],
                row["interval"],
                table[row["against"]]["mean"],
                shown_epsilon([row["epsilon"]]),
            )
            for label, row in rows.items()
        }
        against = ", ".join(dict.fromkeys(row["against"] for row in rows.values()))
        less = "" if report["higher-is-better"] else "; less is better"
        ends = "; line: 95 % interval" if any(row["interval"] for row in rows.values()) else ""
        many = f": a dot for each seed; bar: mean{ends}" if seeds else ""
        charts["compare"] = dots(named), f"{metric} of test examples{many}; dashed: {against}{less}"
    band = ", mean over seeds; band: lowest to highest seed" if seeds else ""
    runs = {
        label: [folder / cell["folder"] for cell in report["cells"] if cell["label"] == label and "result" in cell]
        for label in rows
    }
    of = judging(report)
    validated = of.startswith(VALIDATION)
    what = f"{of.removeprefix(VALIDATION)} of validation examples" if validated else of
    for name, axis, histories in (
        ("curves", "round", {label: [by_round(run, metric) for run in own] for label, own in runs.items()}),
        ("epsilon", "largest epsilon so far", {label: by_epsilon(own, metric) for label, own in runs.items()}),
    ):
        lines, bands = {}, {}
        for label, alike in histories.items():
            by_x = [dict(history) for history in alike]
            shared = sorted(set.intersection(*map(set, by_x))) if by_x else []
            lines[label] = [(x, fmean(ys[x] for ys in by_x)) for x in shared]
            if len(by_x) > 1:
                bands[label] = [(x, min(ys[x] for ys in by_x), max(ys[x] for ys in by_x)) for x in shared]
        told = {
            label: f"{line[-1][1]:.3f}" + f" (test {rows[label]['mean']:.3f})" * validated
            for label, line in lines.items()
            if line
        }
        charts[name] = curves(lines, axis, bands, told=told), f"{what} by {axis}{band}"
    if ranked := ranks(report):
        overlap = "lines that do not overlap: a difference by Nemenyi's test"
        charts["ranks"] = ranked.chart, f"rank by {metric}, 1 is best: a dot for each seed; bar: mean; {overlap}"
    return {name: (chart, caption) for name, (chart, caption) in charts.items() if chart} | sweeps(report)


def _judged_by(report: Mapping[str, Any]) -> str:
    """Say how far a metric of validation examples, at the end, is from that of test examples; empty if none judged."""
    means, by = _judging(report)
    tested = {label: report["strategies"][label]["mean"] for label in means}
    apart = {label: means[label] - mean for label, mean in tested.items() if mean is not None}
    if not by or not apart:
        return ""
    most = max(apart, key=lambda label: abs(apart[label]))
    return (
        "These curves are of validation examples, the table and the dots of test examples, which are used once, at "
        f"the end. The two differ most for {most}: {means[most]:.3f} and {tested[most]:.3f}."
    )


def sweeps(report: Mapping[str, Any]) -> dict[str, tuple[Chart, str]]:
    """Return a chart and a caption for every swept option of a comparison."""
    cells = {cell["label"]: cell for cell in report["cells"]}
    own = {
        label: (cell["strategy"], dict(option.split("=", 1) for option in cell["options"]))
        for label, cell in cells.items()
        if report["strategies"][label]["mean"] is not None
    }
    drawn = {}
    for key in dict.fromkeys(key for _, options in own.values() for key in options):
        groups: dict[tuple[Any, ...], dict[str, float]] = {}  # by all that is alike: the value of every label
        for label, (strategy, options) in own.items():
            if (value := _number(options.get(key, ""))) is not None:
                alike = strategy, *sorted(pair for pair in options.items() if pair[0] != key)
                groups.setdefault(alike, {})[label] = value
        swept = [group for group in groups.values() if len({*group.values()}) > 1]
        level = [label for label, (_, options) in own.items() if key not in options]
        if swept and (pair := _drawn(report, key, swept, level)):
            drawn[f"by-{key}"] = pair
    return drawn


def _drawn(
    report: Mapping[str, Any], key: str, swept: Sequence[Mapping[str, float]], level: Sequence[str]
) -> tuple[Chart, str] | None:
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
    points = {name: ", ".join(f"{row['mean']:.3f} at {value:g}" for value, row in line) for name, line in lines.items()}
    shown = "; ".join(f"{name}: {text}" for name, text in points.items())
    caption = f"{metric} by {key}" + ", mean over seeds; band: lowest to highest seed" * seeds
    return replace(chart, told=shown), caption


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
    return ":".join(word for word in label.split(":") if word.partition("=")[0].replace("-", "_") not in names)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
