"""Line charts and bars as numbers: where each point, tick and label of an inline SVG stands.

`flwr_replay.report.templates` draws them. Colours and dashes are classes of the style sheet, so that pictures follow
light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Bars", "Curves", "bars", "curves", "ticks"]

WIDTH, HEIGHT = 640, 260  # of a line chart
LEFT, RIGHT, TOP, BOTTOM = 72, 12, 12, 40  # around its axes
NAMES, BAR, GAP = 200, 18, 8  # of bars: room for names, height, distance
LOGARITHMIC = 10  # times the smallest value that the largest is, from which an axis of given values is logarithmic
LOOKS = 8  # colours and dashes in the style sheet


@dataclass(frozen=True)
class Curves:
    """A line chart, in units of its view box."""

    width: int
    height: int
    lines: Sequence[tuple[str, int, str, str]]  # name, look, SVG points, what the legend says of it
    bands: Sequence[tuple[int, str]]  # look, SVG points of the outline
    xs: Sequence[tuple[float, str]]  # ticks
    ys: Sequence[tuple[float, str]]
    x_name: str
    y_name: str


@dataclass(frozen=True)
class Bars:
    """Horizontal bars with a mark each, in units of their view box."""

    width: int
    height: int
    rows: Sequence[tuple[str, float, float, str, float | None]]  # name, y, length, value, x of the mark
    left: int
    bar: int


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Return round numbers from low to high, at most so many and at least one.

    >>> ticks(0.13, 0.92)
    [0.2, 0.4, 0.6, 0.8]
    >>> ticks(1, 3)
    [1.0, 1.5, 2.0, 2.5, 3.0]
    """
    span = max(high - low, 1e-9)
    size = 10.0 ** math.floor(math.log10(span / most))
    step = next(size * times for times in (1, 2, 2.5, 5, 10, 20) if span / (size * times) <= most - 1 + 1e-9)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(at * step, 12) for at in range(first, last + 1)] or [round(low, 3)]


def curves(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    x_name: str,
    y_name: str,
    bands: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
    values: Sequence[float] = (),
    told: Mapping[str, str] | None = None,
) -> Curves | None:
    """Place lines in a chart; None if none has a point that can be drawn.

    Parameters
    ----------
    lines : Mapping
        By name: (x, y) in order. Points that are not finite are left out.
    x_name, y_name : str
        Under and beside the axes.
    bands : Mapping
        By the name of a line: (x, lowest, highest) in order, shaded behind it.
    values : sequence of float
        The only x that there are, ascending: ticks stand at these, and where they are positive and span a factor of
        ten or more, the axis is logarithmic.
    told : Mapping
        By name: what the legend says; else the last y.
    """
    finite = {name: [(x, y) for x, y in line if math.isfinite(y)] for name, line in lines.items()}
    shaded = {
        name: [place for place in band if math.isfinite(place[1]) and math.isfinite(place[2])]
        for name, band in (bands or {}).items()
    }
    points = [point for line in finite.values() for point in line]
    if not points:
        return None
    log = len(values) > 1 and values[0] > 0 and values[-1] >= LOGARITHMIC * values[0]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    heights = [y for _, y in points] + [y for band in shaded.values() for _, *ends in band for y in ends]
    low, high = min(heights), max(heights)
    margin = max(0.06 * (high - low), 1e-3 * max(1.0, abs(high)))
    low, high = low - margin, high + margin

    def x_at(x: float) -> float:
        x, first, last = (math.log(one) for one in (x, left, right)) if log else (x, left, right)
        share = (x - first) / (last - first) if last > first else 0.5
        return round(LEFT + 10 + share * (WIDTH - LEFT - RIGHT - 20), 1)

    def y_at(y: float) -> float:
        return round(TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    def placed(line: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{x_at(x)},{y_at(y)}" for x, y in line)

    looks = {name: look % LOOKS for look, name in enumerate(finite)}
    drawn = [
        (name, looks[name], placed(line), (told or {}).get(name, f"{line[-1][1]:.3f} at the end"))
        for name, line in finite.items()
        if line
    ]
    outlines = [
        (looks[name], placed([(x, y) for x, y, _ in band] + [(x, y) for x, _, y in reversed(band)]))
        for name, band in shaded.items()
        if len(band) > 1
    ]
    xs = [(x_at(x), f"{x:g}") for x in values or ticks(left, right, 8) if x_name != "round" or x == int(x)]
    ys = [(y_at(y), f"{y:g}") for y in ticks(low, high)]
    return Curves(WIDTH, HEIGHT, drawn, outlines, xs, ys, f"{x_name}, logarithmic" if log else x_name, y_name)


def bars(values: Mapping[str, tuple[float, float | None]]) -> Bars:
    """Place a bar for each name: its value, and a second value that a mark shows, or None."""
    longest = max([abs(v) for pair in values.values() for v in pair if v is not None and math.isfinite(v)], default=1.0)
    room = (WIDTH - NAMES - 70) / (longest or 1.0)

    def length(value: float) -> float:
        return round(room * abs(value), 1) if math.isfinite(value) else 0.0

    rows = [
        (name, float(GAP + at * (BAR + GAP)), length(value), f"{value:.3f}", None if m is None else NAMES + length(m))
        for at, (name, (value, m)) in enumerate(values.items())
    ]
    return Bars(WIDTH, GAP + len(rows) * (BAR + GAP), rows, NAMES, BAR)
