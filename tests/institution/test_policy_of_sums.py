"""A policy's max-epsilon and sums with noise: the whole of what leaves is covered, or it is refused."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from harness import write_shards
from hostile_server import HostileServer, metrics, refusal, weights
from sealed_runs import pinned_keys

from flwr_replay.config.compose import compose
from flwr_replay.config.sections import TrainingConfig
from flwr_replay.errors import ConfigError
from flwr_replay.payloads.common import Evaluate, RollCall, Train
from flwr_replay.payloads.fedsgd import Differentiate
from flwr_replay.payloads.fedstats import Summarise
from flwr_replay.payloads.mutual import EvaluateWithProxy, TrainMutually
from flwr_replay.privacy.claims import sentence
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.strategies.fml import FMLConfig
from flwr_replay.wire.records import config_in

POLICY = "max-epsilon: 2\nmax-delta: 0.001\n"
DATA = ["task=medmnist", "split=test", "task.size=8", "classes=3", "model=mlp", "model.width=6", "device=cpu"]
JOB = [*DATA, "strategy=fedsgd", "dp=gradient", "delta=0.001"]
SUMS = [*DATA, "strategy=fedstats", "dp=statistics", "delta=0.001", "privacy.target-epsilon=2"]
UPDATES = [*DATA, "strategy=fedavg", "dp=update", "delta=0.001", "privacy.target-epsilon=2", "rounds=4"]
PROXIES = [*UPDATES, "strategy=fml", "private-epochs=1"]
PAIR = FMLConfig(private_epochs=1).instructions(TrainingConfig(), 0.05) | {"private_seed": 1, "lr": 0.05}
KINDS = {"fedsgd": (Differentiate, {}), "fedstats": (Summarise, {"clip": 10.0})}
KINDS |= {"fedavg": (Train, {"lr": 0.05}), "fml": (TrainMutually, PAIR)}
SHARED = ["nodes=4", "masked=true", "noise=shared", "privacy.dropouts=1", "privacy.colluders=0"]
SAME = {"proof", "pins"}  # of keys, not of data


def reply_to(folder, *options, **own):
    write_shards(folder, dict.fromkeys("abcd", 40))
    server = HostileServer(folder, *JOB, *options, policy=POLICY, **own)
    called = server.send(RollCall(strategy="fedsgd", run="r", stages=["differentiate", "evaluate"]))
    asked = {"total": 160, "cohort": ["a", "b", "c"]} if server.config.masked else {}
    return called, server.send(Differentiate(arrays=server.weights, run="r", exchange=1, **asked))


@pytest.mark.parametrize("noise", [[], SHARED], ids=["each", "shared"])
def test_a_budget_within_it_is_accepted(tmp_path, noise):
    own = pinned_keys(tmp_path, "abcd")["a"] if noise else {}
    called, answered = reply_to(tmp_path, "privacy.target-epsilon=2", *noise, **own)
    assert not refusal(called)
    assert not refusal(answered)
    assert weights(answered)


@pytest.mark.parametrize(
    "options",
    [
        ["privacy.target-epsilon=2.1"],
        ["privacy.sigma=5"],
        ["privacy.target-epsilon=2", "forgetting=true"],
        ["privacy.target-epsilon=2", "external=true"],
        ["privacy.target-epsilon=2", "noise=seeded"],
        ["privacy.target-epsilon=2", "task.kind=regression", "classes=1"],
        ["dp=none"],
    ],
    ids=["large", "no budget", "training is tested", "others' classes", "no secret", "sums of labels", "no noise"],
)
def test_anything_else_is_refused_before_anything_leaves(tmp_path, options):
    for reply in reply_to(tmp_path, *options):
        assert "policy asks for epsilon <= 2" in refusal(reply)
        assert not weights(reply)


@pytest.mark.parametrize("task", ["digits", "diabetes", "boneage", "isbi2012", "brats", "retina", "isic"])
def test_regressions_and_segmentations_are_never_whole(task):
    config = compose([f"task={task}", "strategy=fedsgd", "dp=gradient"])
    assert config.end_to_end == (config.task.kind == "classification")
    assert config.end_to_end == PrivacyPlan.of(config).end_to_end


def test_with_a_public_range_a_regression_is_whole_at_the_epsilon_of_one_gaussian():
    config = compose(["task=diabetes", "task.label-range=[25,346]", *SUMS[-4:]])
    plan, pld = PrivacyPlan.of(config), PLDAccountant()
    assert config.end_to_end
    assert plan.end_to_end
    pld.compose(dp_accounting.GaussianDpEvent(plan.share("statistics", 300)))
    stated, delta = plan.planned(300)
    assert stated <= 2 < 1.01 * pld.get_epsilon(delta) < 2.03  # theirs is rounded up to its grid


@pytest.mark.parametrize("beta", [0, 0.5, 1])
def test_of_whole_updates_an_epsilon_is_proven_for_any_beta_but_not_of_tests_of_private_models(tmp_path, beta):
    options = [*PROXIES, f"beta={beta}"]
    plan = PrivacyPlan.of(compose(options))
    assert (plan.end_to_end, plan.unproven) == (True, "")
    assert "own model, which never leaves and is trained without noise" in sentence(plan, {})
    assert "not a proof" in PrivacyPlan.of(compose([*options, "dp=proxy"])).mechanism or not beta
    write_shards(tmp_path, {"a": 40})
    server = HostileServer(tmp_path, *options, policy=POLICY)
    assert weights(server.send(TrainMutually(arrays=server.weights, run="r", exchange=1, **PAIR | {"beta": beta})))
    tests = EvaluateWithProxy(arrays=server.weights, run="r", exchange=1)
    for request in (tests, RollCall(strategy="fml", run="r", stages=["train-mutually", "evaluate-with-proxy"])):
        assert "PairEvaluation.num_examples has no differential privacy" in refusal(server.send(request))


@pytest.mark.parametrize("replay", ["buffer", "vqvae2", "pixelcnn"])
def test_replays_beside_sums_are_refused_before_anything_is_claimed(replay):
    config = compose([*JOB, f"replay={replay}"])
    with pytest.raises(ConfigError, match=f"own examples, and no replayed ones; got replay={replay}: choose"):
        PrivacyPlan.of(config)


# --- what depends on training examples --------------------------------------------------------------------------------


def other_data(folder):
    """Give hospital a other training images: all of one class, which no class of the run is, and flat."""
    with np.load(folder / "a.npz") as file:
        arrays = dict(file)
    arrays["train_images"] = np.full_like(arrays["train_images"], 255)
    arrays["train_images"][::2] = 0
    arrays["train_labels"] = np.full_like(arrays["train_labels"], 200)
    np.savez(folder / "a.npz", **arrays)


def everything(folder, options, asked, own):
    """Return all but noisy arrays that a hospital sends to a server that asks for what it likes."""
    server = HostileServer(folder, *options, policy=POLICY, **own)
    large = {name: (1e5 * of).astype(of.dtype) for name, of in server.weights.items()}
    none = {name: np.full_like(of, np.nan) for name, of in server.weights.items()}
    strategy = server.config.strategy
    kind, more = KINDS[strategy.name]
    messages = [RollCall(strategy=strategy.name, run="r", stages=[kind.stage_name, "evaluate"])]
    for at, theta in enumerate([server.weights, large, none, server.weights, server.weights], 1):
        messages.append(kind(arrays=theta, run="r", exchange=at, **more, **asked))
    messages += [messages[2], kind(arrays=server.weights, run="other", exchange=1, **more, **asked)]
    for split in ("test", "validation", "train", "external"):
        messages.append(Evaluate(arrays=server.weights, run="r", exchange=9, split=split))
    told = []
    for reply in map(server.send, messages):
        assert not reply.has_error()
        shapes = {name: (array.shape, array.dtype) for name, array in weights(reply).items()}
        notes = {name: value for name, value in config_in(reply.content).items() if name not in SAME}
        told.append((shapes, metrics(reply), notes))
    return told


@pytest.mark.parametrize("noise", [[], SHARED], ids=["each", "shared"])
@pytest.mark.parametrize(
    "options",
    [[*JOB, "privacy.target-epsilon=2", "rounds=4"], SUMS, UPDATES, PROXIES],
    ids=["sgd", "stats", "updates", "proxies"],
)
def test_nothing_beside_the_noisy_sums_depends_on_training_examples(tmp_path, noise, options):
    """Neither a count, nor an epsilon, nor a line of refusal differs between data that have nothing in common."""
    told, asked = [], {"total": 160, "cohort": ["a", "b", "c"]} if noise else {}
    for name in ("one", "other"):
        folder = tmp_path / name
        folder.mkdir()
        write_shards(folder, dict.fromkeys("abcd", 40))
        if name == "other":
            other_data(folder)
        told.append(everything(folder, [*options, *noise], asked, pinned_keys(folder, "abcd")["a"] if noise else {}))
    assert repr(told[0]) == repr(told[1])
    assert sum(bool(shapes) for shapes, _, _ in told[0]) >= 3
    assert sum("failure" in notes for _, _, notes in told[0]) >= 4
    assert all(math.isfinite(of.get("epsilon", 0)) and of.get("epsilon", 0) <= 2 for _, of, _ in told[0])
