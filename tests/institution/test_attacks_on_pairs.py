"""Attacks on an institution with a private model and a proxy, and by one on the others (docs/audit.md)."""

import numpy as np
import pytest
from harness import SHARDS, same, write_shards
from hostile_server import HostileServer, metrics, refusal, weights
from peers import hospitals, run
from safetensors.numpy import load_file
from sealed_runs import pinned_keys

from flwr_replay.errors import RunError
from flwr_replay.files.tensors import nested
from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.institution.mutual import PairClient
from flwr_replay.memory import forget
from flwr_replay.payloads.mutual import EvaluatePair, EvaluateWithProxy, TrainMutually, TrainProxy
from flwr_replay.payloads.relay import Deliver
from flwr_replay.state.store import StateStore
from flwr_replay.wire.records import array_record, arrays_in

TASK = [*SHARDS, "classes=3", "model=mlp", "model.width=6", "batch_size=16", "device=cpu"]
DP = [*TASK, "dp=proxy", "beta=0", "sigma=2", "delta=0.01"]
PAIR = {"alpha": 0.5, "beta": 0.0, "private_seed": 1, "private_optimizer": "sgd", "private_lr": 0.01, "lr": 0.01}
PAIR |= {"private_epochs": 0, "private_batch_size": 16, "private_shift": 0, "run": "r", "exchange": 1}
POOL = [*DP, "alpha=0", "listen=pool", "private-epochs=1", "holdout=0.1"]
ALONE = {**PAIR, "alpha": 0.0, "private_epochs": 1, "listen": "pool", "holdout": 0.1}
FIRST = {"init_seed": 1, "committed": 0}


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path, {"a": 40})
    return tmp_path


def test_a_server_cannot_change_the_private_optimizer(folder):
    """A kept state of another optimizer made an error, but only where the private model had not diverged."""
    server = HostileServer(folder, *DP, "strategy=fml", policy="metrics: none\n")
    assert not refusal(server.send(TrainMutually(arrays=server.weights, **PAIR)))
    reply = server.send(TrainMutually(arrays=server.weights, **{**PAIR, "private_optimizer": "adam", "exchange": 2}))
    assert "strategy.private-optimizer is 'sgd', it asks for adam" in refusal(reply)
    adam = HostileServer(folder, *DP, "strategy=fml", "private-optimizer=adam")
    reply = adam.send(TrainMutually(arrays=server.weights, **{**PAIR, "run": "other"}))
    assert "strategy.private-optimizer is 'adam', it asks for sgd" in refusal(reply)


@pytest.mark.parametrize("policy", ["metrics: counted", "metrics: none"])
@pytest.mark.parametrize("split", [False, True])
def test_no_training_example_weighs_an_answer_where_only_counts_may_leave(folder, policy, split):
    if split:
        arrays = dict(np.load(folder / "a.npz"))
        np.savez(folder / "a.npz", **arrays, val_images=arrays["test_images"], val_labels=arrays["test_labels"])
    server = HostileServer(folder, *POOL, "strategy=fml", policy=policy)
    trained = server.send(TrainMutually(arrays=server.weights, **ALONE))
    tested = server.send(EvaluateWithProxy(arrays=server.weights, run="r", exchange=1, listen="pool", holdout=0.1))
    if split:
        assert weights(trained)
        assert bool(metrics(tested)) == (policy == "metrics: counted")
    else:
        assert "depend on single training examples; the run is masked, or a policy lets" in refusal(trained)
        assert not metrics(tested)
        assert not server.charges("r")


def test_with_a_share_of_almost_all_one_example_is_left_to_learn_from(folder):
    server = HostileServer(folder, *POOL, "strategy=fml", "holdout=0.99")
    assert weights(server.send(TrainMutually(arrays=server.weights, **{**ALONE, "holdout": 0.99})))


@pytest.mark.parametrize("values", [{"kept": -1e9}, {"kept": 1e99}, {"shares": [-0.5]}, {"weights": [1e99]}])
def test_shares_that_are_none_are_refused(folder, values):
    server = HostileServer(folder, *DP, "strategy=proxyfl")
    server.send(TrainProxy(**PAIR, **FIRST))
    good = {"kept": 0.5, "shares": [0.5], "weights": [1.0]}
    parcels = {"arrays": nested({"00000": server.weights}), "parcels": [1], "run": "r", "released_in": 1}
    assert "shares lie in [0, 1]" in refusal(server.send(Deliver(**parcels, **{**good, **values})))
    assert not refusal(server.send(Deliver(**parcels, **good)))


