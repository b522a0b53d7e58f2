"""AvgPush against the methods that it becomes on special graphs."""

import numpy as np
import pytest
from harness import same
from peers import NAMES, hospitals, run
from safetensors.numpy import load_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    hospitals(folder)
    return folder


KEEP = ["strategy.optimizer-state=keep", "rounds=3"]


def test_on_the_complete_graph_with_equal_sizes_it_is_fedavg(folder):
    averaged = load_file(run(folder, "strategy=fedavg", *KEEP).folder / "models" / "global.safetensors")
    ran = run(folder, "strategy=avgpush", "topology=complete", *KEEP)
    for name in NAMES:
        theta, w = ran.model(name, 3)
        assert w == pytest.approx(1)
        for key, array in theta.items():
            assert array.dtype == averaged[key].dtype
            np.testing.assert_allclose(array, averaged[key], rtol=0, atol=1e-6)


def test_without_edges_it_is_local(folder):
    alone = run(folder, "strategy=local", "rounds=2")
    ran = run(folder, "strategy=avgpush", "topology=none", "rounds=2")
    for name in NAMES:
        assert same(ran.model(name, 2)[0], alone.kept("model", name, 2))
    assert ran.result["final"] == alone.result["final"]


def test_a_permutation_passes_models_on(folder):
    """The exponential graph: to the next, then to the one after the next."""
    ran = run(folder, "strategy=avgpush", "rounds=2")
    for exchange, hop in ((1, 1), (2, 2)):
        for k, name in enumerate(NAMES):
            to = NAMES[(k + hop) % len(NAMES)]
            assert same(ran.model(to, exchange)[0], ran.model(name, exchange, "released")[0])


def test_what_travels_is_a_model_up_and_one_down(folder):
    ran = run(folder, "strategy=avgpush", "rounds=1")
    sizes = {(e["institution"], e["direction"], e["stage"]): e["bytes"] for e in ran.ledger if e["kind"] == "model"}
    up, down = ({sizes[name, way, stage] for name in NAMES} for way, stage in (("up", "push"), ("down", "deliver")))
    assert len(up) == len(down) == 1
    [names] = [down.pop() - up.pop()]
    assert 0 < names < 100  # parcels are numbered


def test_with_noise_it_states_what_was_released(folder):
    ran = run(folder, "strategy=avgpush", "dp=classifier", "sigma=2", "delta=0.01", "topology=exponential-half")
    assert {account["mechanism"] for account in ran.result["privacy"].values()} == {"DP-SGD, Poisson sampling"}
    spent = {account["epsilon"] for account in ran.result["privacy"].values()}
    assert len(spent) == 1
    protected = {e["protection"] for e in ran.ledger if e["direction"] == "up" and e["kind"] == "model"}
    assert all(protection.endswith("-DP") for protection in protected)
    assert not any(e["field"] == "train-loss" for e in ran.ledger)
