"""A run on Flower's Ray simulation that ends without a result says why, and how it goes on."""

from contextlib import nullcontext

import pytest

from flwr_replay.config.compose import compose
from flwr_replay.engines import simulate
from flwr_replay.engines.simulate import Simulation, run_ray
from flwr_replay.errors import RunError

JOB = ["strategy=fedavg", "task=digits", "partition=iid", "nodes=2", "model=mlp", "device=cpu", "run_name=one"]
DEAD = "no institution answered in exchange 3; institution-1: error 0: The actor died"
DIVERGED = "the loss must stay finite; got nan in training: lower training.lr and run again"


def test_flower_is_told_whole_cores(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(simulate, "superlink", lambda scratch: nullcontext())
    monkeypatch.setattr(simulate, "flwr_run", lambda *words: told.extend(words) or iter([]))
    options = [*JOB, "client-cpus=1", f"runs_dir='{tmp_path}'"]
    with pytest.raises(RunError):
        run_ray(Simulation.of(compose(options)), options)
    assert told[-1].split() == ["num-supernodes=2", "client-resources-num-cpus=1"]  # 1.0 it would refuse


@pytest.mark.parametrize(
    ("begun", "logged", "message"),
    [
        (True, DEAD, f"{DEAD}; to continue: flwr-replay run --resume {{}}"),
        (True, DIVERGED, DIVERGED),
        (
            True,
            "",
            "the simulation ended without a result; see its log above; to continue: flwr-replay run --resume {}",
        ),
        (False, "", "the simulation ended without a result; see its log above; it had not begun: repeat the command"),
        (False, "a rule, a value", "a rule, a value"),
    ],
)
def test_the_line_has_the_command_that_goes_on_where_one_would(tmp_path, monkeypatch, begun, logged, message):
    log = [f"ERROR :     Task 1: error: {logged}\n"] if logged else ["INFO :      Start\n"]
    monkeypatch.setattr(simulate, "superlink", lambda scratch: nullcontext())
    monkeypatch.setattr(simulate, "flwr_run", lambda *words: iter(log))
    if begun:
        (tmp_path / "one").mkdir()
    options = [*JOB, f"runs_dir='{tmp_path}'"]
    with pytest.raises(RunError) as error:
        run_ray(Simulation.of(compose(options)), options)
    assert str(error.value) == message.format(tmp_path / "one")
