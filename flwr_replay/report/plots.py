"""Pictures of comparisons, losses and epsilon, drawn without pyplot, which has global state.

All are PNG but `by_round`. A `report` is what `flwr_replay.studies.compare.compare_strategies` returns.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from flwr_replay.files.atomic import write_atomic
from flwr_replay.report.metrics import judging, shown_epsilon
from flwr_replay.report.templates import spared

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["by_round", "curves", "draw_losses", "epsilons", "heat_map", "histograms", "lines", "points"]

# Okabe and Ito's palette without yellow: distinct for the colour-blind; markers distinguish methods in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SPREAD = 0.36  # width of a method's seeds on the x axis, where methods are 1 apart
History = Sequence[tuple[float, float]]  # (round, metric)


def points(report: Mapping[str, Any]) -> bytes:
    """Draw one point per seed, and each method's mean with its 95 % interval."""
    labels, seeds = list(report["strategies"]), list(report["seeds"])
    epsilons_shown = {
        shown_epsilon([row["epsilon"]]) for row in report["strategies"].values() if row["mean"] is not None
    }
    alike = len(epsilons_shown) == 1 and len(labels) > 1  # then the title says it once
    title = "\n".join(filter(None, [report["title"], *(epsilons_shown if alike else [])]))
    figure, axes = _axes(max(4.8, 1.25 * len(labels) + 1.2), 4.2, title)
    shown: list[float] = []
    for place, label in enumerate(labels):
        row, (colour, marker) = report["strategies"][label], _look(place)
        if row["mean"] is None:
            axes.annotate("failed", (place, 0.5), xycoords=("data", "axes fraction"), ha="center", color="grey")
            continue
        # A seed has the same offset in every method, so that its points can be followed across methods.
        offsets = np.linspace(-SPREAD, 0, len(seeds)) if len(seeds) > 1 else np.zeros(1)
        xs = [place + offset for seed, offset in zip(seeds, offsets, strict=True) if seed in row["values"]]
        ys = [row["values"][seed] for seed in seeds if seed in row["values"]]
        shown += ys
        axes.plot(xs, ys, marker, color=colour, markersize=6, alpha=0.75, markeredgecolor="white", zorder=3)
        middle = place + 0.17
        if row["interval"]:
            low, high = row["interval"]
            shown += [low, high]
            axes.plot([middle, middle], [low, high], color=colour, linewidth=2, zorder=2)
        axes.plot([middle - 0.1, middle + 0.1], [row["mean"]] * 2, color=colour, linewidth=3, zorder=4)
        axes.annotate(
            f"{row['mean']:.3f}",
            (middle + 0.1, row["mean"]),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
        )
    axes.set_xticks(range(len(labels)), [_broken(label if alike else _named(label, [report])) for label in labels])
    axes.set_xlim(-0.6, len(labels) - 0.25)
    _scale(axes, shown)
    axes.set(ylabel=report["metric"])
    mean = "bar: mean" + (
        ", line: its 95 % interval" if any(row["interval"] for row in report["strategies"].values()) else ""
    )
    axes.set_xlabel(f"a point per seed; {mean}", fontsize="small", color="#444444")
    return _png(figure)


