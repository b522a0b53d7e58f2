"""Who starts processes may be killed or interrupted: they end with it, on Ray and of a comparison."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from flwr_replay.config.compose import overrides_of
from flwr_replay.processes import GRACE, MARK, members
from flwr_replay.report.progress import Display
from flwr_replay.runs.simulate import run_inline

COMMAND = [sys.executable, "-c", "from flwr_replay.cli.main import main; main()"]
SMALL = ["model=mlp", "model.width=4", "nodes=2", "rounds=5000"]
ON_RAY = ["run", "--engine", "ray", "strategy=cwt", *SMALL, "threads=2"]  # on two cores: one actor


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Commands that a test starts; none of theirs stays, whatever the test finds."""
    found: list[subprocess.Popen[str]] = []
    yield found
    for command in found:
        command.kill()
        command.wait()


def start(started: list[subprocess.Popen[str]], folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "FLWR_REPLAY_HOME": str(folder)}
    command = [*COMMAND, *words, "--runs-dir", str(folder)]
    pipe = subprocess.PIPE
    run = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=pipe, text=True, cwd=folder)
    started.append(run)
    return run


def wait_for(text: str, stream: IO[str] | None) -> str:
    said = ""
    for line in stream or []:
        said += line
        if text in line:
            return said
    raise AssertionError(said)


def mark_of(run: subprocess.Popen[str]) -> str:
    """Return the mark of a command's family, and see that Ray belongs to it."""
    for child in psutil.Process(run.pid).children():
        if mark := child.environ().get(MARK):
            names = {process.name() for process in members(mark)}
            assert {"raylet", "gcs_server"} <= names
            assert any("Actor" in name for name in names)
            return str(mark)
    raise AssertionError("no process has a mark")


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=2 * GRACE)[1]


def test_a_simulation_that_is_interrupted_leaves_no_process_and_can_go_on(started, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))  # where the institutions' state lies, then too
    run = start(started, tmp_path, *ON_RAY, "run-name=x")
    wait_for("round 2/5000", run.stderr)
    mark = mark_of(run)  # a killed opener's family ends by its mark: tests/runs/test_processes.py
    family = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert f"interrupted; to continue: flwr-replay run --resume {tmp_path / 'x'}\n" in said
    assert run.returncode == 128 + signal.SIGTERM
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert not members(mark)
    config = tmp_path / "x" / "config.yaml"
    overrides = [*overrides_of(config), f"resume='{config.parent}'", "rounds=3"]
    assert run_inline(overrides, Display())[0]["final"]


def test_a_killed_comparison_leaves_no_worker(started, tmp_path):
    run = start(started, tmp_path, "compare", "cwt,fedavg", *SMALL, "seeds=1", "--jobs", "2")
    wait_for("to start", run.stderr)
    for _ in range(600):
        if len(list(tmp_path.glob("*/*/checkpoints/*.safetensors"))) >= 2:
            break
        time.sleep(0.1)
    family = psutil.Process(run.pid).children(recursive=True)
    assert len(family) >= 2
    run.kill()
    assert gone(family)
