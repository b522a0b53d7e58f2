"""Worker processes serve the nodes: a killed one is replaced and asked again, and errors stay their node's."""

import json
import threading
from types import SimpleNamespace

import psutil
import pytest
from flwr.app import Message, RecordDict

from flwr_replay.api import Where
from flwr_replay.config.compose import compose
from flwr_replay.engines import workers
from flwr_replay.engines.simulate import Simulation, run_inline, simulate_by
from flwr_replay.engines.workers import TRIES, LocalGrid, _Process
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.report.progress import Display
from flwr_replay.server.asking import ask

JOB = ["strategy=fedavg", "task=digits", "partition=iid", "partition.size=40", "nodes=3", "rounds=4", "model=mlp"]
JOB += ["model.width=4", "device=cpu"]


class Killing(Display):
    """Kills the workers after an exchange, and sees what is left of them."""

    def __init__(self, after):
        self.after = after

    def exchange(self, exchange, *progress):
        workers = [
            child for child in psutil.Process().children() if "multiprocessing.spawn" in " ".join(child.cmdline())
        ]
        if exchange == self.after:
            self.killed = workers
            for worker in workers:
                worker.kill()
        self.last = workers


def json_lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.mark.sampled(1, of="worker processes")
def test_killed_workers_are_replaced_and_the_run_goes_on_to_the_bits_of_one_process(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    display = Killing(after=2)
    options = [*JOB, f"runs_dir='{tmp_path}'", "run_name=workers"]
    _, folder = simulate_by(2, Simulation.of(compose(options)), options, display)
    assert not (folder / "failures.jsonl").exists()
    assert len(display.last) == 2
    assert not {worker.pid for worker in display.last} & {worker.pid for worker in display.killed}
    assert not psutil.wait_procs([*display.killed, *display.last], timeout=5)[1]

    _, undisturbed = run_inline([*JOB, f"runs_dir='{tmp_path}'", "run_name=one"], Display())
    assert json_lines(folder, "metrics.jsonl") == json_lines(undisturbed, "metrics.jsonl")
    name = "models/global.safetensors"
    assert (folder / name).read_bytes() == (undisturbed / name).read_bytes()


@pytest.mark.parametrize("deaths", [1, TRIES, TRIES + 1])
def test_a_message_with_which_several_workers_die_is_an_error_of_its_node(monkeypatch, deaths):
    grid, asked = LocalGrid({}, [{}], 1), []
    worker, message = grid.workers[0], Message(RecordDict(), 2, "train")

    class Process:
        exitcode = -9
        kill = join = staticmethod(lambda: None)

    def start():
        worker.process, worker.ready = Process(), True

    def ask(message):
        asked.append(message)
        if len(asked) < deaths:
            raise EOFError
        return Message(RecordDict(), reply_to=message)

    monkeypatch.setattr(worker, "start", start)
    monkeypatch.setattr(worker, "ask", ask)
    start()
    reply = worker.lost(message, EOFError())
    assert reply.has_error() == (deaths > TRIES)
    assert asked == [message] * min(deaths, TRIES)


def test_a_worker_that_is_killed_while_it_starts_is_started_again(tmp_path, monkeypatch, forks):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))

    start, killed = _Process.start, []

    def started(worker):
        start(worker)
        if len(killed) < 2:
            killed.append(worker.process)
            worker.process.kill()

    monkeypatch.setattr(_Process, "start", started)
    options = [*JOB, "rounds=1", f"runs_dir='{tmp_path}'", "run_name=workers"]
    _, folder = simulate_by(2, Simulation.of(compose(options)), options, Display())
    assert len(killed) == 2
    assert not (folder / "failures.jsonl").exists()


def test_a_worker_that_hangs_holds_up_the_run_no_longer_than_answers_may_take(monkeypatch, caplog):
    monkeypatch.setattr(workers, "STARTS", 0)
    grid, freed, failures = LocalGrid({}, [{}, {}], 1), threading.Event(), []
    for name, does in {"start": lambda: None, "leave": lambda: None, "kill": freed.set}.items():
        monkeypatch.setattr(grid.workers[0], name, does)
    monkeypatch.setattr(
        grid.workers[0], "ask", lambda message: freed.wait() and Message(RecordDict(), reply_to=message)
    )
    messages = [Message(RecordDict(), node_id, "train", ttl=0.2) for node_id in grid.contexts]
    run = threading.Thread(target=lambda: failures.extend(ask(grid, messages, 0.2)), daemon=True)
    with grid:
        run.start()
        run.join(20)
        answers = list(failures)
        freed.set()
    assert [answer for _, answer in answers] == [None, None]
    assert "no worker has begun or answered a message for 0.2 s: some hang" in caplog.text


def test_more_workers_than_memory_holds_are_refused(tmp_path, monkeypatch):
    options = [*JOB, f"runs_dir='{tmp_path / 'runs'}'"]
    planned = Simulation.of(compose(options))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**6))
    with pytest.raises(ConfigError, match=r"--workers must fit into memory; got 3, .* and 1 MB are free: give fewer"):
        simulate_by(3, planned, options, Display())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("code", "starts", "reason"), [(1, 0, "if __name__"), (-9, TRIES, "free memory")])
def test_a_worker_that_never_starts_ends_the_run_with_the_reason(monkeypatch, code, starts, reason):
    grid, started = LocalGrid({}, [{}], 1), []
    worker, message = grid.workers[0], Message(RecordDict(), 2, "train")

    class Process:
        exitcode = code
        kill = join = staticmethod(lambda: None)

    def ask(message):
        raise EOFError

    monkeypatch.setattr(worker, "start", lambda: started.append(1))
    monkeypatch.setattr(worker, "ask", ask)
    worker.process, worker.ready = Process(), False
    assert worker.lost(message, EOFError()) is None
    assert len(started) == starts
    with pytest.raises(RunError, match=rf"one ended while it started \(exit code {code}\): .*{reason}"):
        grid._check()


@pytest.mark.parametrize(("engine", "workers"), [("inline", 0), ("ray", 2)])
def test_workers_belong_to_the_engine_in_process(engine, workers):
    with pytest.raises(ConfigError, match=f"must be at least 1, and belongs to --engine inline; got {workers}"):
        Where(engine, workers)