def by_round(lines: Mapping[str, History], metric: str) -> Figure:
    """Draw a metric by round, a line for each name; the first is the widest if it is of all institutions."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _axes(8.4, 4.4)
    for place, (name, line) in enumerate(lines.items()):
        (colour, marker), width = _look(place), 2.5 if name == "all institutions" else 1.2
        axes.plot(*zip(*line, strict=True), label=name, color=colour, marker=marker, linewidth=width, markersize=4)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="round", ylabel=metric)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def curves(report: Mapping[str, Any], histories: Mapping[str, Sequence[History]], axis: str = "round") -> bytes:
    """Draw each method's metric by round: the mean over seeds, and a band from the lowest to the highest.

    `histories` are by label, for each finished run: (round, metric) in order, or what `axis` names in place of round.
    """
    from matplotlib.ticker import MaxNLocator

    figure, axes = _axes(8.4, 4.4, report["title"])
    shown: list[float] = []
    for place, (label, runs) in enumerate(histories.items()):
        colour, marker = _look(place)
        rounds = sorted(set.intersection(*(set(dict(run)) for run in runs))) if runs else []
        if not rounds:
            continue
        values_SR = np.array([[dict(run)[at] for at in rounds] for run in runs])
        shown += values_SR.ravel().tolist()
        axes.plot(rounds, values_SR.mean(0), marker=marker, color=colour, label=_named(label, [report]), markersize=5)
        axes.fill_between(rounds, values_SR.min(0), values_SR.max(0), color=colour, alpha=0.15, linewidth=0)
    _scale(axes, shown)
    axes.xaxis.set_major_locator(MaxNLocator(integer=axis == "round"))
    axes.set(xlabel=f"{axis}; line: mean over seeds, band: lowest to highest", ylabel=judging(report))
    if shown:
        figure.legend(loc="outside right center", frameon=False)
    return _png(figure)


def lines(reports: Mapping[str, Mapping[str, Any]], title: str) -> bytes:
    """Draw comparisons of the same methods, by name on the x axis: a line per method, with standard deviations."""
    names, compared = list(reports), list(reports.values())
    labels = list(dict.fromkeys(label for report in compared for label in report["strategies"]))
    figure, axes = _axes(8.4, 4.4, title)
    shown: list[float] = []
    for place, label in enumerate(labels):
        colour, marker = _look(place)
        rows = [(at, report["strategies"].get(label)) for at, report in enumerate(compared)]
        held = [(at, row["mean"], row["sd"] or 0.0) for at, row in rows if row and row["mean"] is not None]
        if held:
            xs, means, sds = zip(*held, strict=True)
            shown += [mean + sign * sd for mean, sd in zip(means, sds, strict=True) for sign in (-1, 1)]
            style = ("-", "--", ":")[place // len(COLOURS) % 3]
            moved = [at + 0.02 * (place - len(labels) / 2) for at in xs]  # so that bars do not hide each other
            named = _named(label, compared)
            axes.errorbar(moved, means, sds, color=colour, marker=marker, linestyle=style, label=named, capsize=2)
    axes.set_xticks(range(len(names)), names)
    _scale(axes, shown)
    metrics = " or ".join(dict.fromkeys(report["metric"] for report in compared))
    axes.set(ylabel=f"{metrics}; mean and standard deviation over seeds")
    figure.legend(loc="outside right center", frameon=False, fontsize="small")
    return _png(figure)


def epsilons(lines: Mapping[str, History], marks: Mapping[int, tuple[float, float, float]], title: str) -> bytes:
    """Draw epsilon by epoch; `marks` are by index of a line: epochs, the epsilon that a paper reports there, ours."""
    figure, axes = _axes(6.4, 4.2, title)
    for place, (label, line) in enumerate(lines.items()):
        axes.plot(*zip(*line, strict=True), color=_look(place)[0], label=label)
    for place, (epochs, theirs, ours) in marks.items():
        colour, marker = _look(place)
        axes.plot([epochs], [ours], marker, color=colour)
        axes.plot([epochs], [theirs], marker, color=colour, markerfacecolor="white")
        for name, height in (("ours", ours), ("paper", theirs)):
            axes.annotate(
                f"{name} {height:.1f}", (epochs, height), xytext=(-7, 4), textcoords="offset points", ha="right"
            )
    axes.set(xlabel="epochs", ylabel="ε", ylim=(0, None))
    axes.grid(axis="y", color="#DDDDDD", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return _png(figure)


def draw_losses(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the losses in the lines of `generator.jsonl` by epoch into a folder, a picture for each kind of network."""
    by_network: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        by_institution = by_network.setdefault(row["network"], {})
        by_institution.setdefault(row["institution"], []).append((row["epoch"], row["loss"]))
    for network, by_institution in by_network.items():
        with spared(file := folder / f"{network}.png"):
            figure, axes = _axes(6.4, 4, f"{network}: loss by epoch", layout=None)
            for place, (name, history) in enumerate(by_institution.items()):
                colour, marker = _look(place)
                axes.plot(*zip(*history, strict=True), color=colour, marker=marker, label=name)
            axes.set(xlabel="epoch", ylabel="loss")
            axes.legend(frameon=False, fontsize="small")
            write_atomic(file, _png(figure))


def histograms(distances: Mapping[str, NDArray[Any]], distance: str, title: str) -> bytes:
    """Draw how often distances occur in each group, as in Fig. 3 of Pennisi et al. 2023."""
    figure, axes = _axes(6.4, 4, title)
    bins = np.histogram_bin_edges(np.concatenate(list(distances.values())), 30).tolist()
    axes.hist(list(distances.values()), bins, label=list(distances), color=list(COLOURS[: len(distances)]))
    axes.set(xlabel=f"distance: {distance}", ylabel="images")
    axes.legend(frameon=False, fontsize="small")
    return _png(figure)


def heat_map(forgetting: Mapping[str, Any]) -> bytes:
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
    return _png(figure)


def _axes(
    width: float, height: float, title: str = "", layout: Literal["constrained"] | None = "constrained"
) -> tuple[Figure, Axes]:
    """Return a figure of a size in inches, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    axes = figure.subplots()
    axes.set_title(title, fontsize="medium")
    return figure, axes


def _named(label: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """Return a method's label with its final epsilon in each of the reports that include the method."""
    rows = [report["strategies"].get(label) for report in reports]
    epsilon = shown_epsilon([row["epsilon"] for row in rows if row and row["mean"] is not None])
    return f"{label}\n{epsilon}" if epsilon else label


def _broken(label: str) -> str:
    """Break a label that stands under a tick, between its parts."""
    return re.sub(r":(?!=)| (?=at delta|\(dp=)|, (?=no proof)", "\n", label)


def _look(place: int) -> tuple[str, str]:
    return COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]


def _scale(axes: Axes, shown: Sequence[float]) -> None:
    """Fit the y axis to points and intervals; where all of them lie between 0 and 1, it does, too."""
    if not shown:
        return
    low, high = min(shown), max(shown)
    margin = max(0.08 * (high - low), 0.005)
    share = low >= 0 and high <= 1
    bottom, top = (max(low - margin, -0.02), min(high + margin, 1.02)) if share else (low - margin, high + margin)
    axes.set_ylim(bottom, top)
    axes.grid(axis="y", color="#DDDDDD", zorder=0)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _png(figure: Figure) -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()
