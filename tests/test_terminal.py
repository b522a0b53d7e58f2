"""Hints name the command as its user typed it."""

import pytest

from flwr_replay.terminal import command, installing


@pytest.mark.parametrize(
    ("depth", "typed", "extra"),
    [
        ("", "flwr-replay", "pip install 'flwr-replay[dirichlet]'"),
        ("1", "uv run flwr-replay", "uv run --extra dirichlet flwr-replay … in place of uv run flwr-replay …"),
    ],
)
def test_under_uv_hints_are_uvs(depth, typed, extra, monkeypatch):
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", depth)
    assert (command(), installing("dirichlet")) == (typed, extra)
