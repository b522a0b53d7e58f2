"""Attacks on what an epsilon promises: by a server that sends what it likes to an institution's ClientApp."""

import numpy as np
import pytest
import torch
from harness import SHARDS, write_shards
from hostile_server import HostileServer, metrics, refusal, weights

from flwr_replay.clients.feder import FedERClient
from flwr_replay.config.halves import load_client, load_strategy
from flwr_replay.payloads.avgpush import Push
from flwr_replay.payloads.common import Evaluate, Train, Trained
from flwr_replay.payloads.feder import TrainWithBuffers
from flwr_replay.payloads.fedsgd import Differentiate, Gradient
from flwr_replay.payloads.local import EvaluateOwn
from flwr_replay.payloads.mutual import EvaluatePair, TrainProxy
from flwr_replay.payloads.relay import Deliver
from flwr_replay.payloads.replay import TrainedPrior, TrainPrior
from flwr_replay.wire.fields import model

TASK = [*SHARDS, "classes=3", "model=mlp", "model.width=6", "batch_size=16", "device=cpu"]
GROUP = ["model=cnn", "model.width=4", "model.norm=group"]
REPLAY = ["replay=pixelcnn", "codebook=gradient", "generator.width=4", "generator.codes=8", "generator.dim=4"]
REPLAY += ["generator.epochs=1", "prior.width=4", "prior.layers=1", "prior.epochs=1"]
END_TO_END = [*TASK, *GROUP, *REPLAY, "dp=end-to-end", "sigma=30", "generator.batch_size=16"]
SMALL = ["prior.batch_size=16"]
ALL = "generator.classes=[all]"
PAIR = {"alpha": 0.5, "beta": 0.0, "private_seed": 1, "private_optimizer": "sgd", "private_lr": 0.1}
ALONE = {"private_epochs": 0, "private_batch_size": 16, "private_shift": 0}
PEER = {"lr": 0.1, "init_seed": 1, "committed": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    write_shards(folder, {"a": 40})
    return folder


# --- which mechanisms a method has ------------------------------------------------------------------------------------


def test_a_gradient_does_not_leave_as_protected(folder):
    policy = "{max-epsilon: 1, max-delta: 0.1}"
    server = HostileServer(folder, *END_TO_END, *SMALL, "strategy=fedsgd", policy=policy)
    reply = server.send(Differentiate(arrays=server.weights, run="fedsgd"))
    assert not weights(reply)
    assert refusal(reply) == "ConfigError; the institution's own log says more"


@pytest.mark.parametrize("strategy", ["fedsgd", "fedprox", "fedavgshare", "splitnn"])
def test_a_method_without_dp_steps_has_no_classifier_by_dp_sgd(folder, strategy):
    arrays = HostileServer(folder, *TASK, *GROUP, "dp=none", "strategy=fedavg").weights
    server = HostileServer(folder, *TASK, *GROUP, "dp=classifier", f"strategy={strategy}")
    reply = server.send(Train(arrays=arrays, run=strategy, lr=0.1))
    assert refusal(reply)
    assert not weights(reply)


def test_a_model_that_is_not_trained_by_dp_sgd_is_not_even_trained_to_leave(folder, monkeypatch):
    asked = []
    monkeypatch.setattr(FedERClient, "train_with_buffers", lambda self, request: asked.append(request))
    server = HostileServer(folder, *END_TO_END, *SMALL, "replay=none", "strategy=feder", "mode=buffer-only", ALL)
    request = {"run": "feder", "lr": 0.1, "mode": "buffer-only", "local_epochs": 1, "optimizer_state": "reset"}
    reply = server.send(TrainWithBuffers(**request, arrays=server.weights, buffers=[], buffered=0))
    assert "nothing leaves that depends on training examples without noise" in refusal(reply)
    assert not weights(reply)
    assert not asked


def test_a_subclass_inherits_no_protection():
    assert Trained.declared()["arrays"].dp == "classifier+update"
    assert Gradient.declared()["arrays"].dp == "gradient"
    strategy, config = load_strategy("fedavg")
    assert strategy.traits() == config.traits
    assert type("Mine", (strategy,), {}).traits().dp_mechanisms == ()
    assert type("MineConfig", (config,), {}).traits.dp_mechanisms == ()


def test_an_answer_that_nobody_has_charged_for_does_not_leave(folder, monkeypatch):
    """A third party's loop that says it is private and forgets its steps."""
    client = load_client("fedavg")

    def train(self, visit):
        return Trained(arrays=visit.arrays, num_examples=40, examples_seen=40, num_steps=5, epsilon=1.0, delta=0.01)

    monkeypatch.setattr(client, "train", train)
    server = HostileServer(folder, *TASK, "dp=classifier", "strategy=fedavg")
    reply = server.send(Train(arrays=server.weights, run="forgets", lr=0.1))
    assert "only if its classifier has been charged" in refusal(reply)
    assert not weights(reply)
    assert server.charges("forgets") == []


def test_an_answer_that_understates_epsilon_does_not_leave(folder, monkeypatch):
    client = load_client("cwt")
    plain = client.train

    def train(self, visit):
        return Trained(**{**vars(plain(self, visit)), "epsilon": 0.001})

    monkeypatch.setattr(client, "train", train)
    server = HostileServer(folder, *TASK, "dp=classifier", "strategy=cwt")
    reply = server.send(Train(arrays=server.weights, run="understates", lr=0.1))
    assert "it states 0.001" in refusal(reply)
    assert len(server.charges("understates")) == 1


def test_label_counts_have_a_charge_of_their_own():
    assert TrainedPrior.declared()["label_counts"].dp == "label counts"
    assert TrainPrior.answer is TrainedPrior


# --- delta ------------------------------------------------------------------------------------------------------------


def test_delta_is_checked_where_the_account_is_charged(folder):
    server = HostileServer(folder, *TASK, "dp=classifier", "strategy=cwt", "epsilon=1", "delta=0.999999")
    reply = server.send(Train(arrays=server.weights, run="delta", lr=0.1))  # no roll call before it
    assert "at most one over the number of examples, 0.025" in refusal(reply)
    assert not server.charges("delta")


@pytest.mark.parametrize("delta", ["delta=0.02", "delta=0"], ids=["as given", "one over the number of examples"])
def test_a_policy_caps_delta(folder, delta):
    options = [*TASK, "dp=classifier", "strategy=cwt", delta]
    server = HostileServer(folder, *options, policy="max-delta: 0.001")
    assert "asks for delta <= 0.001" in refusal(
        server.send(Train(arrays=server.weights, run=f"cap {delta[6:]}", lr=0.1))
    )


# --- one run, one strategy, one mechanism -----------------------------------------------------------------------------


def test_plain_exchanges_do_not_lead_up_to_a_private_release(folder):
    plain = HostileServer(folder, *TASK, "strategy=avgpush")
    for exchange in range(1, 4):
        visit = Push(run="mixed", exchange=exchange, **{**PEER, "committed": exchange - 1})
        assert weights(plain.send(visit))
        assert not refusal(plain.send(Deliver(arrays={}, run="mixed", released_in=exchange, kept=1.0)))
    for options in (["strategy=avgpush", "dp=classifier"], ["strategy=proxyfl", "dp=proxy", "beta=0"]):
        private = HostileServer(folder, *TASK, *options)
        visit = (
            Push(run="mixed", exchange=4, **{**PEER, "committed": 3})
            if "strategy=avgpush" in options
            else TrainProxy(run="mixed", exchange=4, **{**PEER, "committed": 3}, **PAIR, **ALONE)
        )
        reply = private.send(visit)
        assert "run 'mixed' was begun with others" in refusal(reply)
        assert not weights(reply)


def test_state_of_another_setting_is_refused_though_the_run_has_lost_what_it_was_bound_to(folder):
    plain = HostileServer(folder, *TASK, "strategy=avgpush")
    assert weights(plain.send(Push(run="cut", exchange=1, **PEER)))
    assert not refusal(plain.send(Deliver(arrays={}, run="cut", released_in=1, kept=1.0)))
    (plain.state / "runs" / "cut").rename(plain.state / "runs" / "cut2")
    (plain.state / "runs" / "cut2" / "options.json").unlink()
    private = HostileServer(folder, *TASK, "strategy=avgpush", "dp=classifier")
    reply = private.send(Push(run="cut2", exchange=2, **{**PEER, "committed": 1}))
    assert "was made under others" in refusal(reply)


# --- errors and metrics that tell -------------------------------------------------------------------------------------


@pytest.mark.sampled(2, of="slow learning")
def test_a_private_model_that_diverges_is_not_reported(folder):
    server = HostileServer(folder, *TASK, "strategy=proxyfl", "dp=proxy", "beta=0", "sigma=2")
    for exchange, lr in ((1, 0.1), (2, 1e30), (3, 0.1)):
        visit = TrainProxy(
            run="nan",
            exchange=exchange,
            **{**PEER, "committed": exchange - 1},
            **{**PAIR, "private_lr": lr},
            **ALONE,
        )
        reply = server.send(visit)
        assert not refusal(reply)
        assert "train-loss" not in metrics(reply)
        assert all(np.isfinite(array).all() for array in weights(reply).values())
        assert not refusal(server.send(Deliver(arrays={}, run="nan", released_in=exchange, kept=1.0)))
    assert np.isfinite(metrics(server.send(EvaluatePair(run="nan", exchange=3)))["loss"])


@pytest.mark.parametrize("beta", [0.5, -1.0, float("nan")], ids=str)
def test_a_proven_proxy_learns_nothing_from_the_private_model(folder, beta):
    """A negative beta was neither above 0 nor 0: the private model, which has no noise, then taught the proxy."""
    server = HostileServer(folder, *TASK, "strategy=proxyfl", "dp=proxy", "beta=0")
    reply = server.send(TrainProxy(run="beta", exchange=1, **PEER, **{**PAIR, "beta": beta}, **ALONE))
    assert "strategy.beta is 0.0" in refusal(reply) or "must be float, finite" in refusal(reply)
    assert not server.charges("beta")


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38], ids=str)
def test_weights_that_are_no_numbers_meet_no_data(folder, bad, monkeypatch):
    server = HostileServer(folder, *TASK, "strategy=cwt", "dp=classifier")
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda *_: pytest.fail("weights met data"))
    name = next(iter(server.weights))
    spoilt = {**server.weights, name: np.full_like(server.weights[name], bad)}
    for request in (Train(arrays=spoilt, run="bad", lr=0.1), Evaluate(arrays=spoilt, run="bad")):
        assert refusal(server.send(request)) == "FlwrReplayError; the institution's own log says more"
    assert not server.charges("bad")


