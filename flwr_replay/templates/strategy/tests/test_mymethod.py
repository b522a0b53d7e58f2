"""MyMethod keeps flwr-replay's contract, and its average is that of a slow, obviously correct twin."""

import numpy as np
from mymethod.payload import TrainedMyMethod
from mymethod.strategy import MyMethod, MyMethodConfig

from flwr_replay.check import check_strategy
from flwr_replay.wire.records import array_record


def test_the_contract(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    check_strategy("mymethod", ["partition.size=40"])


def test_who_moves_too_far_is_drawn_back():
    steps = [1.0, -1.0, 1.0, 9.0]  # from θ = 0; the median distance is 1, so that the bound is 2
    method = MyMethod(MyMethodConfig(bound=2.0))
    method.sent = {"w": np.zeros(1, np.float32)}
    counts = {"num_examples": 5, "examples_seen": 5, "num_steps": 1}
    answers = [
        TrainedMyMethod(arrays=array_record({"w": np.float32([step])}), moved=abs(step), **counts) for step in steps
    ]
    assert method.combine(answers)["w"] == (1 - 1 + 1 + 2) / 4
