"""Line charts and bars of the pages, as SVG that stands in the page itself; Matplotlib draws them.

Its colours become variables of the style sheet and its letters those of the page, so that pictures follow light and
dark.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, filterwarnings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Curves", "bars", "curves"]

WIDTH, HEIGHT = 640, 260  # of a line chart, in units of its view box
LEFT, RIGHT, TOP, BOTTOM = 72, 12, 12, 40  # around its axes
NAMES, VALUES, ROW = 200, 70, 26  # of bars: room for names and for values, height of a row
STEPS = (1, 2, 2.5, 5, 10)  # between ticks, times a power of ten
LOGARITHMIC = 10  # times the smallest value that the largest is, from which an axis of given values is logarithmic
POINTS = 40  # a line with more has no marks
INK, GRID = "#1b1b1b", "#c9c9c9"
COLOURS = ("#0072b2", "#b34700", "#007a5a", "#8f4a9e", "#6b6b00", "#a3003d", "#4d4d4d", "#00708a")
DASHES = ("-", (0, (6, 3)), (0, (2, 3)), (0, (8, 3, 2, 3)), (0, (12, 4)), (0, (4, 4)), (0, (1, 4)), (0, (10, 2, 2, 2)))
VARIABLES = {INK: "--ink", GRID: "--line"} | {colour: f"--c{look}" for look, colour in enumerate(COLOURS)}
NOT_OF_A_PAGE = (  # of a file that stands alone: its size, its own styles, numbers that no element refers to
    r"^.*?(?=<svg)",
    r"<metadata>.*?</metadata>",
    r"<defs>\s*<style.*?</defs>",
    r' (width|height)="[\d.]+pt"',
    r' id="[a-zA-Z0-9.]+_\d+"',
)
LETTERS = re.compile(r"(font|font-size|font-family): [^;\"]*;? ?")
STYLE = re.compile(r'style="[^"]*"')


@dataclass(frozen=True)
class Curves:
    """A line chart."""

    svg: str
    legend: Sequence[tuple[str, int, str]]  # of each line: its name, its look in the style sheet, what is said of it


def curves(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    x_name: str,
    bands: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
    values: Sequence[float] = (),
    told: Mapping[str, str] | None = None,
) -> Curves | None:
    """Draw lines, (x, y) in order by name, in a chart; None if none has a finite point, and only these are drawn.

    Bands by name, (x, lowest, highest) in order, are shaded behind. If `values` are the only x that there are,
    ascending, ticks stand at these, and where they are positive and span a factor of ten or more, the axis is
    logarithmic. The legend says of a line what is `told` of it, else its last y.
    """
    from matplotlib.ticker import MaxNLocator, NullLocator

    figure, axes = _axes(WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM)
    legend = []
    for place, (name, line) in enumerate(lines.items()):
        look = place % len(COLOURS)
        if finite := [(x, y) for x, y in line if math.isfinite(y)]:
            xs, ys = zip(*finite, strict=True)
            marker = "o" if len(finite) <= POINTS else ""
            axes.plot(xs, ys, marker, color=COLOURS[look], linestyle=DASHES[look])
            legend.append((name, look, (told or {}).get(name, f"{ys[-1]:.3f} at the end")))
        band = [ends for ends in (bands or {}).get(name, ()) if all(map(math.isfinite, ends))]
        if len(band) > 1:
            xs, low, high = zip(*band, strict=True)
            axes.fill_between(xs, low, high, color=COLOURS[look], alpha=0.15, linewidth=0)
    if not legend:
        return None
    if values:
        log = len(values) > 1 and values[0] > 0 and values[-1] >= LOGARITHMIC * values[0]
        axes.set_xscale("log" if log else "linear")
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.xaxis.set_minor_locator(NullLocator())
        x_name = f"{x_name}, logarithmic" if log else x_name
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=x_name == "round", steps=STEPS, min_n_ticks=1))
        axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=STEPS))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y", color=GRID)
    axes.set_xlabel(x_name, color=INK, parse_math=False)
    return Curves(_svg(figure), legend)


def bars(values: Mapping[str, tuple[float, float | None]]) -> str:
    """Draw a bar for each name: its value, and a second value that a mark shows, or None."""
    figure, axes = _axes(WIDTH, ROW * len(values), NAMES, VALUES, 0, 0)
    axes.set_axis_off()
    axes.set_ylim(len(values) - 0.5, -0.5)
    ends = [[abs(v) if v is not None and math.isfinite(v) else 0.0 for v in pair] for pair in values.values()]
    axes.set_xlim(0, max(map(max, ends), default=0.0) or 1.0)
    axes.barh(range(len(ends)), [length for length, _ in ends], 0.7, color=COLOURS[0])
    marked = [at for at, (_, mark) in enumerate(values.values()) if mark is not None]
    low, high = [at - 0.45 for at in marked], [at + 0.45 for at in marked]
    axes.vlines([ends[at][1] for at in marked], low, high, INK, (0, (3, 2)), linewidth=2, clip_on=False)
    near: dict[str, Any] = {"va": "center", "color": INK, "parse_math": False, "textcoords": "offset points"}
    for at, (name, (value, _)) in enumerate(values.items()):
        axes.annotate(name if len(name) <= 20 else f"{name[:19]}…", (0, at), (-8, 0), ha="right", **near)
        axes.annotate(f"{value:.3f}", (max(ends[at]), at), (8, 0), **near)
    return _svg(figure)


def _axes(width: int, height: int, left: int, right: int, top: int, bottom: int) -> tuple[Figure, Axes]:
    """Return a figure of a size in points, and its axes, which leave room around them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72), facecolor="none")
    place = left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height
    axes = figure.add_axes(place, facecolor="none")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelcolor=INK)
    return figure, axes


def _svg(figure: Figure) -> str:
    """Return a picture as an element of a page; texts in it are escaped."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "flwr-replay"}), catch_warnings():
        filterwarnings("ignore", "Glyph")  # that Matplotlib's font lacks; the page's may have it
        figure.savefig(file, format="svg")
    text = file.getvalue()
    for superfluous in NOT_OF_A_PAGE:
        text = re.sub(superfluous, "", text, flags=re.DOTALL)
    return STYLE.sub(lambda style: _styled(style[0]), text)


def _styled(style: str) -> str:
    """Return a style without letters of its own, and with the page's colours."""
    for colour, variable in VARIABLES.items():
        style = style.replace(colour, f"var({variable})")
    return LETTERS.sub("", style)
