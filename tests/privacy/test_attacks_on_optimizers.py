"""Attacks on the state of an optimizer that travels: by a server that sends what it likes to an institution."""

from itertools import count

import numpy as np
import pytest
from harness import write_shards
from hostile_server import HostileServer, refusal, weights

from flwr_replay.files.tensors import nested
from flwr_replay.learning.training import unstepped
from flwr_replay.models.zoo import backbone
from flwr_replay.payloads.mutual import EvaluatePair, TrainMutually, TrainProxy
from flwr_replay.payloads.relay import Deliver
from flwr_replay.wire.records import opened
from flwr_replay.wire.weights import joined, parted

TASK = ["task=medmnist", "task.size=8", "classes=3", "model=mlp", "model.width=6", "batch_size=16", "device=cpu"]
DP = [*TASK, "dp=proxy", "beta=0", "sigma=2", "delta=0.01", "optimizer=adam"]
TRAVELS = [*DP, "proxy-optimizer=travels"]
PAIR = {"alpha": 0.5, "beta": 0.0, "private_seed": 1, "private_optimizer": "adam", "private_lr": 0.01, "lr": 0.01}
PAIR |= {"private_epochs": 0, "private_batch_size": 16, "private_shift": 0, "proxy_optimizer": "travels"}
PEER = {"init_seed": 1, "committed": 0}
RUNS = count()
HIDDEN = "FlwrReplayError; the institution's own log says more"  # what may depend on examples is not told


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    write_shards(folder, {"a": 40})
    return folder


def with_state(server):
    """Return fresh weights with the state of Adam from before any step."""
    fresh = backbone(server.config.model, server.config.task)(0)
    return dict(opened(joined(server.weights, unstepped(fresh, server.config.training))))


def with_changed_slot(arrays, slot, value):
    """Change an array of the state; None takes it away."""
    name = f"proxy-optimizer.0.{slot}"
    rest = {other: array for other, array in arrays.items() if other != name}
    return rest if value is None else {**rest, name: np.asarray(value(arrays[name]) if callable(value) else value)}


BAD = [
    ("exp_avg", lambda array: np.full_like(array, np.nan), HIDDEN),
    ("exp_avg_sq", lambda array: np.full_like(array, np.inf), HIDDEN),
    ("step", np.float32(np.nan), HIDDEN),
    ("exp_avg_sq", lambda array: array - np.float32(1e-3), "must not be negative"),
    ("step", np.float32(-1), "must not be negative"),
    ("exp_avg", None, "arrays"),
    ("exp_avg", lambda array: array[:1], "own"),
    ("another", np.zeros(1, np.float32), "own"),
]


@pytest.mark.parametrize(("slot", "value", "says"), [*BAD, ("exp_avg", lambda array: array.astype("f8"), "dtypes")])
def test_a_bad_state_is_refused_before_any_step(folder, slot, value, says):
    server, run = HostileServer(folder, *TRAVELS, "strategy=fml"), f"run {next(RUNS)}"
    good = with_state(server)
    reply = server.send(TrainMutually(arrays=with_changed_slot(good, slot, value), run=run, exchange=1, **PAIR))
    assert says in refusal(reply)
    assert not weights(reply)
    assert not server.charges(run)
    assert weights(server.send(TrainMutually(arrays=good, run=run, exchange=1, **PAIR))).keys() == good.keys()


@pytest.mark.parametrize(("slot", "value", "says"), BAD)
def test_a_bad_parcel_is_not_mixed(folder, slot, value, says):
    server, run = HostileServer(folder, *TRAVELS, "strategy=proxyfl"), f"run {next(RUNS)}"
    assert parted(weights(server.send(TrainProxy(run=run, exchange=1, **PAIR, **PEER))))[1]
    parcel = {"parcels": [1], "shares": [0.5], "weights": [1.0], "run": run, "released_in": 1, "kept": 0.5}
    good = with_state(server)
    assert says in refusal(
        server.send(Deliver(arrays=nested({"00000": with_changed_slot(good, slot, value)}), **parcel))
    )
    assert not refusal(server.send(Deliver(arrays=nested({"00000": good}), **parcel)))
    reply = server.send(TrainProxy(run=run, exchange=2, **PAIR, **{**PEER, "committed": 1}))
    assert all(np.isfinite(array).all() for array in weights(reply).values())
    assert not refusal(server.send(Deliver(arrays={}, run=run, released_in=2, kept=1.0)))
    assert not refusal(server.send(EvaluatePair(run=run, exchange=2)))


def test_shares_that_make_a_state_negative_meet_no_data(folder):
    server = HostileServer(folder, *TRAVELS, "strategy=proxyfl")
    assert weights(server.send(TrainProxy(run="shares", exchange=1, **PAIR, **PEER)))
    parcel = {"parcels": [1], "shares": [2.0], "weights": [1.0], "run": "shares", "released_in": 1, "kept": -1.0}
    reply = server.send(Deliver(arrays=nested({"00000": with_state(server)}), **parcel))
    assert "shares lie in [0, 1]" in refusal(reply)
    assert len(server.charges("shares")) == 1


def test_a_server_does_not_choose_whether_a_state_travels(folder):
    stays, travels = (HostileServer(folder, *options, "strategy=proxyfl") for options in (DP, TRAVELS))
    for server, rule in ((stays, "travels"), (travels, "reset"), (travels, "anything")):
        reply = server.send(TrainProxy(run="rule", exchange=1, **{**PAIR, "proxy_optimizer": rule}, **PEER))
        assert "strategy.proxy-optimizer is" in refusal(reply)
    fml = HostileServer(folder, *DP, "strategy=fml")
    request = TrainMutually(arrays=with_state(fml), run="extra", **{**PAIR, "proxy_optimizer": "stays"})
    assert "model's own names" in refusal(fml.send(request))


def test_no_private_number_is_in_the_state(folder):
    """Another private model, and another way of training it, do not change what leaves but by the proxy's noise."""
    options = [*TRAVELS, "strategy=fml", "privacy.noise=seeded"]
    released = []
    for own in ({}, {"private_lr": 0.5, "private_seed": 9, "private_optimizer": "sgd"}):
        server = HostileServer(folder, *options, f"private_optimizer={own.get('private_optimizer', 'adam')}")
        request = {**PAIR, **own, "run": f"private {len(released)}"}
        reply = server.send(TrainMutually(arrays=with_state(server), exchange=1, **request))
        released.append(weights(reply))
    assert all(np.array_equal(released[0][name], released[1][name]) for name in released[0])
