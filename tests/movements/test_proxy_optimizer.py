"""Where the state of a proxy's optimizer is between rounds: against a slow twin that says it step by step."""

import numpy as np
import pytest
import torch
from harness import same, write_shards
from peers import JOB, broken, run
from safetensors.numpy import load_file
from torch.nn import functional

from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError
from flwr_replay.learning.training import batches, torch_rng
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.mutual import MutualConfig, check_pair, first_state
from flwr_replay.rng import derived_seed
from flwr_replay.server.settings import Settings
from flwr_replay.strategies.fml import FMLConfig
from flwr_replay.wire.records import array_record, opened
from flwr_replay.wire.weights import parted

SIZES = {"a": 40, "b": 48}  # 2 and 3 batches of 16, so that step counts differ
LR, ALPHA, BETA, DECAY = 0.01, 0.4, 0.3, 0.001
OPTIMIZERS = {"adam": ["optimizer=adam"], "sgd": ["optimizer=sgd", "momentum=0.9"]}
GRAPHS = {"complete": [[0.5, 0.5], [0.5, 0.5]], "exponential": [[0, 1], [1, 0]]}
RULES = ("stays", "travels", "reset")
ROUNDS = 3
OPTIONS = [f"rounds={ROUNDS}", f"lr={LR}", f"alpha={ALPHA}", f"beta={BETA}", f"weight_decay={DECAY}", "dp=none"]


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    return folder, write_shards(folder, SIZES)


def twin(data, mixing, optimizer, rule, seeds):
    """Train every institution's two models by hand; mix proxies, and states that travel, by a matrix (to, from)."""
    fresh = backbone(*(getattr(compose([*JOB]), section) for section in ("model", "task")))
    phi, theta = ({name: fresh(derived_seed(0, seed)) for name in SIZES} for seed in seeds)
    make = torch.optim.Adam if optimizer == "adam" else lambda p, **how: torch.optim.SGD(p, momentum=0.9, **how)
    private = {name: make(phi[name].parameters(), lr=LR, weight_decay=DECAY) for name in SIZES}

    def unstepped(name):
        return [{"m": torch.zeros_like(p), "v": torch.zeros_like(p), "t": 0.0} for p in theta[name].parameters()]

    state = {name: unstepped(name) for name in SIZES}
    for exchange in range(1, ROUNDS + 1):
        for name, (x, y) in data.items():
            state[name] = unstepped(name) if rule == "reset" else state[name]
            for x_B, y_B in batches(x, y, 16, torch_rng(0, name, exchange)):
                f, h = phi[name](x_B), theta[name](x_B)
                gradients = []
                for model, own, other, weight in ((theta, h, f, BETA), (phi, f, h, ALPHA)):
                    p = other.detach().softmax(1)
                    divergence = (p * (p.log() - own.log_softmax(1))).sum(1).mean()
                    loss = (1 - weight) * functional.cross_entropy(own, y_B) + weight * divergence
                    gradients.append(torch.autograd.grad(loss, list(model[name].parameters())))
                for parameter, gradient, kept in zip(theta[name].parameters(), gradients[0], state[name], strict=True):
                    by_hand(optimizer, parameter.data, gradient + DECAY * parameter.data, kept)
                for parameter, gradient in zip(phi[name].parameters(), gradients[1], strict=True):
                    parameter.grad = gradient
                private[name].step()
        mix(theta, state if rule == "travels" else {}, mixing)
    return phi, theta


def by_hand(optimizer, parameter, gradient, kept):
    """Take a step of SGD with momentum, or of Adam."""
    if optimizer == "sgd":
        kept["m"] = 0.9 * kept["m"] + gradient
        parameter -= LR * kept["m"]
        return
    kept["t"] += 1
    kept["m"] = 0.9 * kept["m"] + 0.1 * gradient
    kept["v"] = 0.999 * kept["v"] + 0.001 * gradient**2
    m, v = kept["m"] / (1 - 0.9 ** kept["t"]), kept["v"] / (1 - 0.999 ** kept["t"])
    parameter -= LR * m / (v.sqrt() + 1e-8)


