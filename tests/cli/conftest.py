"""Commands in this process."""

import sys

import pytest

from flwr_replay.cli.main import main


@pytest.fixture
def flwr_replay(monkeypatch, capsys, tmp_path):
    """Run a command in this process, in an empty folder; return exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["flwr-replay", *words])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return call
