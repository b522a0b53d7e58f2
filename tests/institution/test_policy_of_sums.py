"""A policy's max-epsilon and sums with noise: the whole of what leaves is covered, or it is refused."""

import pytest
from harness import write_shards
from hostile_server import HostileServer, refusal, weights

from flwr_replay.payloads.common import RollCall
from flwr_replay.payloads.fedsgd import Differentiate

POLICY = "max-epsilon: 2\nmax-delta: 0.001\n"
JOB = ["task=medmnist", "split=test", "task.size=8", "classes=3", "model=mlp", "model.width=6", "device=cpu"]
JOB += ["strategy=fedsgd", "dp=gradient", "delta=0.001"]


def reply_to(folder, *options):
    write_shards(folder, {"a": 40})
    server = HostileServer(folder, *JOB, *options, policy=POLICY)
    called = server.send(RollCall(strategy="fedsgd", run="r", stages=["differentiate", "evaluate"]))
    return called, server.send(Differentiate(arrays=server.weights, run="r", server_round=1))


def test_a_budget_within_it_is_accepted(tmp_path):
    called, answered = reply_to(tmp_path, "privacy.target-epsilon=2")
    assert not refusal(called)
    assert not refusal(answered)
    assert weights(answered)


@pytest.mark.parametrize(
    "options",
    [["privacy.target-epsilon=2.1"], ["privacy.sigma=5"], ["privacy.target-epsilon=2", "forgetting=true"]],
    ids=["too large", "no budget", "training examples are tested"],
)
def test_anything_else_is_refused_before_anything_leaves(tmp_path, options):
    for reply in reply_to(tmp_path, *options):
        assert "policy asks for epsilon <= 2" in refusal(reply)
        assert not weights(reply)
