"""What stands in the pages' pictures, read from their SVG."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from page import drawn_marks, written

from flwr_replay.report.charts import BOTTOM, HEIGHT, TOP, Row, curves, dots, write_figures


def test_charts_stand_single_points_and_what_is_not_finite():
    chart = curves({"a": [(1, 0.5)]}, "round")
    assert (len(drawn_marks(chart.svg)[0]), chart.told) == (1, "a: 0.500")
    assert curves({"a": [(1, float("nan"))], "b": []}, "round") is None
    two = curves({"a": [(1, 0.5), (2, float("inf")), (3, 0.7)]}, "round")
    assert len(drawn_marks(two.svg)[0]) == 2
    nothing = dots({"a": Row({"0": float("nan")}, float("nan")), "b": Row({"0": 2.0}, 2.0, mark=3.0)})
    marks, _, texts = drawn_marks(nothing.svg)
    assert len(marks) == 1
    assert {"nan", "2.000"} <= {text for text, _ in texts}


def test_a_row_has_a_dot_for_each_seed_beside_its_mean_and_interval():
    rows = {"a": Row({"0": 0.2, "1": 0.4}, 0.3, (0.1, 0.5), 0.5), "b": Row({"0": 0.5}, 0.5, told="epsilon 8")}
    chart = dots(rows)
    marks, _, texts = drawn_marks(chart.svg)
    assert len(marks) == 3
    (low, above), (high, below), (alone, _) = marks
    assert low < high < alone
    assert above < below  # seeds lie one under the other, in their order
    assert "epsilon 8" in " ".join(text for text, _ in texts)
    assert {"0", "0.0", "1", "1.0"}.isdisjoint(text for text, _ in texts)  # lines across do not make the axis longer
    assert chart.svg.count("dasharray") == 1  # the mark
    assert chart.told == "a: 0.300; b: 0.500"
    numbers = [line.split(",") for line in chart.csv.splitlines()]
    assert numbers[1:4] == [
        ["a", "0", "0.2", "", "", "0.5"],
        ["a", "1", "0.4", "", "", "0.5"],
        ["b", "0", "0.5", "", "", ""],
    ]
    assert numbers[4:] == [["a", "mean", "0.3", "0.1", "0.5", "0.5"]]


@settings(max_examples=20)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_names_beside_lines_keep_their_order_and_lie_on_no_other(ends):
    chart = curves({f"line-{at}": [(1, 0.5), (2, end)] for at, end in enumerate(ends)}, "round")
    tree = ElementTree.fromstring(chart.svg)
    heights = {text.split(":")[0]: y for text, (_, y) in written(tree) if "line-" in text}
    by_end = sorted(heights, key=lambda name: -ends[int(name.removeprefix("line-"))])
    assert len(heights) == len(ends)
    assert all(heights[low] - heights[high] > 14 for high, low in pairwise(by_end))
    assert all(0 < height < float(tree.get("viewBox").split()[3]) for _, (_, height) in written(tree))
    assert max(written(tree), key=lambda text: text[1][1])[0] == "round"  # below its numbers


def test_figures_are_files_with_the_numbers_behind_them(tmp_path):
    chart = curves({"a": [(1, 0.25), (2, 0.5)]}, "round", {"a": [(1, 0.2, 0.3), (2, 0.4, 0.6)]})
    write_figures(tmp_path, {"curves": chart}, title="A title")
    assert {file.name for file in tmp_path.iterdir()} == {"curves.svg", "curves.pdf", "curves.csv"}
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")
    assert "A title" in "".join(ElementTree.parse(tmp_path / "curves.svg").getroot().itertext())
    assert "A title" not in chart.svg
    assert (tmp_path / "curves.csv").read_text() == "line,round,y,lowest,highest\na,1,0.25,0.2,0.3\na,2,0.5,0.4,0.6\n"


def test_a_band_lies_around_its_line_and_given_values_far_apart_are_logarithmic():
    lines, bands = {"a": [(0.1, 0.5), (1, 0.7), (10, 0.6)]}, {"a": [(0.1, 0.4, 0.6), (1, 0.7, 0.7), (10, 0.5, 0.9)]}
    chart = curves(lines, "training.lr", bands, [0.1, 1, 10], {"a": "best 0.700 at 1"})
    assert chart.told == "a: best 0.700 at 1"
    marks, (outline,), texts = drawn_marks(chart.svg)
    for x, y in marks:
        heights = [at for place, at in outline if place == pytest.approx(x, abs=1e-3)]
        assert min(heights) - 1e-3 <= y <= max(heights) + 1e-3
    assert all(TOP <= y <= HEIGHT - BOTTOM for _, y in outline)
    named = dict(texts)
    assert named["1"] - named["0.1"] == pytest.approx(named["10"] - named["1"], abs=0.01)
    assert "training.lr, logarithmic" in named
    named = dict(drawn_marks(curves(lines, "x", values=[2, 4, 10]).svg)[2])
    assert named["4"] - named["2"] == pytest.approx((named["10"] - named["2"]) / 4, abs=0.01)
    unequal = curves({"a": [(1, 0.5), (2, 0.6)]}, "round", {"a": [(1, 0.0, 1.0), (2, float("nan"), 1.0)]})
    assert drawn_marks(unequal.svg)[1] == []


def test_rounds_are_whole_numbers():
    texts = [text for text, _ in drawn_marks(curves({"a": [(1, 0.5), (3, 0.7)]}, "round").svg)[2]]
    assert [text for text in texts if "." not in text] == ["1", "2", "3", "round"]
    assert "1" in (labels := [text for text, _ in drawn_marks(curves({"a": [(1, 0.5)]}, "round").svg)[2]])
    assert not [text for text in labels[: labels.index("round")] if "." in text]


def test_ticks_say_their_numbers_whole():
    texts = [
        text for text, _ in drawn_marks(curves({"a": [(10**6, 0.98100), (2 * 10**6, 0.98102)]}, "examples").svg)[2]
    ]
    ends = texts.index("examples")
    assert [float(text) >= 10**6 for text in texts[:ends]] == [True] * ends
    heights = [text for text in texts[ends + 1 :] if not text.startswith("a:")]
    assert heights
    assert all(0.98 < float(text) < 0.982 for text in heights)


def test_a_name_that_looks_like_a_style_stays():
    texts = dict(drawn_marks(dots({"font: #0072b2": Row({"0": 1.0}, 1.0)}).svg)[2])
    assert "font: #0072b2" in texts


def test_a_picture_is_of_the_page_its_colours_letters_and_names_and_the_same_each_time(recwarn):
    lines = {f"<b>&$x_1$ {at}": [(1, at), (2, 1 - at)] for at in range(9)}
    rows = dict.fromkeys(["<b>$y$", "病院"], Row({"0": 1.0}, 1.0, mark=0.5))
    svg = curves(lines, "<i>$x$").svg + dots(rows).svg
    assert not re.search(r"#[0-9a-f]{6}\b|font|<style|<script|pt\"", svg)
    assert "&lt;i&gt;$x$" in svg
    assert "&lt;b&gt;$y$" in svg
    assert svg == curves(lines, "<i>$x$").svg + dots(rows).svg
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]
