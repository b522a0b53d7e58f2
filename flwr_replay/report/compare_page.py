"""A comparison's page, `report.html`: the paired table, the metric by method and by round, and how to read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from flwr_replay.files.atomic import write_atomic
from flwr_replay.report.charts import bars, curves
from flwr_replay.report.comparison import cells_of
from flwr_replay.report.histories import by_round, metric_rows
from flwr_replay.report.judged import judging
from flwr_replay.report.notes import notes, verdicts
from flwr_replay.report.run_page import PAGE
from flwr_replay.report.sweep import sweeps
from flwr_replay.report.templates import render

__all__ = ["write_compare_page"]


def write_compare_page(folder: Path, report: Mapping[str, Any]) -> Path:
    """Write a comparison's page into its folder; return its path.

    Parameters
    ----------
    folder : Path
        The comparison's folder, with the folders of its runs.
    report : Mapping
        The content of `compare.json`.
    """
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
    better = "" if report["higher-is-better"] else "; less is better"
    text = render(
        "compare",
        title=report["title"],
        question=_question(report),
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


def _question(report: Mapping[str, Any]) -> str:
    seeds, labels = len(report["seeds"]), list(report["strategies"])
    over = f"over {seeds} seeds" if seeds > 1 else "on one seed"
    return f"Which of {len(labels)} methods has the best {report['metric']} {over}: {', '.join(labels)}?"
