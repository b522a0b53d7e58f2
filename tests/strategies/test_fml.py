"""FML: a server averages the proxies; without mutual learning these are FedAvg's models."""

import numpy as np
import pytest
from harness import same
from peers import NAMES, hospitals, run
from safetensors.numpy import load_file
from sealed_runs import pinned_keys

from flwr_replay.rng import derived_seed
from flwr_replay.strategies.proxyfl import ProxyFL

FML = ["strategy=fml", "rounds=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    hospitals(folder)
    return folder


ONE = [*FML, "dp=none", "rounds=1", "batch-size=40"]  # one step


def global_model(ran):
    return load_file(ran.folder / "models" / "global.safetensors")


def test_a_proxy_that_learns_from_labels_alone_is_fedavgs_model(folder):
    averaged = run(folder, "strategy=fedavg", "rounds=2", "strategy.optimizer-state=keep")
    ran = run(folder, *FML, "beta=0", "dp=none")
    assert same(global_model(ran), global_model(averaged))
    proxies = {key.removeprefix("proxy-"): v for key, v in ran.result["final"]["global"].items() if "proxy-" in key}
    assert proxies == averaged.result["final"]["global"]


def test_a_proxys_step_does_not_see_the_private_models(folder):
    ran, other = run(folder, *ONE), run(folder, *ONE, "alpha=0")
    assert same(global_model(ran), global_model(other))
    assert not same(ran.private("a", 1), other.private("a", 1))


@pytest.mark.parametrize("summed", [[], ["masked=true"]])
@pytest.mark.parametrize("options", [[], ["momentum=0.9", "lr=0.2", "private-epochs=1"]])
def test_it_is_proxyfl_on_the_complete_graph(folder, monkeypatch, options, summed):
    """Of equal institutions, from equal fresh weights of both models; so masks can hide proxies that are averaged."""
    monkeypatch.setattr(ProxyFL, "seed_of", "model")
    monkeypatch.setattr("flwr_replay.strategies.proxyfl.derived_seed", lambda seed, _: derived_seed(seed, "private"))
    job = ["rounds=3", "dp=none", "alpha=0.3", "beta=0.6", *options]
    own = pinned_keys(folder) if summed else {}
    ran, graph = run(folder, *FML, *job, *summed, own=own), run(folder, "strategy=proxyfl", "topology=complete", *job)
    averaged, fresh = global_model(ran), graph.kept("released", NAMES[0], 1)
    assert max(np.abs(averaged[key] - fresh[f"theta.{key}"]).max() for key in averaged) > 0.02
    for name in NAMES:
        for ours, theirs in ((averaged, graph.model(name, 3)[0]), (ran.private(name, 3), graph.private(name, 3))):
            assert ours.keys() == theirs.keys()
            for key, array in ours.items():
                np.testing.assert_allclose(array, theirs[key], rtol=0, atol=2e-6)
    for key, value in ran.result["final"]["global"].items():
        assert graph.result["final"]["global"][key] == pytest.approx(value, rel=1e-4)


def test_private_models_may_differ_and_stay(folder):
    ran = run(folder, *FML, "private-models=[lenet5]", "sigma=2", "delta=0.01")
    assert "conv1.conv.weight" in ran.private("b", 2)
    assert all("not a proof" in account["mechanism"] for account in ran.result["privacy"].values())
    up = {entry["field"] for entry in ran.ledger if entry["direction"] == "up" and entry["stage"] == "train-mutually"}
    assert up == {"arrays", "num-examples", "examples-seen", "num-steps", "epsilon", "delta"}
    assert all(np.isfinite(array).all() for array in global_model(ran).values())
    assert len(ran.result["privacy"]) == len(NAMES)
