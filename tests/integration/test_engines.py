"""The in-process engine and Flower's Ray simulation end with the same bits at equal torch threads."""

import shlex
import signal
import subprocess
import sys

import psutil
import pytest
from safetensors.numpy import load_file

from flwr_replay.config.compose import overrides_of
from flwr_replay.report.progress import Display
from flwr_replay.runs.options import resolve
from flwr_replay.runs.simulate import Simulation, run_inline, run_ray, simulate


@pytest.mark.parametrize("job", ["strategy=fedreplay cut=conv1 rounds=2 encoder-epochs=2 model.width=8"])
def test_inline_and_ray_give_the_same_bits(job, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    results, weights = [], []
    for engine in ("inline", "ray"):
        overrides, config = resolve(shlex.split(job), str(tmp_path / engine), "")
        run = Simulation.of(config)
        result, folder = simulate(run, overrides, Display()) if engine == "inline" else run_ray(run, overrides)
        results.append(result)
        weights.append(load_file(folder / "models" / "global.safetensors"))
    assert results[0]["final"] == results[1]["final"]
    assert {name: array.tobytes() for name, array in weights[0].items()} == {
        name: array.tobytes() for name, array in weights[1].items()
    }


def test_a_simulation_that_is_interrupted_leaves_no_process_and_can_go_on(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))  # where the institutions' state lies, then too
    job = ["strategy=cwt", "model=mlp", "model.width=8", "nodes=2", "rounds=5000", "run-name=x"]
    job += ["--runs-dir", str(tmp_path)]
    command = [sys.executable, "-c", "from flwr_replay.cli.main import main; main()", "run", "--engine", "ray", *job]
    run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in run.stderr:
        if "round 2/5000" in line:
            break
    family = psutil.Process(run.pid).children(recursive=True)
    assert any("raylet" in process.name() for process in family)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert f"interrupted; to continue: flwr-replay run --resume {tmp_path / 'x'}\n" in said
    assert run.returncode == 128 + signal.SIGTERM
    assert not psutil.wait_procs(family, timeout=10)[1]
    config = tmp_path / "x" / "config.yaml"
    overrides = [*overrides_of(config), f"resume='{config.parent}'", "rounds=3"]
    assert run_inline(overrides, Display())[0]["final"]
