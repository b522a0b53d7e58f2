"""ProxyFL: what it becomes without exchange, what leaves, what may be claimed, and its budget."""

from contextlib import suppress
from math import inf

import numpy as np
import pytest
import torch
from harness import same
from peers import JOB, NAMES, N, broken, hospitals, run
from torch.nn import functional

from flwr_replay.config.compose import compose
from flwr_replay.engines.simulate import Simulation, run_inline
from flwr_replay.errors import BudgetError, ConfigError, RefusedError, RunError
from flwr_replay.files.tensors import read_tensors
from flwr_replay.forecast.forecast import forecast_page
from flwr_replay.learning.training import batches, torch_rng
from flwr_replay.models.zoo import backbone
from flwr_replay.payloads.mutual import ReleasedProxy
from flwr_replay.privacy.account import Account
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.report.progress import Display
from flwr_replay.rng import derived_seed
from flwr_replay.runs.options import resolve
from flwr_replay.strategies.proxyfl import ProxyFL

PROXYFL = ["strategy=proxyfl", "rounds=2"]
DP = ["dp=proxy", "sigma=2", "delta=0.01"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    return folder, hospitals(folder)


@pytest.fixture(scope="module")
def folder(shards):
    return shards[0]


def test_without_exchange_and_mutual_learning_it_is_local(folder):
    alone = run(folder, "strategy=local", "rounds=2")
    ran = run(folder, *PROXYFL, "alpha=0", "beta=0", "topology=none", "dp=none")
    for name in NAMES:
        assert same(ran.private(name, 2), alone.kept("model", name, 2))
    private = {key: value for key, value in ran.result["final"]["global"].items() if not key.startswith("proxy-")}
    assert private == alone.result["final"]["global"]


def test_a_run_is_algorithm_1(shards):
    """A plain loop over lines 1-12, with SGD, on the exponential graph; there w stays 1."""
    folder, data = shards
    ran = run(folder, *PROXYFL, "dp=none", "momentum=0", "alpha=0.4", "beta=0.3")
    fresh = backbone(*(getattr(compose([*JOB]), section) for section in ("model", "task")))
    phi = {name: fresh(derived_seed(0, "model")) for name in NAMES}
    theta = {name: fresh(derived_seed(0, "proxy")) for name in NAMES}
    for t in range(2):
        for name in NAMES:
            x, y = data[name]
            for x_B, y_B in batches(x, y, 16, torch_rng(0, name, t + 1)):
                f, h = phi[name](x_B), theta[name](x_B)
                for model, own, other, weight in ((theta, h, f, 0.3), (phi, f, h, 0.4)):
                    p = other.detach().softmax(1)
                    divergence = (p * (p.log() - own.log_softmax(1))).sum(1).mean()
                    loss = (1 - weight) * functional.cross_entropy(own, y_B) + weight * divergence
                    parameters = list(model[name].parameters())
                    gradients = torch.autograd.grad(loss, parameters)
                    with torch.no_grad():
                        for parameter, gradient in zip(parameters, gradients, strict=True):
                            parameter.grad = -0.05 * gradient
                for model in (theta, phi):
                    with torch.no_grad():
                        for parameter in model[name].parameters():
                            parameter += parameter.grad
        theta = {NAMES[(k + 2**t) % 4]: theta[name] for k, name in enumerate(NAMES)}
    for name in NAMES:
        for expected, weights in ((phi[name], ran.private(name, 2)), (theta[name], ran.model(name, 2)[0])):
            for key, value in expected.state_dict().items():
                torch.testing.assert_close(torch.from_numpy(weights[key]), value, rtol=0, atol=1e-5)


@pytest.mark.parametrize("momentum", ["0", "0.9"])
def test_on_the_complete_graph_the_mixed_proxy_is_fedsgds_model(folder, momentum, monkeypatch):
    """Of equal institutions, from equal fresh weights: mixing, a step on all examples and momentum are linear."""
    monkeypatch.setattr(ProxyFL, "seed_of", "model")
    job = ["rounds=3", "dp=none", "lr=0.5", f"momentum={momentum}", "split=test"]
    ran = run(folder, "strategy=proxyfl", *job, "alpha=0", "beta=0", "topology=complete", f"batch_size={N}")
    summed = read_tensors(run(folder, "strategy=fedsgd", *job).folder / "models" / "global.safetensors")
    fresh = backbone(*(getattr(compose([*JOB]), section) for section in ("model", "task")))(derived_seed(0, "model"))
    for key, array in fresh.state_dict().items():
        assert np.abs(summed[key] - array.numpy()).max() > 1e-2
        for name in NAMES:
            np.testing.assert_allclose(ran.model(name, 3)[0][key], summed[key], rtol=0, atol=1e-6)


def of_c(model):
    """Return the institutions' own configurations where c has another private model than the others."""
    return {name: {"private-model": model if name == "c" else "mlp"} for name in NAMES}


def test_only_the_proxy_leaves(folder):
    ran = run(folder, *PROXYFL, *DP, own=of_c("lenet5"))
    up = {(entry["stage"], entry["field"]) for entry in ran.ledger if entry["direction"] == "up"}
    assert {field for stage, field in up if stage == "train-proxy"} == {
        "arrays", "weight", "num-examples", "examples-seen", "num-steps", "epsilon", "delta",
    }  # fmt: skip
    proxy = sum(array.nbytes for array in ran.model("a", 2)[0].values())
    sizes = {entry["bytes"] for entry in ran.ledger if entry["stage"] == "train-proxy" and entry["kind"] == "model"}
    assert len(sizes) == 1  # private models are larger, and differ
    assert proxy < sizes.pop() < proxy + 2000
    assert ran.result["metric"] == "accuracy"
    assert {"accuracy", "proxy-accuracy"} <= ran.result["final"]["global"].keys()


def test_an_institutions_own_configuration_names_its_private_model(folder):
    ran = run(folder, *PROXYFL, "dp=none", own=of_c("lenet5"))
    assert "conv1.conv.weight" in ran.private("c", 2)
    assert "conv1.conv.weight" not in ran.private("a", 2)


def test_a_private_model_that_cannot_be_built_is_reported_before_anybody_trains(folder):
    ran = run(folder, *PROXYFL, "dp=none", own=of_c("unet"))
    [failure] = ran.result["failures"]
    assert (failure["round"], failure["institution"]) == (0, "c")
    assert {name for stage, name, _ in ran.grid.asked if stage == "train-proxy"} == {"a", "b", "d"}


CLAIM = "no proof"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("beta", "proven"), [("0.5", False), ("0", True)])
def test_an_epsilon_says_whether_it_is_proven(folder, beta, proven):
    ran = run(folder, *PROXYFL, *DP, f"beta={beta}")
    assert (CLAIM in ran.result["privacy-claim"]) != proven
    reported = list(ran.result["privacy"].values())
    assert all(("not a proof" in account["mechanism"]) != proven for account in reported)
    assert all(account["epsilon"] > 0 for account in reported)
    released = [e["protection"] for e in ran.ledger if e["stage"] == "train-proxy" and e["field"] == "arrays"]
    up = [text for text in released if text != "none"]
    assert len(up) == 2 * len(NAMES)
    assert all(("not a proof" in text) != proven for text in up)
    texts = [e["protection"] for e in ran.own_ledger("a") if e["field"] == "arrays" and e["protection"] != "none"]
    assert texts
    assert all(("not a proof" in text) != proven for text in texts)
    page = forecast_page(
        Simulation.of(compose(["strategy=proxyfl", "task=digits", "model=mlp", "nodes=4", f"beta={beta}", *DP[:2]]))
    )
    assert (CLAIM in page) != proven


