"""What stands in the pages' pictures, read from their SVG."""

import re

import pytest
from page import drawn

from flwr_replay.report.charts import bars, curves


def test_charts_stand_single_points_and_what_is_not_finite():
    one = curves({"a": [(1, 0.5)]}, "round")
    assert (len(drawn(one.svg)[0]), one.legend) == (1, [("a", 0, "0.500 at the end")])
    assert curves({"a": [(1, float("nan"))], "b": []}, "round") is None
    two = curves({"a": [(1, 0.5), (2, float("inf")), (3, 0.7)]}, "round")
    assert len(drawn(two.svg)[0]) == 2
    texts = dict(drawn(bars({"a": (float("nan"), None), "b": (2.0, 3.0)}))[2])
    assert texts["nan"] == pytest.approx(208)  # beside a bar without length
    assert texts["2.000"] == pytest.approx(640 - 70 + 8)  # beside the mark, which lies behind the bar's end


def test_a_band_lies_around_its_line_and_given_values_far_apart_are_logarithmic():
    lines, bands = {"a": [(0.1, 0.5), (1, 0.7), (10, 0.6)]}, {"a": [(0.1, 0.4, 0.6), (1, 0.7, 0.7), (10, 0.5, 0.9)]}
    chart = curves(lines, "training.lr", bands, [0.1, 1, 10], {"a": "best 0.700 at 1"})
    assert chart.legend == [("a", 0, "best 0.700 at 1")]
    marks, (outline,), texts = drawn(chart.svg)
    for x, y in marks:
        heights = [at for place, at in outline if place == pytest.approx(x, abs=1e-3)]
        assert min(heights) - 1e-3 <= y <= max(heights) + 1e-3
    named = dict(texts)
    assert named["1"] - named["0.1"] == pytest.approx(named["10"] - named["1"], abs=0.01)
    assert "training.lr, logarithmic" in named
    named = dict(drawn(curves(lines, "x", values=[2, 4, 10]).svg)[2])
    assert named["4"] - named["2"] == pytest.approx((named["10"] - named["2"]) / 4, abs=0.01)
    unequal = curves({"a": [(1, 0.5), (2, 0.6)]}, "round", {"a": [(1, 0.0, 1.0), (2, float("nan"), 1.0)]})
    assert drawn(unequal.svg)[1] == []


def test_rounds_are_whole_numbers():
    texts = [text for text, _ in drawn(curves({"a": [(1, 0.5), (3, 0.7)]}, "round").svg)[2]]
    assert [text for text in texts if "." not in text] == ["1", "2", "3", "round"]
    assert "1" in (one := [text for text, _ in drawn(curves({"a": [(1, 0.5)]}, "round").svg)[2]])
    assert not [text for text in one[: one.index("round")] if "." in text]


def test_ticks_say_their_numbers_whole():
    texts = [text for text, _ in drawn(curves({"a": [(10**6, 0.98100), (2 * 10**6, 0.98102)]}, "examples").svg)[2]]
    ends = texts.index("examples")
    assert [float(text) >= 10**6 for text in texts[:ends]] == [True] * ends
    assert [0.98 < float(text) < 0.982 for text in texts[ends + 1 :]] == [True] * (len(texts) - ends - 1)


def test_a_name_that_looks_like_a_style_stays():
    texts = dict(drawn(bars({"font: #0072b2": (1.0, None)}))[2])
    assert "font: #0072b2" in texts


def test_a_picture_is_of_the_page_its_colours_letters_and_names_and_the_same_each_time(recwarn):
    lines = {f"<b>&$x_1$ {at}": [(1, at), (2, 1 - at)] for at in range(9)}
    svg = curves(lines, "<i>$x$").svg + bars(dict.fromkeys(["<b>$y$", "病院"], (1.0, 0.5)))
    assert not re.search(r"#[0-9a-f]{6}\b|font|<style|<script|pt\"", svg)
    assert "&lt;i&gt;$x$" in svg
    assert "&lt;b&gt;$y$" in svg
    assert svg == curves(lines, "<i>$x$").svg + bars(dict.fromkeys(["<b>$y$", "病院"], (1.0, 0.5)))
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]
