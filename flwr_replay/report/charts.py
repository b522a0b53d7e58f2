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
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 40  # around its axes
NAMES, BAR, GAP = 190, 18, 8  # of bars: room for names, height, distance
LOOKS = 8  # colours and dashes in the style sheet


@dataclass(frozen=True)
class Curves:
    """A line chart, in units of its view box."""

    width: int
    height: int
    lines: Sequence[tuple[str, int, str, Sequence[tuple[float, float]]]]  # name, look, SVG points, values
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


def curves(lines: Mapping[str, Sequence[tuple[float, float]]], x_name: str, y_name: str) -> Curves | None:
    """Place lines in a chart; None if none has a point that can be drawn.

    Parameters
    ----------
    lines : Mapping
        By name: (x, y) in order. Points that are not finite are left out.
    x_name, y_name : str
        Under and beside the axes.
    """
    finite = {name: [(x, y) for x, y in line if math.isfinite(y)] for name, line in lines.items()}
    points = [point for line in finite.values() for point in line]
    if not points:
        return None
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    margin = max(0.06 * (high - low), 1e-3 * max(1.0, abs(high)))
    low, high = low - margin, high + margin

    def x_at(x: float) -> float:
        share = (x - left) / (right - left) if right > left else 0.5
        return round(LEFT + 10 + share * (WIDTH - LEFT - RIGHT - 20), 1)

    def y_at(y: float) -> float:
        return round(TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM), 1)

    drawn = [
        (name, look % LOOKS, " ".join(f"{x_at(x)},{y_at(y)}" for x, y in line), line)
        for look, (name, line) in enumerate(finite.items())
        if line
    ]
    xs = [(x_at(x), f"{x:g}") for x in ticks(left, right, 8) if x_name != "round" or x == int(x)]
    return Curves(WIDTH, HEIGHT, drawn, xs, [(y_at(y), f"{y:g}") for y in ticks(low, high)], x_name, y_name)


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