@pytest.mark.parametrize(("beta", "most"), [("0.5", inf), ("0", 50)])
def test_an_unproven_epsilon_promises_nothing(beta, most):
    plan = PrivacyPlan.of(compose(["strategy=proxyfl", "model=mlp", f"beta={beta}", "epsilon=50"]))
    assert plan.promise(ReleasedProxy, ReleasedProxy.declared()["arrays"]) == most


def test_a_policy_that_asks_for_an_epsilon_of_all_refuses(folder):
    rules = folder / "policy.yaml"
    rules.write_text("kinds: [model, statistic]\nmax-epsilon: 100\nmax-delta: 0.1\n")

    ran = run(folder, *PROXYFL, *DP, "epsilon=50", own={"b": {"policy": str(rules)}})
    assert {failure["institution"] for failure in ran.result["failures"]} == {"b"}
    assert all("policy asks for epsilon <= 100" in failure["reason"] for failure in ran.result["failures"])


def test_who_has_used_up_its_budget_receives_and_learns_on(folder):
    free = run(folder, *PROXYFL, *DP, "rounds=4")
    spent = free.result["privacy"]["a"]["epsilon"]
    ran = run(folder, *PROXYFL, *DP, "rounds=4", f"epsilon={spent * 0.75}")
    assert not ran.result["failures"]
    assert 0 < ran.result["privacy"]["a"]["epsilon"] <= spent * 0.75
    steps = [sum(charge["steps"] > 0 for charge in ran.charges(name)) for name in NAMES]
    assert all(0 < n < 4 for n in steps)
    assert [len(ran.charges(name)) for name in NAMES] == [4] * 4  # that a proxy leaves as it was is noted, too
    assert not same(ran.private("a", 3), ran.private("a", 4))
    for k, name in enumerate(NAMES):  # a proxy that rests is passed on as it came
        assert same(ran.model(name, 3)[0], ran.model(name, 4, "released")[0])
        assert same(ran.model(NAMES[(k + 2) % 4], 4)[0], ran.model(name, 4, "released")[0])


