"""Attacks of a server on what SCAFFOLD and FedBN keep at an institution, and of an institution on the controls."""

import numpy as np
import pytest
from averaging import JOB
from harness import write_shards
from hostile_server import HostileServer, refusal, weights
from safetensors.numpy import load_file

from flwr_replay.payloads.common import Evaluate
from flwr_replay.payloads.fedbn import TrainShared
from flwr_replay.payloads.scaffold import CONTROL, TrainControlled, zeros


def server_of(folder, strategy):
    write_shards(folder, {"a": 40})
    return HostileServer(folder, *JOB, f"strategy={strategy}")


def with_control(theta, c):
    return {**theta, **{f"{CONTROL}{name}": array for name, array in c.items()}}


def train(server, exchange, arrays=None, **other):
    sent = with_control(server.weights, zeros(server.weights)) if arrays is None else arrays
    return server.send(TrainControlled(arrays=sent, run="r", exchange=exchange, lr=0.05, **other))


def state_arrays(server, exchange, key="control"):
    return load_file(server.state / "runs" / "r" / f"{key}-{exchange:06d}.safetensors")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda array: None,
        lambda array: np.zeros((50, *array.shape), array.dtype),  # it would be broadcast
        lambda array: array.astype(np.float64),
    ],
)
def test_a_control_has_the_form_of_its_weights(tmp_path, spoil):
    server = server_of(tmp_path, "scaffold")
    spoilt = {name: spoil(array) for name, array in zeros(server.weights).items()}
    arrays = with_control(server.weights, {name: array for name, array in spoilt.items() if array is not None})
    assert "a control has the names, shapes and kinds of number of its weights" in refusal(train(server, 1, arrays))


def test_a_rate_of_nothing_leaves_the_control_as_it_is(tmp_path):
    server = server_of(tmp_path, "scaffold")
    train(server, 1)
    answer = weights(
        server.send(
            TrainControlled(
                arrays=with_control(server.weights, zeros(server.weights)),
                run="r",
                exchange=2,
                lr=0.0,
                continues=1,
            )
        )
    )
    assert not any(array.any() for name, array in answer.items() if name.startswith(CONTROL))


def test_however_many_answers_are_lost_the_control_is_the_one_that_the_server_knows(tmp_path):
    """Of a key three files are kept: those of lost answers must not take its place."""
    server = server_of(tmp_path, "scaffold")
    train(server, 1)
    known = state_arrays(server, 1)
    for exchange in range(2, 7):
        answer = weights(train(server, exchange, continues=1))
        for name, before in known.items():
            change = answer[f"{CONTROL}{name}"]
            np.testing.assert_array_equal(
                state_arrays(server, exchange)[name], before + change, err_msg=f"{exchange} {name}"
            )


def test_another_form_of_model_that_is_tested_does_not_become_fedbns_own(tmp_path):
    server = server_of(tmp_path, "fedbn")
    theta = server.weights
    sent = {"run": "r", "exchange": 1}
    server.send(TrainShared(arrays=theta, lr=0.05, **sent))
    before = state_arrays(server, 1, "model")
    for name in ("conv1.conv.running_mean", "x.running_mean"):
        assert "they differ at" in refusal(server.send(Evaluate(arrays={**theta, name: np.zeros(4, "f4")}, **sent)))
    assert state_arrays(server, 1, "model").keys() == before.keys()
    assert not refusal(server.send(TrainShared(arrays=theta, lr=0.05, run="r", exchange=2, continues=1)))
