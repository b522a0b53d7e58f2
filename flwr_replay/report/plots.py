"""Pictures of studies, losses, epsilon, distances and forgetting; `flwr_replay.report.charts` draws the lines.

A `report` is what `flwr_replay.studies.compare.compare_strategies` returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.errors import RunError
from flwr_replay.files.atomic import write_atomic
from flwr_replay.report.charts import COLOURS, FEW, Chart, curves
from flwr_replay.report.metrics import shown_epsilon
from flwr_replay.report.templates import spared

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_losses", "ending", "epsilons", "heat_map", "histograms", "lines"]

History = Sequence[tuple[float, float]]  # (epoch, value)


def lines(reports: Mapping[str, Mapping[str, Any]]) -> Chart | None:
    """Draw comparisons of the same methods, by name on the x axis: a line per method, with standard deviations."""
    compared = list(reports.values())
    labels = dict.fromkeys(label for report in compared for label in report["strategies"])
    held = {
        label: [
            (at, row["mean"], row["sd"] or 0.0)
            for at, report in enumerate(compared)
            if (row := report["strategies"].get(label)) and row["mean"] is not None
        ]
        for label in labels
    }
    metrics = " or ".join(dict.fromkeys(report["metric"] for report in compared))
    return curves(
        {label: [(at, mean) for at, mean, _ in line] for label, line in held.items()},
        f"{metrics}; band: a standard deviation over seeds",
        {label: [(at, mean - sd, mean + sd) for at, mean, sd in line] for label, line in held.items()},
        {name: float(at) for at, name in enumerate(reports)},
        {label: ending(label, compared) for label in labels},
    )


def ending(label: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """Return what stands beside a method's line: its last mean, and its final epsilon in each of the reports."""
    rows = [row for report in reports if (row := report["strategies"].get(label)) and row["mean"] is not None]
    return ", ".join(
        filter(None, [f"{rows[-1]['mean']:.3f}" if rows else "", shown_epsilon([r["epsilon"] for r in rows])])
    )


def epsilons(lines: Mapping[str, History], marks: Mapping[int, tuple[float, float, float]]) -> Chart:
    """Draw epsilon by epoch; `marks` are by index of a line: epochs, the epsilon that a paper reports there, ours."""
    chart = curves(lines, "epochs")
    if chart is None:
        raise RunError("no epsilon is finite: ask for fewer epochs, or more noise")
    (axes,) = chart.figure.axes
    for place, (epochs, theirs, ours) in marks.items():
        for name, height, inside in (("ours", ours, COLOURS[place]), ("paper", theirs, "white")):
            axes.plot([epochs], [height], "o", color=COLOURS[place], markerfacecolor=inside)
            axes.annotate(
                f"{name} {height:.1f}", (epochs, height), xytext=(-7, 4), textcoords="offset points", ha="right"
            )
    return chart


def draw_losses(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the losses in `generator.jsonl` by epoch into a folder: a picture for each network, but for few epochs."""
    by_network: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        by_institution = by_network.setdefault(row["network"], {})
        by_institution.setdefault(row["institution"], []).append((row["epoch"], row["loss"]))
    for network, by_institution in by_network.items():
        many = max(map(len, by_institution.values())) > FEW
        with spared(file := folder / f"{network}.png"):
            if many and (chart := curves(by_institution, "epoch")):
                write_atomic(file, chart.file("png", f"{network}: loss by epoch"))


def histograms(distances: Mapping[str, NDArray[Any]], distance: str, title: str) -> Chart:
    """Draw how often distances occur in each group, as in Fig. 3 of Pennisi et al. 2023."""
    figure, axes = _axes(6.4, 4, title)
    bins = np.histogram_bin_edges(np.concatenate(list(distances.values())), 30).tolist()
    axes.hist(list(distances.values()), bins, label=list(distances), color=list(COLOURS[: len(distances)]))
    axes.set(xlabel=f"distance: {distance}", ylabel="images")
    axes.legend(frameon=False, fontsize="small")
    heads = ["group", "distance"]
    rows = [(name, float(value)) for name, values in distances.items() for value in values]
    return Chart(figure, title, heads, rows)


def heat_map(forgetting: Mapping[str, Any]) -> Chart:
    """Draw a summary of `ForgettingMatrix`, exchanges downwards and institutions across."""
    matrix = [[float("nan") if value is None else value for value in row] for row in forgetting["matrix"]]
    height, width = len(matrix), len(forgetting["institutions"])
    figure, axes = _axes(1.5 + 0.9 * width, 1.5 + min(0.35 * height, 30))
    image = axes.imshow(matrix, aspect="auto", cmap="viridis")
    axes.set_xticks(range(width), [name.removeprefix("institution-") for name in forgetting["institutions"]])
    labels = [
        f"{entry['round']}: {entry['taught'][0].removeprefix('institution-')}"
        if len(entry["taught"]) == 1
        else str(entry["round"])
        for entry in forgetting["exchanges"]
    ]
    axes.set_yticks(range(height), labels, fontsize="small")
    axes.set(
        xlabel="own data of institution",
        ylabel="after exchange: trained on",
        title=f"{forgetting['metric']}, mean drop {forgetting['mean-drop']:.3f}",
    )
    if height * width <= 400:
        for i, row in enumerate(matrix):
            for j, value in enumerate(row):
                axes.text(j, i, f"{value:.2f}", ha="center", va="center", color="white", fontsize="x-small")
    figure.colorbar(image, ax=axes, shrink=0.8)
    heads = ["exchange", *forgetting["institutions"]]
    rows = [[label, *row] for label, row in zip(labels, forgetting["matrix"], strict=True)]
    return Chart(figure, f"{forgetting['metric']} by exchange and institution", heads, rows)


def _axes(width: float, height: float, title: str = "") -> tuple[Figure, Axes]:
    """Return a figure of a size in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize="medium")
    return figure, axes
