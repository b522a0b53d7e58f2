"""The study's options compose with its own model and data, and a round of it runs."""

import tomllib
from pathlib import Path

from flwr_replay import run

OPTIONS = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]


def test_a_round_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    options = {key: value for key, value in OPTIONS.items() if value != ""} | {"rounds": 1, "nodes": 2}
    assert not run(options, runs_dir=tmp_path / "runs").metrics.empty