def mix(theta, state, mixing):
    before = {name: [parameter.detach().clone() for parameter in theta[name].parameters()] for name in SIZES}
    states = {name: [dict(moments) for moments in some] for name, some in state.items()}
    for name, shares in zip(SIZES, mixing, strict=True):
        for i, parameter in enumerate(theta[name].parameters()):
            parameter.data.copy_(sum(share * before[other][i] for share, other in zip(shares, SIZES, strict=True)))
        for i, kept in enumerate(state.get(name, [])):
            for key in kept:
                kept[key] = sum(share * states[other][i][key] for share, other in zip(shares, SIZES, strict=True))
            kept["t"] = float(np.rint(kept["t"]))


def assert_state_close(state, module):
    for name, value in module.state_dict().items():
        torch.testing.assert_close(
            torch.from_numpy(state[name]), value, rtol=0, atol=5e-5
        )  # Adam enlarges rounding errors


@pytest.mark.sampled(1, "rule")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("topology", GRAPHS)
def test_proxyfl_is_a_slow_twin(shards, topology, rule, optimizer):
    folder, data = shards
    options = [f"proxy-optimizer={rule}", f"topology={topology}", *OPTIMIZERS[optimizer], *OPTIONS]
    ran = run(folder, "strategy=proxyfl", *options, names=SIZES)
    phi, theta = twin(data, GRAPHS[topology], optimizer, rule, ("model", "proxy"))
    for name in SIZES:
        assert_state_close(ran.private(name, ROUNDS), phi[name])
        assert_state_close(parted(ran.model(name, ROUNDS)[0])[0], theta[name])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("rule", RULES)
def test_fml_is_a_slow_twin(shards, rule, optimizer):
    folder, data = shards
    options = [f"proxy-optimizer={rule}", *OPTIMIZERS[optimizer], *OPTIONS]
    ran = run(folder, "strategy=fml", *options, names=SIZES)
    shares = [n / sum(SIZES.values()) for n in SIZES.values()]
    phi, theta = twin(data, [shares, shares], optimizer, rule, ("private", "model"))
    assert_state_close(load_file(ran.folder / "models" / "global.safetensors"), theta["a"])
    for name in SIZES:
        assert_state_close(ran.private(name, ROUNDS), phi[name])


def test_the_three_rules_differ(shards):
    options = ["strategy=fml", "optimizer=adam", *OPTIONS]
    runs = [run(shards[0], *options, f"proxy-optimizer={rule}", names=SIZES) for rule in RULES]
    models = [load_file(ran.folder / "models" / "global.safetensors") for ran in runs]
    for left, right in ((0, 1), (0, 2), (1, 2)):
        assert max(abs(models[left][name] - models[right][name]).max() for name in models[0]) > 1e-3


@pytest.mark.parametrize(("strategy", "stage"), [("proxyfl", "train-proxy"), ("fml", "train-mutually")])
def test_only_the_proxys_optimizer_leaves_and_it_is_declared(shards, strategy, stage):
    options = ["proxy-optimizer=travels", "optimizer=adam", "private-models=[lenet5]", "beta=0", "rounds=2"]
    ran = run(shards[0], f"strategy={strategy}", *options, "sigma=2", "delta=0.01", names=SIZES)
    assert not ran.result["failures"]
    for _, reply in ran.grid.of(stage):
        theta, state = parted(reply.content["arrays"])
        shapes = [array.shape for array in theta.values()]
        slots = {f"{i}.{slot}" for i in range(len(shapes)) for slot in ("step", "exp_avg", "exp_avg_sq")}
        assert state.keys() == slots
        assert [state[f"{i}.exp_avg"].shape for i in range(len(shapes))] == shapes
    up = [entry for entry in ran.ledger if entry["stage"] == stage and entry["direction"] == "up"]
    assert {entry["field"] for entry in up if entry["kind"] == "model"} == {"arrays"}
    assert all(entry["protection"].endswith("-DP") for entry in up if entry["kind"] == "model")
    plain = run(shards[0], f"strategy={strategy}", *options[1:], "sigma=2", "delta=0.01", names=SIZES)
    before = next(entry["bytes"] for entry in plain.ledger if entry["field"] == "arrays" and entry["stage"] == stage)
    assert 2 < next(entry["bytes"] for entry in up if entry["field"] == "arrays") / before < 5  # small arrays' headers


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["proxyfl", "fml"])
def test_a_resumed_run_has_the_same_bits(shards, strategy):
    options = [f"strategy={strategy}", "proxy-optimizer=travels", "optimizer=adam", "topology=complete", *OPTIONS]
    options = [words for words in options if strategy == "proxyfl" or "topology" not in words]
    whole, resumed = run(shards[0], *options, names=SIZES), broken(shards[0], *options, names=SIZES, stop_after=2)
    for name in SIZES:
        assert same(whole.private(name, ROUNDS), resumed.private(name, ROUNDS))
        if strategy == "proxyfl":
            assert same(whole.model(name, ROUNDS)[0], resumed.model(name, ROUNDS)[0])
    assert whole.result["final"] == resumed.result["final"]