def test_a_proxy_that_was_mixed_to_no_numbers_meets_no_data(folder):
    server = HostileServer(folder, *TASK, "strategy=avgpush", "dp=classifier")
    assert not refusal(server.send(Push(run="mix", exchange=1, **PEER)))
    parcel = {f"00000.{name}": array for name, array in server.weights.items()}
    huge = {"parcels": [1], "shares": [1e308], "weights": [1e308]}
    server.send(Deliver(arrays=parcel, run="mix", released_in=1, kept=1.0, **huge))
    assert refusal(server.send(Push(run="mix", exchange=2, **{**PEER, "committed": 1})))
    assert len(server.charges("mix")) == 1


def test_training_examples_are_tested_only_in_runs_that_say_so(folder):
    policy = ""
    plain = HostileServer(folder, *TASK, "strategy=cwt", policy=policy)
    request = Evaluate(arrays=plain.weights, run="split", split="train")
    assert "forgetting=true" in refusal(plain.send(request))
    assert "external=true" in refusal(plain.send(Evaluate(arrays=plain.weights, run="split", split="external")))
    assert "split='elsewhere'" in refusal(plain.send(Evaluate(arrays=plain.weights, run="split", split="elsewhere")))
    looking = HostileServer(folder, *TASK, "strategy=cwt", "forgetting=true")
    assert metrics(looking.send(Evaluate(arrays=plain.weights, run="looks", split="train")))["num-examples"] == 40
    reported = [line for line in looking.ledger if line["run"] == "looks"]
    assert {line["split"] for line in reported} == {"train"}
    local = HostileServer(folder, *TASK, "strategy=local")
    assert "forgetting=true" in refusal(local.send(EvaluateOwn(run="own", split="train")))


