"""Who starts processes may be killed or interrupted: they end with it, on Ray and of a comparison."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from forks import Command

from flwr_replay.config.compose import overrides_of
from flwr_replay.engines.simulate import run_inline
from flwr_replay.processes import GRACE, MARK, members
from flwr_replay.report.progress import Display

SMALL = ["model=mlp", "model.width=4", "partition.size=60", "nodes=2", "rounds=5000"]
ON_RAY = ["run", "--engine", "ray", "strategy=fedavg", *SMALL, "threads=2"]  # on two cores: one actor
KILLED = {  # a part of each one's command line; in a simulation the ServerApp runs in the process that drives Ray
    "the SuperLink": "flower-superlink",
    "the ServerApp and Ray's driver": "flwr-simulation",
    "Ray's actor": "ClientAppActor",
    "the command": "",
}


@pytest.fixture
def started() -> Iterator[list[Command]]:
    """Commands that a test starts; none of theirs stays, whatever the test finds."""
    commands: list[Command] = []
    yield commands
    for command in commands:
        command.kill()
        command.wait()


def start(started: list[Command], folder: Path, *words: str) -> Command:
    words = (*words, "--runs-dir", str(folder))
    started.append(Command(words, folder, apart=True, FLWR_REPLAY_HOME=str(folder)))
    return started[-1]


def wait_for(text: str, run: Command) -> str:
    output = ""
    for line in run.output:
        output += line
        if text in line:
            return output
    raise AssertionError(output)


def mark_of(run: Command) -> str:
    """Return the mark of a command's family, and see that Ray belongs to it."""
    for child in psutil.Process(run.pid).children():
        if mark := child.environ().get(MARK):
            names = {process.name() for process in members(mark)}
            assert {"raylet", "gcs_server"} <= names
            assert any("Actor" in name for name in names)
            return str(mark)
    raise AssertionError("no process has a mark")


def all_gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=2 * GRACE)[1]


def check_resumed(folder: Path, may_fail: bool = False) -> None:
    """Resume a run in this process; its weights have the bits of an undisturbed run, unless failures are stated."""
    done = max(int(path.stem) for path in (folder / "checkpoints").glob("*.safetensors"))
    overrides = [*overrides_of(folder / "config.yaml"), f"rounds={done + 2}"]
    result, _ = run_inline([*overrides, f"resume='{folder}'"], Display())
    assert result["rounds"] == done + 2
    if [failure for failure in result["failures"] if failure["round"] <= done]:  # another average: no bits to compare
        assert may_fail, result["failures"]
        return
    once = folder.parent / "once"
    run_inline([*overrides, f"runs_dir='{once.parent}'", f"run_name={once.name}"], Display())
    for name in ("models/global.safetensors", "metrics.jsonl"):
        assert (folder / name).read_bytes() == (once / name).read_bytes()


@pytest.mark.sampled(1, of="Ray")
def test_a_simulation_that_is_interrupted_leaves_no_process_and_can_go_on(started, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))  # where the institutions' state lies, then too
    run = start(started, tmp_path, *ON_RAY, "run-name=x")
    wait_for("round 2/5000", run)
    mark = mark_of(run)
    family = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGTERM)
    output = run.rest()
    assert f"interrupted; to continue: flwr-replay run --resume {tmp_path / 'x'}\n" in output
    assert run.returncode == 128 + signal.SIGTERM
    assert not psutil.wait_procs(family, timeout=10)[1]
    assert not members(mark)
    check_resumed(tmp_path / "x")


@pytest.mark.sampled(1, of="Ray")
@pytest.mark.parametrize("killed", KILLED)
def test_whoever_is_killed_no_process_stays_and_the_run_goes_on(started, tmp_path, monkeypatch, killed):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    run = start(started, tmp_path, *ON_RAY, "run-name=x")
    wait_for("round 2/5000", run)
    mark = mark_of(run)
    family = psutil.Process(run.pid).children(recursive=True)
    victims = [process for process in family if KILLED[killed] in " ".join(process.cmdline())]
    (victims[0] if KILLED[killed] else run).kill()
    output = run.rest()
    if killed == "the command":
        assert run.returncode == -signal.SIGKILL
    else:
        assert run.returncode == 2, output
        error = output.splitlines()[-1]
        assert error.startswith("error: "), output
        assert f"to continue: flwr-replay run --resume {tmp_path / 'x'}" in error, output
    assert all_gone(family)
    assert not members(mark)
    check_resumed(tmp_path / "x", may_fail=killed == "Ray's actor")  # it may have died between two answers


@pytest.mark.sampled(1, of="worker processes")
def test_a_killed_command_leaves_none_of_its_workers_and_the_run_goes_on(started, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    words = ["run", "--engine", "inline", "--workers", "2", "strategy=fedavg", *SMALL]
    run = start(started, tmp_path, *words, "run-name=x")
    wait_for("round 2/5000", run)
    family = psutil.Process(run.pid).children(recursive=True)
    assert len(family) >= 2
    run.kill()
    assert all_gone(family)
    check_resumed(tmp_path / "x")


@pytest.mark.sampled(1, of="worker processes")
def test_a_killed_comparison_leaves_no_worker(started, tmp_path):
    run = start(started, tmp_path, "compare", "cwt,fedavg", *SMALL, "seeds=1", "--jobs", "2")
    wait_for("to start", run)
    for _ in range(600):
        if len(list(tmp_path.glob("*/*/checkpoints/*.safetensors"))) >= 2:
            break
        time.sleep(0.1)
    family = psutil.Process(run.pid).children(recursive=True)
    assert len(family) >= 2
    run.kill()
    assert all_gone(family)
