"""A Ray cluster of two machines leaves the bits of one process, also when one of them dies; nobody stays behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from harness import checkout
from ray_machines import HEAD, SECOND, machines

from flwr_replay.engines.cluster.on_cluster import run_on_cluster
from flwr_replay.engines.simulate import Simulation, run_inline
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.files.tensors import read_tensors
from flwr_replay.processes import MARK, family
from flwr_replay.report.progress import Display
from flwr_replay.report.run_files import read_run_id
from flwr_replay.runs.options import resolve

QUIET = {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "FLWR_TELEMETRY_ENABLED": "0"}
SMALL = ["task=digits", "partition=iid", "partition.size=60", "nodes=3", "batch_size=20", "threads=1"]
FEW = [*(option for option in SMALL if option != "nodes=3"), "nodes=2"]
FEDAVG = [*SMALL, "strategy=fedavg", "rounds=4", "client-cpus=1", "client-gpus=1"]
PROXYFL = [*SMALL, "strategy=proxyfl", "rounds=3", "model=mlp", "width=8", "topology=complete", "device=cpu"]
PROXYFL += ["proxy-optimizer=travels", "noise=seeded", "sigma=1", "delta=0.01"]  # secret noise is never the same

# A model that writes down, in every batch, which GPUs its process sees and where its code lies.
VISITED = """
import json, os
import flwr_replay
import ray
from collections import OrderedDict
from torch import nn
from words import SEEN