def test_a_mixed_model_that_is_too_large_meets_no_data(folder):
    server = HostileServer(folder, *DP, "strategy=proxyfl")
    server.send(TrainProxy(**PAIR, **FIRST))
    large = {name: np.full_like(array, 9e5) for name, array in server.weights.items()}
    arrays = nested({"00000": large, "00001": large})
    parcels = {"arrays": arrays, "parcels": [1, 2], "run": "r", "released_in": 1, "kept": 0.0, "weights": [1e9, 1e9]}
    server.send(Deliver(**parcels, shares=[1.0, 1.0]))
    reply = server.send(EvaluatePair(run="r", exchange=1))
    assert refusal(reply) or np.isfinite(metrics(reply)["loss"])


def test_weights_of_another_kind_of_number_are_refused(folder):
    server = HostileServer(folder, *DP, "strategy=fml")
    whole = {name: np.full(array.shape, 10**17, np.int64) for name, array in server.weights.items()}
    assert "kinds of number" in refusal(server.send(TrainMutually(arrays=whole, **PAIR)))
    assert not server.charges("r")


@pytest.mark.parametrize("strategy", ["fml", "proxyfl"])
def test_moments_that_no_gradients_have_are_their_senders_failure(folder, strategy):
    def spoil(grid, message, reply):
        asked = grid.asked[-1]
        if asked.stage in ("train-proxy", "train-mutually") and asked.name == "a" and asked.exchange == 1:
            arrays = arrays_in(reply.content)
            spoilt = {"exp_avg": 1e6, "exp_avg_sq": 0.0, "step": 1e12}
            reply.content["arrays"] = array_record(
                {
                    name: np.full_like(array, spoilt.get(name.rpartition(".")[2], array))
                    for name, array in arrays.items()
                }
            )
        return reply

    hospitals(folder)
    options = [f"strategy={strategy}", "optimizer=adam", "proxy_optimizer=travels", *DP[-4:], "rounds=3"]
    ran = run(folder, *options, *(["topology=complete"] if strategy == "proxyfl" else []), after=spoil)
    assert {(failure["institution"], failure["round"]) for failure in ran.result["failures"]} == {("a", 1)}
    assert "at most eight times the root" in ran.result["failures"][0]["reason"]


def test_moments_that_gradients_have_pass(folder):
    hospitals(folder)
    ran = run(folder, "strategy=fml", "optimizer=adam", "proxy_optimizer=travels", *DP[-4:], "rounds=4", "lr=0.3")
    assert not ran.result["failures"]


# --- proxies that are only summed -------------------------------------------------------------------------------------

UPDATE = [*TASK, "strategy=fml", "dp=update", "sigma=2", "delta=0.01"]
MASKED = [*TASK, "strategy=fml", "dp=none", "masked=true"]
SHARED = [*UPDATE, "masked=true", "noise=shared", "nodes=3"]
HALF = {**PAIR, "beta": 0.5, "lr": 0.05, "private_lr": 0.05}


def summed_server(folder, options):
    write_shards(folder, {"a": 40, "b": 40, "c": 40})
    return HostileServer(folder, *options, **pinned_keys(folder, "abc")["a"] if "masked=true" in options else {})


def ask(server, **other):
    return server.send(TrainMutually(**{"arrays": server.weights, **HALF, "total": 120} | other))


def pair_file(server, exchange=1, run="r"):
    return server.state / "runs" / run / f"pair-{exchange:06d}.safetensors"


def paid_steps(server):
    return sum(charge["steps"] for charge in server.charges("r"))


@pytest.mark.parametrize("options", [UPDATE, SHARED, MASKED])
@pytest.mark.parametrize("wrong", [{"private_lr": 1e30}, {"lr": 1e30, "private_lr": 1e30}])
def test_no_message_says_that_a_private_model_has_diverged(tmp_path, options, wrong):
    server = summed_server(tmp_path, options)
    right, reply = ask(server), ask(server, run="other", **wrong)
    assert not refusal(reply)
    assert metrics(reply) == metrics(right)
    assert "train-loss" not in metrics(right)
    assert weights(reply).keys() == weights(right).keys()
    assert all(np.isfinite(array).all() for array in load_file(pair_file(server, run="other")).values())


