"""Pictures of runs and comparisons: lines, and a dot for each seed. Names stand beside what they name.

A page has them as SVG in its own colours and letters, so that they follow light and dark; files are PNG, PDF or SVG.
The numbers behind each are CSV. Matplotlib draws them, without pyplot, which has global state.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, filterwarnings

from flwr_replay.files.atomic import write_atomic
from flwr_replay.files.table import csv_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "FEW", "FORMS", "Chart", "Row", "curves", "dots", "write_figures"]

FORMS = ("svg", "pdf")  # of figures for a paper
WIDTH, HEIGHT = 560, 230  # of a line chart, in points
LEFT, RIGHT, TOP, BOTTOM = 52, 172, 10, 38  # around its axes; the names of lines are on the right
ROW, NAMES, VALUES = 32, 165, 56  # of dots: height of a row, room for names and for means
LETTER, LINE, BROAD = 12, 15, 20  # size of letters, distance of lines of text, letters in one
STEPS = (1, 2, 2.5, 5, 10)  # between ticks, times a power of ten
LOGARITHMIC = 10  # times the smallest value that the largest is, from which an axis of given values is logarithmic
POINTS, FEW = 40, 2  # a line with more has no marks; one with as few tells no more than its numbers
LEADER = {"arrowstyle": "-", "linewidth": 0.7, "relpos": (-0.03, 0.5), "patchA": None, "shrinkA": 0, "shrinkB": 0}
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

Band = tuple[float, float, float]  # x, the lowest and the highest y


@dataclass(frozen=True)
class Chart:
    """A picture and the numbers behind it."""

    figure: Figure
    told: str  # in words what it shows, for who cannot see it
    heads: Sequence[str]
    rows: Sequence[Sequence[object]]

    @property
    def svg(self) -> str:
        """The picture as an element of a page; texts in it are escaped."""
        text = self.file("svg", transparent=True).decode()
        for superfluous in NOT_OF_A_PAGE:
            text = re.sub(superfluous, "", text, flags=re.DOTALL)
        return STYLE.sub(lambda style: _styled(style[0]), text)

    @property
    def csv(self) -> str:
        """The numbers, under headings."""
        return csv_text([self.heads, *self.rows])

    def file(self, form: str, title: str = "", transparent: bool = False) -> bytes:
        """Return the content of a file: png, svg or pdf; a title is above the picture."""
        from matplotlib import rc_context

        file, known = io.BytesIO(), {} if form == "png" else {"Date": None} if form == "svg" else {"CreationDate": None}
        above = [self.figure.suptitle(title, y=1.0, va="bottom", fontsize=LETTER, parse_math=False)] if title else []
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "flwr-replay"}), catch_warnings():
            filterwarnings("ignore", "Glyph")  # that Matplotlib's font lacks; the page's may have it
            whole: dict[str, Any] = {} if transparent else {"facecolor": "white", "bbox_inches": "tight"}
            self.figure.savefig(file, format=form, dpi=150, metadata=known, transparent=transparent, **whole)
        for text in above:
            text.remove()
        return file.getvalue()


@dataclass(frozen=True)
class Row:
    """A row of dots: of a method, a dot for each seed; of an institution, one."""

    values: Mapping[str, float]
    mean: float
    interval: Sequence[float] | None = None
    mark: float | None = None  # with what the mean is compared
    told: str = ""  # stands below the name


def curves(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    x_name: str,
    bands: Mapping[str, Sequence[Band]] | None = None,
    values: Sequence[float] | Mapping[str, float] = (),
    told: Mapping[str, str] | None = None,
) -> Chart | None:
    """Draw lines, (x, y) in order by name, in a chart; None if none has a finite point, and only these are drawn.

    Bands by name are shaded behind. If `values` are the only x that there are, ascending, ticks stand at these, and
    where they are positive and span a factor of ten or more, the axis is logarithmic; they may have names. Beside a
    line stand its name and what is `told` of it, else its last y.
    """
    from matplotlib.ticker import MaxNLocator, NullLocator

    finite = {name: [(x, y) for x, y in line if math.isfinite(y)] for name, line in lines.items()}
    finite = {name: line for name, line in finite.items() if line}
    if not finite:
        return None
    ends = {name: (told or {}).get(name, f"{line[-1][1]:.3f}") for name, line in finite.items()}
    texts = {name: _lines(f"{name}:", end) for name, end in ends.items()}
    height = max(HEIGHT, TOP + BOTTOM + LINE * (sum(map(len, texts.values())) + 1))
    figure, axes = _axes(WIDTH, height, LEFT, RIGHT, TOP, BOTTOM)
    rows: list[Sequence[object]] = []
    for place, (name, line) in enumerate(lines.items()):
        look, pairs = place % len(COLOURS), {x: (low, high) for x, low, high in (bands or {}).get(name, ())}
        if name in finite:
            xs, ys = zip(*finite[name], strict=True)
            marker = "o" if len(xs) <= POINTS else ""
            axes.plot(xs, ys, label=name, marker=marker, color=COLOURS[look], linestyle=DASHES[look], markersize=4)
        rows += [(name, x, y, *pairs.get(x, ("", ""))) for x, y in line]
        band = [(x, *pair) for x, pair in pairs.items() if all(map(math.isfinite, pair))]
        if len(band) > 1:
            xs, low, high = zip(*band, strict=True)
            axes.fill_between(xs, low, high, color=COLOURS[look], alpha=0.15, linewidth=0)
    if values:
        at, names = list(values.values()) if isinstance(values, Mapping) else list(values), list(map(str, values))
        log = len(at) > 1 and at[0] > 0 and at[-1] >= LOGARITHMIC * at[0] and not isinstance(values, Mapping)
        axes.set_xscale("log" if log else "linear")
        axes.set_xticks(at, names if isinstance(values, Mapping) else [f"{value:g}" for value in at])
        axes.xaxis.set_minor_locator(NullLocator())
        x_name = f"{x_name}, logarithmic" if log else x_name
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=x_name == "round", steps=STEPS, min_n_ticks=1))
        axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=STEPS))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(axis="y", color=GRID)
    axes.set_xlabel(x_name, color=INK, parse_math=False, fontsize=LETTER)
    _beside(axes, finite, texts, {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(lines)}, height)
    return Chart(
        figure,
        "; ".join(f"{name}: {end}" for name, end in ends.items()),
        ("line", x_name, "y", "lowest", "highest"),
        rows,
    )


def dots(rows: Mapping[str, Row], of: str = "seed") -> Chart:
    """Draw a row for each name: a dot for each value, a bar at their mean, a line for its interval, a dashed mark."""
    from matplotlib.ticker import MaxNLocator

    texts = [_lines(name, row.told) for name, row in rows.items()]
    room = max(ROW, LINE * max(map(len, texts), default=0) + 8)
    figure, axes = _axes(WIDTH, room * len(rows) + BOTTOM - 8, NAMES, VALUES, 0, BOTTOM - 8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.yaxis.set_visible(False)
    outside: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    outside |= {"va": "center", "color": INK, "parse_math": False, "annotation_clip": False, "fontsize": LETTER}
    across = axes.get_yaxis_transform()
    axes.hlines(range(len(rows)), 0, 1, GRID, linewidth=0.8, zorder=0, transform=across)  # one by one takes 2 ms each
    at_mark = {at: row.mark for at, row in enumerate(rows.values()) if row.mark is not None and math.isfinite(row.mark)}
    low, high = ([at + half for at in at_mark] for half in (-0.5, 0.5))
    axes.vlines(list(at_mark.values()), low, high, INK, (0, (3, 2)), linewidth=1.2)
    for at, row in enumerate(rows.values()):
        shown = [value for value in row.values.values() if math.isfinite(value)]
        middle = (len(shown) - 1) / 2
        heights = [at + 0.5 * (place - middle) / len(shown) for place in range(len(shown))]
        alone = len(shown) == 1
        axes.plot(shown, heights, "o", color=COLOURS[0], markersize=7 if alone else 4)
        if row.interval:
            axes.plot(row.interval, [at, at], color=COLOURS[0], linewidth=2)
        if not alone and math.isfinite(row.mean):
            axes.vlines(row.mean, at - 0.32, at + 0.32, COLOURS[0], linewidth=3)
        for line, text in enumerate(texts[at]):  # each by itself, as only one line is flush right in any letters
            up = LINE * ((len(texts[at]) - 1) / 2 - line)
            axes.annotate(text, (0, at), (-8, up), ha="right", **outside)
        axes.annotate(f"{row.mean:.3f}", (1, at), (8, 0), **outside)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
    axes.xaxis.set_major_formatter("{x:g}")
    marks = {name: "" if row.mark is None else row.mark for name, row in rows.items()}
    ends = {name: row.interval or ("", "") for name, row in rows.items()}  # of one value, or of the mean of several
    numbers = [
        (name, key, value, *(ends[name] if len(row.values) == 1 else ("", "")), marks[name])
        for name, row in rows.items()
        for key, value in row.values.items()
    ]
    means = [(name, "mean", row.mean, *ends[name], marks[name]) for name, row in rows.items() if len(row.values) > 1]
    told = "; ".join(f"{name}: {row.mean:.3f}" for name, row in rows.items())
    return Chart(figure, told, ("name", of, "value", "low", "high", "dashed"), [*numbers, *means])


def write_figures(folder: Path, charts: Mapping[str, Chart], forms: Sequence[str] = FORMS, title: str = "") -> None:
    """Write charts by name into a folder, in each of these forms, and the numbers behind them as CSV."""
    for name, chart in charts.items():
        for form in forms:
            write_atomic(folder / f"{name}.{form}", chart.file(form, title))
        write_atomic(folder / f"{name}.csv", chart.csv)


def _beside(
    axes: Axes,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    texts: Mapping[str, Sequence[str]],
    colours: Mapping[str, str],
    height: float,
) -> None:
    """Write texts beside the ends of lines, in their order, and none over another."""
    bottom, top = axes.get_ylim()
    room = height - TOP - BOTTOM
    order = sorted(lines, key=lambda name: -lines[name][-1][1])
    free, places = room, {}
    for left, name in enumerate(order):  # from above: below the one before, and so that the rest has room, too
        own = LINE * len(texts[name])
        needed = LINE * sum(len(texts[other]) for other in order[left + 1 :])
        end = (lines[name][-1][1] - bottom) / (top - bottom) * room + own / 2
        free = min(max(end, needed + own), free)
        places[name] = free - own / 2
        free -= own
    for name, place in places.items():
        axes.annotate(
            "\n".join(texts[name]),
            lines[name][-1],
            (1 + 14 / (WIDTH - LEFT - RIGHT), place / room),
            textcoords="axes fraction",
            va="center",
            color=colours[name],
            fontsize=LETTER,
            parse_math=False,
            annotation_clip=False,
            arrowprops={"color": colours[name], **LEADER},
        )


def _lines(name: str, told: str) -> list[str]:
    """Break a name and what is told of it into short lines, between words and after colons.

    >>> _lines("fedreplay:cut=hidden1:patience=1:", "0.953"), _lines("cwt:", "0.9")
    (['fedreplay:', 'cut=hidden1:', 'patience=1:', '0.953'], ['cwt: 0.9'])
    """
    texts = [f"{name} {told}"] if len(name) + len(told) < BROAD else [name, told]
    broken = [line for text in texts for line in wrap(re.sub(r":(?=[^ =])", ":\0 ", text), BROAD)]
    return [line.replace("\0 ", "").replace("\0", "") for line in broken]


def _axes(width: int, height: int, left: int, right: int, top: int, bottom: int) -> tuple[Figure, Axes]:
    """Return a figure of a size in points, and its axes, which leave room around them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width / 72, height / 72))
    place = left / width, bottom / height, 1 - (left + right) / width, 1 - (top + bottom) / height
    axes = figure.add_axes(place, facecolor="none")
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelcolor=INK, labelsize=LETTER)
    for axis in (axes.xaxis, axes.yaxis):  # given, as looking for room below all numbers takes a sixth of the time
        axis.set_label_coords(0.5, (16 - bottom) / (height - top - bottom))
    return figure, axes


def _styled(style: str) -> str:
    """Return a style without letters of its own, and with the page's colours."""
    for colour, variable in VARIABLES.items():
        style = style.replace(colour, f"var({variable})")
    return LETTERS.sub("", style)