def test_an_epsilon_that_rounds_to_nothing_is_stated_all_the_same(folder):
    server = HostileServer(folder, *TASK, "strategy=cwt", "dp=classifier", "sigma=1000000", "delta=0.02")
    reply = server.send(Train(arrays=server.weights, run="tiny", lr=0.1))
    assert metrics(reply)["delta"] == 0.02
    [line] = [line for line in server.ledger if line["run"] == "tiny" and line["field"] == "arrays"]
    assert line["protection"].endswith(", 0.02)-DP")


# --- the policy's own keys --------------------------------------------------------------------------------------------


def test_metrics_leave_as_a_policy_says(folder):
    def reported(policy, *options):
        server = HostileServer(folder, *TASK, "strategy=cwt", *options, policy=policy)
        return server.send(Evaluate(arrays=server.weights, run=f"m {abs(hash(policy))}"))

    assert {"loss", "confusion"} <= metrics(reported("metrics: exact")).keys()
    assert metrics(reported("metrics: counted")).keys() == {"num-examples", "confusion"}
    assert "lets no metrics leave" in refusal(reported("metrics: none"))


def test_beside_a_largest_epsilon_only_counts_of_tests_leave(folder):
    server = HostileServer(folder, *END_TO_END, *SMALL, "strategy=cwt", policy="{max-epsilon: 1, max-delta: 0.1}")
    reply = server.send(Evaluate(arrays=server.weights, run="capped"))
    assert metrics(reply).keys() == {"num-examples", "confusion"}


def test_a_run_has_so_many_tests(folder):
    job = [*TASK, "strategy=cwt", "evaluate_every=100", "split=test"]
    server = HostileServer(folder, *job, policy="max-evaluations: 2")
    replies = [server.send(Evaluate(arrays=server.weights, run="tests")) for _ in range(3)]
    assert [bool(refusal(reply)) for reply in replies] == [False, False, True]
    assert "policy allows 2 tests in a run" in refusal(replies[2])
    another = HostileServer(folder, *job, policy="max-evaluations: 2")  # a new process counts on
    assert refusal(another.send(Evaluate(arrays=server.weights, run="tests")))


def test_a_field_that_is_declared_private_needs_a_charge_by_that_name():
    class Mine(Trained):
        arrays = model(dp="classifier")

    assert Mine.declared()["arrays"].dp == ""  # not annotated here, so not declared here
