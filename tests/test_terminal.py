"""Hints name the command as its user typed it; tables fit the terminal."""

import pytest

from flwr_replay.terminal import command, fitted, installing


@pytest.mark.parametrize(
    ("depth", "pip", "typed", "extra"),
    [
        ("", True, "flwr-replay", "pip install 'flwr-replay[dirichlet]'"),
        ("", None, "flwr-replay", "uv sync --inexact --extra dirichlet, in the checkout"),
        ("1", None, "uv run flwr-replay", "uv run --extra dirichlet flwr-replay … in place of uv run flwr-replay …"),
    ],
)
def test_under_uv_hints_are_uvs(depth, pip, typed, extra, monkeypatch):
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", depth)
    monkeypatch.setattr("flwr_replay.terminal.find_spec", lambda name: pip)
    assert (command(), installing("dirichlet")) == (typed, extra)


def test_a_table_that_is_too_wide_is_several_which_repeat_the_first_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    table = fitted("Runs", ["run", "accuracy", "examples"], [["a", "0.5", "100"]])
    assert [table.count(heading) for heading in ("Runs", "run", "accuracy", "examples")] == [1, 2, 1, 1]
