"""Worker processes serve the nodes: errors stay their node's, and a killed worker is replaced."""

import json

import psutil
import pytest

from flwr_replay.api import Where
from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError
from flwr_replay.report.progress import Display
from flwr_replay.runs.simulate import Simulation, run_inline, simulate_by

JOB = ["strategy=fedavg", "task=digits", "partition=iid", "partition.size=40", "nodes=3", "rounds=4", "model=mlp"]
JOB += ["model.width=4", "device=cpu"]


class Killing(Display):
    """Kills the workers after an exchange, and sees what is left of them."""

    def __init__(self, after):
        self.after = after

    def exchange(self, server_round, *progress):
        workers = [one for one in psutil.Process().children() if "multiprocessing.spawn" in " ".join(one.cmdline())]
        if server_round == self.after:
            self.killed = workers
            for worker in workers:
                worker.kill()
        self.last = workers


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_killed_workers_cost_their_messages_and_the_run_goes_on_to_the_bits_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    display = Killing(after=2)
    options = [*JOB, f"runs_dir='{tmp_path}'", "run_name=workers"]
    _, folder = simulate_by(2, Simulation.of(compose(options)), options, display)
    failures = lines(folder, "failures.jsonl")
    assert {failure["round"] for failure in failures} == {3}
    assert {failure["institution"] for failure in failures} == {"institution-1", "institution-2"}
    assert all("the worker process has ended (exit code -9)" in failure["reason"] for failure in failures)
    assert len(display.last) == 2
    assert not {worker.pid for worker in display.last} & {worker.pid for worker in display.killed}
    assert not psutil.wait_procs([*display.killed, *display.last], timeout=5)[1]

    options = [*JOB, f"runs_dir='{tmp_path}'", "run_name=one", "rounds=2"]
    _, one = run_inline(options, Display())
    early = [line for line in lines(folder, "metrics.jsonl") if line["round"] <= 2]
    assert early == lines(one, "metrics.jsonl")


@pytest.mark.parametrize(("engine", "workers"), [("inline", 0), ("ray", 2)])
def test_workers_belong_to_the_engine_in_process(engine, workers):
    with pytest.raises(ConfigError, match=f"must be at least 1, and belongs to --engine inline; got {workers}"):
        Where(engine, workers)
