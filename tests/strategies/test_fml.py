"""FML: a server averages the proxies; without mutual learning these are FedAvg's models."""

import numpy as np
import pytest
from harness import same
from peers import NAMES, hospitals, run
from safetensors.numpy import load_file

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


def test_private_models_may_differ_and_stay(folder):
    ran = run(folder, *FML, "private-models=[lenet5]", "sigma=2", "delta=0.01")
    assert "conv1.conv.weight" in ran.private("b", 2)
    assert all("not a proof" in account["mechanism"] for account in ran.result["privacy"].values())
    up = {entry["field"] for entry in ran.ledger if entry["direction"] == "up" and entry["stage"] == "train-mutually"}
    assert up == {"arrays", "num-examples", "examples-seen", "num-steps", "epsilon", "delta"}
    assert all(np.isfinite(array).all() for array in global_model(ran).values())
    assert len(ran.result["privacy"]) == len(NAMES)