@pytest.mark.parametrize("options", [UPDATE, SHARED])
def test_who_asks_again_gets_the_same_bytes_and_trains_no_private_model_twice(tmp_path, options, monkeypatch):
    server, trained, keep = summed_server(tmp_path, options), [], PairClient.keep_pair
    monkeypatch.setattr(PairClient, "keep_pair", lambda self, *about: trained.append(1) or keep(self, *about))
    first, kept = ask(server), pair_file(server).read_bytes()
    forget()
    again = ask(server, stated=0.1)
    assert same(weights(again), weights(first))
    assert metrics(again) == metrics(first)
    assert (metrics(again)["num-steps"], metrics(again)["examples-seen"]) == (2, 32)
    assert (len(trained), pair_file(server).read_bytes(), paid_steps(server)) == (1, kept, 1)
    assert not same(weights(ask(server, exchange=2)), weights(first))
    assert (len(trained), paid_steps(server)) == (2, 2)


OTHERS = [
    ({"beta": 0.0}, "strategy.beta is 0.5, it asks for 0.0"),
    ({"alpha": 0.1}, "strategy.alpha is 0.5, it asks for 0.1"),
    ({"private_epochs": 3}, "strategy.private-epochs is 0, it asks for 3"),
    ({"proxy_optimizer": "travels"}, "strategy.proxy-optimizer is 'stays', it asks for travels"),
    ({"lr": 0.01}, ""),
    ({"private_lr": 1.0}, ""),
    ({"private_seed": 2}, ""),
]


@pytest.mark.parametrize(("other", "says"), OTHERS)
@pytest.mark.parametrize("options", [UPDATE, SHARED, MASKED])
def test_another_request_in_an_exchange_is_refused_or_paid_for(tmp_path, options, other, says):
    server = summed_server(tmp_path, options)
    assert weights(ask(server))
    reply = ask(server, **other)
    free = options is UPDATE and not says  # neither masks nor the run's options forbid it
    assert bool(weights(reply)) == free
    assert free or (says or "an exchange has one answer") in refusal(reply)
    assert paid_steps(server) == (options is not MASKED) * (1 + free)


@pytest.mark.parametrize("options", [UPDATE, SHARED])
@pytest.mark.parametrize(
    ("owner", "method", "key"),
    [(PrivacyBudget, "charge", "update"), (StateStore, "save", "pair"), (StateStore, "save", "update")],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_loses_no_training_and_makes_none_twice(tmp_path, options, owner, method, key, when, monkeypatch):
    server, does = summed_server(tmp_path, options), getattr(owner, method)
    for exchange in (1, 2):
        assert weights(ask(server, run="whole", exchange=exchange))
    assert weights(ask(server))

    def crashes(self, *about, **more):
        if when == "after" or about[0] != key:
            does(self, *about, **more)
        if about[0] == key:
            raise RunError("the power is gone")

    monkeypatch.setattr(owner, method, crashes)
    assert not weights(ask(server, exchange=2))
    monkeypatch.setattr(owner, method, does)
    forget()
    assert weights(ask(server, exchange=2))
    assert same(*(load_file(pair_file(server, 2, run)) for run in ("r", "whole")))
    at_once = key == "pair" or (method, when) in (("charge", "before"), ("save", "after"))
    assert paid_steps(server) == (2 if at_once else 3)


@pytest.mark.parametrize("options", [UPDATE, SHARED])
def test_a_budget_that_is_used_up_trains_no_private_model(tmp_path, options):
    server = summed_server(tmp_path, [*options, "privacy.epsilon=2"])
    said = [refusal(ask(server, exchange=exchange)) for exchange in (1, 2, 3, 4)]
    assert ["the privacy budget is epsilon 2" in line for line in said] == [False, False, False, True]
    assert [pair_file(server, exchange).exists() for exchange in (1, 2, 3, 4)] == [True, True, True, False]
    assert weights(ask(server, exchange=3))  # once more
    assert paid_steps(server) == 3


@pytest.mark.parametrize("options", [UPDATE, MASKED])
def test_a_proxy_whose_gradients_overflow_has_a_fresh_optimizer_next(tmp_path, options):
    """Adam's infinite second moments would keep it as it arrives, in every round from then on."""
    without_width = [option for option in options if option != "model.width=6"]
    server = summed_server(tmp_path, [*without_width, "model=lenet5", "optimizer=adam"])
    large = {name: np.full_like(array, 3e5) for name, array in server.weights.items()}
    steps = {"private_optimizer": "adam", "lr": 0.001}
    for exchange, arrays in ((1, large), (2, server.weights)):
        assert weights(ask(server, exchange=exchange, arrays=arrays, **steps))
        kept = load_file(pair_file(server, exchange))
        assert all(np.isfinite(array).all() for array in kept.values())
        assert any(name.startswith("proxy-optimizer.") for name in kept) == (exchange == 2)