class Body(nn.Flatten):
    def forward(self, x):
        machine = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        seen = [machine, os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"), flwr_replay.__file__]
        with open(SEEN, "a") as file:
            file.write(json.dumps(seen) + "\\n")
        return super().forward(x)

def build(channels, size, classes):
    return nn.Sequential(OrderedDict(body=Body(), head=nn.Linear(channels * size * size, classes)))
"""


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("FLWR_REPLAY_HOME", raising=False)  # a machine's own folder would be there
        with machines() as cluster_of_two:
            yield cluster_of_two


class Killing(Display):
    """Kills something after an exchange."""

    def __init__(self, kill, after):
        self.kill, self.after = kill, after

    def exchange(self, exchange, *progress):
        self.on_sigterm = signal.getsignal(signal.SIGTERM)
        if exchange == self.after:
            self.kill()


def on_cluster(cluster, options, runs_dir, display, resume=""):
    overrides, config = resolve(options, str(runs_dir), str(resume))
    return run_on_cluster(cluster.address, Simulation.of(config), overrides, display)


def inline(options, runs_dir):
    words = [option for option in options if not option.startswith("client-")]
    return run_inline(resolve(words, str(runs_dir), "")[0], Display())


def visits(file):
    visits_seen = [tuple(json.loads(line)) for line in file.read_text().splitlines()]
    file.unlink()
    return visits_seen


@pytest.mark.sampled(1, of="Ray")
def test_a_machine_dies_and_the_others_go_on_to_the_bits_of_one_process(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    work, seen = tmp_path / "work", tmp_path / "seen"
    work.mkdir()
    (work / "visited.py").write_text(VISITED)
    (work / "words.py").write_text(f"SEEN = {str(seen)!r}\n")  # which only the working directory has
    monkeypatch.chdir(work)
    monkeypatch.setenv("FLWR_REPLAY_OWN_CODE", "")
    monkeypatch.syspath_prepend(str(work))
    cluster.start_second()
    options = [*FEDAVG, "model=visited:build"]
    on_sigterm, display = signal.getsignal(signal.SIGTERM), Killing(cluster.kill_second, after=2)
    _, folder = on_cluster(cluster, options, tmp_path / "cluster", display)
    assert display.on_sigterm == on_sigterm  # the command line's, which says how to resume
    saw = [visit for visit in visits(seen) if visit[1] != os.getpid()]
    _, alone = inline(options, tmp_path / "inline")

    for name in ("models/global.safetensors", "metrics.jsonl"):
        assert (folder / name).read_bytes() == (alone / name).read_bytes()
    assert not (folder / "failures.jsonl").exists()
    gpus = {}
    for machine, pid, visible, code in saw:
        assert "runtime_resources" in code  # the package has travelled
        gpus.setdefault(machine, {}).setdefault(pid, set()).add(visible)
    head, second = sorted(gpus.values(), key=len, reverse=True)
    assert sorted(map(sorted, head.values())) == [["0"], ["1"], ["2"]]  # the third came from the second machine
    assert list(second.values()) == [{"0"}]


@pytest.mark.sampled(1, of="Ray")
def test_killed_workers_are_replaced_and_asked_again(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    options, killed = [*FEW, "strategy=fedavg", "rounds=2", "model=mlp", "width=4", "device=cpu"], []

    def kill():
        killed.extend(cluster.actors())
        for actor in killed:
            actor.kill()

    _, folder = on_cluster(cluster, options, tmp_path / "cluster", Killing(kill, after=1))
    _, alone = inline(options, tmp_path / "inline")
    assert killed
    assert not (folder / "failures.jsonl").exists()
    for name in ("models/global.safetensors", "metrics.jsonl"):
        assert (folder / name).read_bytes() == (alone / name).read_bytes()


@pytest.mark.sampled(1, of="Ray")
def test_each_machine_keeps_its_institutions_state_and_a_resumed_run_finds_it(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "first"))
    own = {"FLWR_REPLAY_HOME": str(tmp_path / "second")}
    cluster.start_second(**own)
    options = [*PROXYFL, f"client-cpus={SECOND}"]  # a worker on each machine
    with pytest.raises(RunError) as died:
        on_cluster(cluster, options, tmp_path / "cluster", Killing(cluster.kill_second, after=2))
    (folder,) = (tmp_path / "cluster").iterdir()
    there = sorted(path.name for path in (tmp_path / "second" / "state" / "simulation").iterdir())
    assert f"which has the state of {', '.join(there)}, must live; it has died; to continue: " in str(died.value)
    assert str(died.value).endswith(f"flwr-replay run --engine ray --ray-address {cluster.address} --resume {folder}")

    with pytest.raises(RunError, match=f"the state of {', '.join(there)} in this run must lie on a machine of the cl"):
        on_cluster(cluster, [], tmp_path / "cluster", Display(), folder)

    cluster.start_second(**own)
    result, _ = on_cluster(cluster, [], tmp_path / "cluster", Display(), folder)
    files = {**state(tmp_path / "first", folder), **state(tmp_path / "second", folder)}
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "inline"))
    expected, alone = inline(options, tmp_path / "one")
    assert {name for name, _ in state(tmp_path / "second", folder)} == set(there)
    assert files == state(tmp_path / "inline", alone)
    assert result["final"] == expected["final"]


def state(home, folder):
    """Return what the institutions hold of a run, by institution and file."""
    files = sorted((home / "state" / "simulation").glob(f"*/runs/{read_run_id(folder)}/*.safetensors"))
    return {
        (path.parts[-4], path.name): {name: array.tobytes() for name, array in read_tensors(path).items()}
        for path in files
    }


@pytest.mark.sampled(1, of="Ray")
def test_the_actors_end_with_the_process_that_started_them(cluster, tmp_path):
    command = [sys.executable, "-c", "from flwr_replay.cli.main import main; main()", "run", "--engine", "ray"]
    command += [*SMALL, "strategy=fedavg", "model=mlp", "width=4", "rounds=5000", "device=cpu", f"client-cpus={HEAD}"]
    environment = {**os.environ, "FLWR_REPLAY_HOME": str(tmp_path), "RAY_ADDRESS": cluster.address}
    driver = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    output = ""
    for line in driver.stderr:
        output += line
        if "round 2/5000" in line:
            break
    actors = cluster.actors()
    assert actors, output
    driver.kill()
    driver.communicate()
    assert not psutil.wait_procs(actors, timeout=30)[1]
    assert not cluster.actors()


@pytest.mark.sampled(1, of="Ray")
def test_flowers_own_simulation_joins_the_cluster(cluster, tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "replay"))
    own = {"RAY_ADDRESS": cluster.address, "FLWR_HOME": str(tmp_path / "flwr"), **QUIET}
    own["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    words = [
        "flwr",
        "run",
        str(checkout(tmp_path / "checkout")),
        "--stream",
        "--federation-config",
        "num-supernodes=3",
        "--run-config",
    ]
    wanted = {"strategy": "fedavg", "task": "digits", "nodes": 3, "rounds": 2}
    given = " ".join(f"{name}={json.dumps(value)}" for name, value in wanted.items())
    actors = set()
    with family() as mark:
        with (tmp_path / "said").open("w") as log:
            run = subprocess.Popen([*words, given], env={**os.environ, **own, MARK: mark}, stdout=log, stderr=log)
        while run.poll() is None:
            actors |= {process.pid for process in cluster.actors("ClientAppActor")}
            time.sleep(0.2)
    output = (tmp_path / "said").read_text()
    assert run.returncode == 0, output
    assert actors, output  # so none are anywhere else
    (folder,) = (tmp_path / "replay" / "runs").iterdir()
    _, alone = inline([f"{name}={value}" for name, value in wanted.items()], tmp_path / "inline")
    assert (folder / "metrics.jsonl").read_bytes() == (alone / "metrics.jsonl").read_bytes()


@pytest.mark.sampled(1, of="Ray")
def test_what_the_cluster_cannot_give_is_refused(cluster, tmp_path):
    for options, reason in (
        (["client-gpus=4"], f"client-cpus=1 and client-gpus=4; there are .*{HEAD} CPUs, {HEAD} GPUs"),
        (["client-cpus=99", "device=cpu"], "a machine of the cluster must have client-cpus=99"),
        (["client-gpus=1", "device=cpu"], "client-gpus must be 0 with device=cpu; got 1"),
    ):
        with pytest.raises(ConfigError, match=reason):
            on_cluster(cluster, [*SMALL, *options], tmp_path, Display())
        assert not list(tmp_path.iterdir())
