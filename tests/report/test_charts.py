"""Where points, ticks and labels of a chart stand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flwr_replay.report.charts import bars, curves, ticks


def test_charts_stand_single_points_and_what_is_not_finite():
    one = curves({"a": [(1, 0.5)]}, "round", "accuracy")
    assert len(one.lines) == 1
    assert curves({"a": [(1, float("nan"))], "b": []}, "round", "accuracy") is None
    two = curves({"a": [(1, 0.5), (2, float("inf")), (3, 0.7)]}, "round", "accuracy")
    assert len(two.lines[0][2].split()) == 2
    assert ticks(5.0, 5.0)
    drawn = bars({"a": (float("nan"), None), "b": (2.0, 1.0)})
    assert drawn.rows[0][2] == 0.0
    assert drawn.rows[1][4] < drawn.left + drawn.rows[1][2]


def test_a_band_lies_around_its_line_and_given_values_far_apart_are_logarithmic():
    lines, bands = {"a": [(0.1, 0.5), (1, 0.7), (10, 0.6)]}, {"a": [(0.1, 0.4, 0.6), (1, 0.7, 0.7), (10, 0.5, 0.9)]}
    chart = curves(lines, "training.lr", "accuracy", bands, [0.1, 1, 10], {"a": "best 0.700 at 1"})
    ((name, look, points, told),) = chart.lines
    ((own_look, outline),) = chart.bands
    assert (name, told, look) == ("a", "best 0.700 at 1", own_look)
    line = [tuple(map(float, point.split(","))) for point in points.split()]
    ends = [tuple(map(float, point.split(","))) for point in outline.split()]
    for (x, y), (at, lowest), (again, highest) in zip(line, ends[:3], reversed(ends[3:]), strict=True):
        assert x == at == again
        assert highest <= y <= lowest  # y grows downwards
    assert [text for _, text in chart.xs] == ["0.1", "1", "10"]
    left, middle, right = (x for x, _ in chart.xs)
    assert middle - left == pytest.approx(right - middle, abs=0.2)
    left, middle, right = (x for x, _ in curves(lines, "x", "y", values=[2, 4, 10]).xs)
    assert middle - left == pytest.approx((right - left) / 4, abs=0.2)
    unequal = curves({"a": [(1, 0.5), (2, 0.6)]}, "round", "accuracy", {"a": [(1, 0.0, 1.0), (2, float("nan"), 1.0)]})
    assert unequal.bands == []
    assert 12 < float(unequal.lines[0][2].split()[0].split(",")[1]) < 220


@given(low=st.floats(-1e6, 1e6), span=st.floats(0, 1e6))
def test_ticks_lie_between_the_ends_and_are_few(low, span):
    found = ticks(low, low + span)
    assert 1 <= len(found) <= 5
    assert all(low - 1e-6 * (1 + span) <= at <= low + span + 1e-6 * (1 + span) for at in found) or len(found) == 1