def test_a_proxy_that_rests_passes_its_state_on(shards):
    options = ["strategy=proxyfl", "proxy-optimizer=travels", "optimizer=adam", "beta=0", "sigma=2", "delta=0.01"]
    free = run(shards[0], *options, "rounds=4", names=SIZES)
    least = min(account["epsilon"] for account in free.result["privacy"].values())
    ran = run(shards[0], *options, "rounds=4", f"epsilon={least * 0.75}", names=SIZES)
    assert not ran.result["failures"]
    assert same(ran.model("a", 3)[0], ran.model("a", 4, "released")[0])


def spoil_released_state(stage, change):
    """Change the state that b releases."""

    def after(grid, message, reply):
        if message.content["config"].get("stage") == stage and grid.name_of(message.metadata.dst_node_id) == "b":
            arrays = dict(opened(reply.content["arrays"]))
            change(arrays)
            reply.content["arrays"] = array_record(arrays)

    return after


STATE = "proxy-optimizer.0."
SPOILT = {
    "of another shape": lambda arrays: arrays.update({f"{STATE}exp_avg": np.zeros(3, np.float32)}),
    "missing": lambda arrays: arrays.pop(f"{STATE}exp_avg"),
    "one more": lambda arrays: arrays.update({"proxy-optimizer.99.exp_avg": np.zeros(3, np.float32)}),
    "no number": lambda arrays: arrays.update({f"{STATE}exp_avg": np.full_like(arrays[f"{STATE}exp_avg"], np.nan)}),
    "negative": lambda arrays: arrays.update({f"{STATE}exp_avg_sq": arrays[f"{STATE}exp_avg_sq"] - 1}),
}


@pytest.mark.sampled(1, "how")
@pytest.mark.parametrize(("strategy", "stage"), [("proxyfl", "train-proxy"), ("fml", "train-mutually")])
@pytest.mark.parametrize("how", SPOILT)
def test_a_spoilt_state_is_its_senders_failure(shards, strategy, stage, how):
    options = [f"strategy={strategy}", "proxy-optimizer=travels", "optimizer=adam", *OPTIONS]
    ran = run(shards[0], *options, names=SIZES, after=spoil_released_state(stage, SPOILT[how]))
    assert {(failure["institution"], failure["round"]) for failure in ran.result["failures"]} == {
        ("b", exchange) for exchange in range(1, ROUNDS + 1)
    }
    assert np.isfinite(ran.result["final"]["global"]["loss"])


def test_what_contradicts_is_refused():
    with pytest.raises(ConfigError, match="proxy-optimizer=travels with optimizer-state=reset"):
        MutualConfig(proxy_optimizer="travels", optimizer_state="reset")
    with pytest.raises(ConfigError, match=r"strategy\.proxy-optimizer must be one of stays, travels, reset"):
        MutualConfig(proxy_optimizer="moves")
    plain = compose(["optimizer=sgd", "momentum=0"]).training
    with pytest.raises(ConfigError, match="momentum=0 has none"):
        check_pair(FMLConfig(proxy_optimizer="travels"), Settings(training=plain))
    check_pair(FMLConfig(proxy_optimizer="reset"), Settings(training=plain))
    with pytest.raises(ConfigError, match="give Settings"):
        first_state(FMLConfig(proxy_optimizer="travels"), Settings())