def test_a_budget_below_the_first_step_is_refused_before_any_training(folder):
    with pytest.raises(RefusedError, match=r"privacy budget is epsilon 0\.01 .*the first pass of proxy alone"):
        run(folder, *PROXYFL, *DP, "epsilon=0.01", name="poor")
    known = (folder / "runs" / "poor" / "run-id").read_text().strip()
    assert not [path for path in folder.glob(f"state/*/{known}/*") if path.suffix == ".safetensors"]


def test_a_simulation_that_no_institution_can_afford_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    overrides, config = resolve([*PROXYFL, "model=mlp", "epsilon=0.01"], str(tmp_path / "runs"), "")
    for refused in (lambda: run_inline(overrides, Display()), lambda: Simulation.of(config)):
        with pytest.raises(BudgetError, match=r"epsilon 0\.01 .*the first pass of proxy alone makes"):
            refused()
    assert not list(tmp_path.iterdir())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", ["train-proxy", "deliver"])
def test_a_kill_between_charge_and_release_never_lowers_epsilon(folder, stage):
    whole = run(folder, *PROXYFL, *DP)
    resumed = broken(folder, *PROXYFL, *DP, breaking=[(stage, "c", 2)])
    for name in NAMES:
        before, after = (Account(ran.state(name), delta=0.01).epsilon() for ran in (whole, resumed))
        assert after >= before
    assert Account(resumed.state("a"), delta=0.01).epsilon() > Account(whole.state("a"), delta=0.01).epsilon()


def test_a_charge_is_on_the_disk_before_the_proxy_trains(folder, monkeypatch):
    from flwr_replay.institution.mutual import MutualLearner

    def killed(self, x_B, y_B):
        raise KeyboardInterrupt

    monkeypatch.setattr(MutualLearner, "step", killed)
    with suppress(KeyboardInterrupt):
        run(folder, *PROXYFL, *DP, name="killed")
    known = (folder / "runs" / "killed" / "run-id").read_text().strip()
    assert Account(folder / "state" / "a" / "runs" / known, delta=0.01).epsilon() > 0


def test_the_noise_for_a_target_keeps_the_whole_run_within_it(folder):
    ran = run(folder, *PROXYFL, "beta=0", "target-epsilon=2", "delta=0.01", "rounds=3")
    assert not ran.result["failures"]
    for account in ran.result["privacy"].values():
        assert 1.9 < account["epsilon"] <= 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["private-models=[mlp,lenet6]"], "unknown model 'lenet6'.*lenet5"),
        (["private-models=[unet]"], "unet and segmentation tasks go together"),
        (["model=cnn", "dp=proxy"], "no layer may mix examples"),
        (["topology=hypercube"], r"strategy\.topology"),
        (["dp=classifier"], "can have dp=proxy"),
        (["replay=vqvae2"], "choose replay=none"),
        (["private-models=[mlp,lenet5]"], "ConfigError; the institution's own log says more"),
        ([f"batch_size={N + 1}", *DP], f"{N} examples and a batch of {N + 1}"),
    ],
)
def test_bad_options_are_refused_before_any_training(folder, options, says):
    with pytest.raises((ConfigError, RefusedError), match=says):
        run(folder, *PROXYFL, *options)


def test_a_server_that_asks_for_another_beta_than_was_configured_is_refused(folder):
    def lies(grid, message):
        if "beta" in message.content["config"]:
            message.content["config"]["beta"] = 0.5

    with pytest.raises(RunError, match=r"strategy\.beta is 0\.0, it asks for 0\.5"):
        run(folder, *PROXYFL, *DP, "beta=0", before=lies)


def under_other_run(first):
    """Send every message under the id of another run."""

    def before(grid, message):
        message.content["config"]["run"] = first.run

    return before


def test_a_private_training_does_not_go_on_from_one_without_noise(folder):
    first = run(folder, *PROXYFL, "dp=none", "rounds=1", name="first")

    with pytest.raises(RefusedError, match=r"was begun with others .*: begin a new run"):
        run(folder, *PROXYFL, *DP, before=under_other_run(first))


def test_under_one_run_a_proxy_does_not_change_from_unproven_to_proven(folder):
    first = run(folder, *PROXYFL, *DP, "beta=0.5", "rounds=1", name="unproven")

    with pytest.raises(RefusedError, match=r"was begun with others .*: begin a new run"):
        run(folder, *PROXYFL, *DP, "beta=0", before=under_other_run(first))
