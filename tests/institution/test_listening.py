"""listen=pool: the private model never sees what is held out, and the pool's weights come from there alone."""

import numpy as np
import pytest
import torch
from harness import same
from hostile_server import HostileServer, refusal
from peers import JOB, N, hospitals, run
from safetensors.numpy import load_file
from sealed_runs import pinned_keys
from torch.nn import functional

from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError
from flwr_replay.learning.pooling import OTHERS, OWN, Pool, weights_of
from flwr_replay.learning.training import batches, torch_rng
from flwr_replay.models.zoo import backbone
from flwr_replay.payloads.fedreplay import EvaluatePooled
from flwr_replay.payloads.mutual import EvaluatePair, EvaluateWithProxy
from flwr_replay.privacy.claims import sentence
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.rng import derived_seed
from flwr_replay.wire.weights import load_arrays

POOL = ["beta=0", "alpha=0", "listen=pool", "holdout=0.25", "private-epochs=2", "private-batch-size=10", "dp=none"]
OWN_MODEL = ["strategy=fedreplay", "encoder=random", "listen=pool", "holdout=0.25", "own_epochs=2", "momentum=0"]
HELD = N // 4


def held_rows(name):
    return torch.randperm(N, generator=torch_rng(0, name, "held-out"))[:HELD]


@pytest.mark.parametrize("strategy", ["proxyfl", "fml"])
def test_a_private_model_learns_from_labels_of_all_that_is_not_held_out(tmp_path, strategy):
    data = hospitals(tmp_path)
    ran = run(tmp_path, f"strategy={strategy}", *POOL, "momentum=0")
    config = compose([*JOB, f"strategy={strategy}", *POOL])
    purpose = "model" if strategy == "proxyfl" else "private"
    for name, (x, y) in data.items():
        kept = np.setdiff1d(np.arange(N), held_rows(name).numpy())
        phi, x, y = backbone(config.model, config.task)(derived_seed(0, purpose)), x[kept], y[kept]
        for t in (1, 2):
            shuffle = torch_rng(0, name, t, "private")
            for _ in range(2):
                descend(phi, batches(x, y, 10, shuffle))
        private = ran.private(name, 2)
        for key, value in phi.state_dict().items():
            np.testing.assert_allclose(private[key], value.numpy(), atol=2e-6)


def descend(phi, drawn):
    for x_B, y_B in drawn:
        phi.zero_grad()
        functional.cross_entropy(phi(x_B), y_B).backward()
        with torch.no_grad():
            for parameter in phi.parameters():
                parameter -= 0.05 * parameter.grad


def test_beside_fedreplay_an_own_model_learns_once_and_nothing_of_it_leaves(tmp_path):
    data, config = hospitals(tmp_path), compose([*JOB, *OWN_MODEL])
    ran = run(tmp_path, *OWN_MODEL)
    for name, (x, y) in data.items():
        kept = np.setdiff1d(np.arange(N), held_rows(name).numpy())
        phi = backbone(config.model, config.task)(derived_seed(0, "own"))
        for epoch in (0, 1):
            descend(phi, batches(x[kept], y[kept], config.training.batch_size, torch_rng(0, name, "own", epoch)))
        private = ran.private(name, 1)  # of the first test; the second finds it
        for key, value in phi.state_dict().items():
            np.testing.assert_allclose(private[key], value.numpy(), atol=2e-6)
    up = [line for line in ran.ledger if line["direction"] == "up" and line["stage"] == "evaluate-pooled"]
    assert len({line["institution"] for line in up}) == len(data)
    assert {line["kind"] for line in up} == {"statistic"}


DRAWN = [*JOB, *OWN_MODEL[2:], "strategy=fedreplay", "latents=drawn", "model.train=head"]
ASKED = {"run": "r", "exchange": 1, "holdout": 0.25, "listen": "pool", "own_epochs": 2}


@pytest.mark.parametrize("held_out", [0, 4])
def test_under_masks_no_test_depends_on_single_training_examples(tmp_path, monkeypatch, held_out):
    """By weights that always answer one class, a server would learn which of these most of those held out have."""
    hospitals(tmp_path, "abc")
    monkeypatch.setattr("flwr_replay.data.datasets._held_out", lambda train: np.arange(len(train)) < held_out)
    server = HostileServer(tmp_path, *DRAWN, "masked=true", "split=validation", **pinned_keys(tmp_path, "abc")["a"])
    told = refusal(server.send(EvaluatePooled(arrays=server.weights, **ASKED)))
    assert ("depend on single training examples; the run is masked" in told) == (not held_out)
    with pytest.raises(ConfigError, match="under masks by none of training; got split=test"):
        compose([*DRAWN, "masked=true"])


def test_no_epsilon_is_said_to_cover_tests_of_an_own_model(tmp_path):
    hospitals(tmp_path, "a")
    noisy = [*DRAWN, "dp=statistics", "target-epsilon=2", "delta=0.001"]
    for listen in ("none", "pool"):
        claim = sentence(PrivacyPlan.of(compose([*noisy, f"listen={listen}"])), {})
        assert claim.startswith("All that leaves")
        assert ("own model, which never leaves and is trained without noise" in claim) == (listen == "pool")
    server = HostileServer(tmp_path, *noisy, policy="max-epsilon: 8\nmax-delta: 0.01\n")
    assert "no differential privacy" in refusal(server.send(EvaluatePooled(arrays=server.weights, **ASKED)))


@pytest.mark.parametrize("options", [["strategy=proxyfl", *POOL, "topology=complete"], OWN_MODEL])
def test_what_is_tested_is_the_pool_that_fits_what_is_held_out(tmp_path, options):
    data, replays = hospitals(tmp_path), options is OWN_MODEL
    ran = run(tmp_path, *options)
    fresh = backbone(*(getattr(compose([*JOB]), section) for section in ("model", "task")))
    right = 0
    for name, (x, y) in data.items():
        phi, theta, held = fresh(0), fresh(0), held_rows(name)
        load_arrays(phi, ran.private(name, 1 if replays else 2))
        load_arrays(
            theta, load_file(ran.folder / "models" / "global.safetensors") if replays else ran.model(name, 2)[0]
        )
        with torch.no_grad():
            a, b = weights_of(phi(x[held]), theta(x[held]), y[held])
            shard = np.load(tmp_path / f"{name}.npz")
            x_test = torch.from_numpy(shard["test_images"]).view(-1, 1, 8, 8).float() / 255
            answers = (a * phi(x_test) + b * theta(x_test)).argmax(1).numpy()
        right += int((answers == shard["test_labels"].ravel()).sum())
    total = sum(len(np.load(tmp_path / f"{name}.npz")["test_labels"]) for name in data)
    assert ran.result["final"]["global"]["accuracy"] == pytest.approx(right / total)


def test_with_a_validation_split_nothing_is_held_out(tmp_path):
    hospitals(tmp_path, "ab")
    for name in "ab":
        arrays = dict(np.load(tmp_path / f"{name}.npz"))
        arrays |= {"val_images": arrays["test_images"], "val_labels": arrays["test_labels"]}
        np.savez(tmp_path / f"{name}.npz", **arrays)
    ran = run(tmp_path, "strategy=proxyfl", *POOL, names="ab")
    other = run(tmp_path, "strategy=proxyfl", *POOL, "holdout=0.5", names="ab")
    assert same(ran.private("a", 2), other.private("a", 2))


def test_a_pool_is_right_as_often_as_its_better_half_and_then_of_the_least_loss():
    rng = torch.Generator().manual_seed(0)
    sacrificed = 0  # cases in which the least loss of all has fewer right answers than one half alone
    for _ in range(100):
        y = torch.randint(3, (30,), generator=rng)
        f, h = (
            4 * functional.one_hot(y, 3) * torch.rand(30, 1, generator=rng) + torch.randn(30, 3, generator=rng),
            torch.randn(30, 3, generator=rng),
        )  # one knows something
        pools = {(a, b): a * f + b * h for a in OWN for b in OTHERS if a or b}
        hits = {weights: int((pool.argmax(1) == y).sum()) for weights, pool in pools.items()}
        losses = {weights: float(functional.cross_entropy(pool, y)) for weights, pool in pools.items()}
        better = max(int((half.argmax(1) == y).sum()) for half in (f, h))
        chosen = weights_of(f, h, y)
        assert hits[chosen] >= better
        assert losses[chosen] == min(losses[weights] for weights in pools if hits[weights] >= better)
        sacrificed += hits[min(losses, key=losses.get)] < better
    assert sacrificed  # so the test would fail for the least loss of all


def test_a_pool_can_be_the_other_classifier_alone():
    y = torch.arange(30) % 3
    wrong, right = functional.one_hot((y + 1) % 3, 3).float(), functional.one_hot(y, 3).float()
    a, b = weights_of(wrong, right, y)
    x, own, other = torch.randn(4, 5), torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    assert a == 0
    assert torch.equal(Pool(own, other, (a, b))(x), b * other(x))


def test_a_pool_without_the_other_is_the_classifier_itself():
    x, own, other = torch.randn(4, 5), torch.nn.Linear(5, 3), torch.nn.Linear(5, 3)
    assert torch.equal(Pool(own, other, (1.0, 0.0))(x), own(x))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["listen=pool"], "set alpha=0 private-epochs=1"),
        (["listen=pool", "alpha=0"], "private-epochs=0: set alpha=0"),
        (["listen=pools"], "did you mean pool"),
        (["holdout=1"], "strategy.holdout is a share between 0 and 1; got 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        compose(["strategy=proxyfl", *options])


def test_numbers_are_not_pooled():
    with pytest.raises(ConfigError, match="pools probabilities of classes; got task=diabetes"):
        compose(["strategy=fedreplay", "listen=pool", "task=diabetes", "model=mlp"])


@pytest.mark.parametrize(
    ("options", "request_type"),
    [
        (["strategy=proxyfl", *POOL], EvaluatePair),
        (["strategy=fml", *POOL], EvaluateWithProxy),
        (OWN_MODEL, EvaluatePooled),
    ],
)
def test_a_server_cannot_choose_another_way_to_listen(tmp_path, options, request_type):
    hospitals(tmp_path, "a")
    server = HostileServer(tmp_path, *JOB, *options)
    arrays = {} if request_type is EvaluatePair else {"arrays": server.weights}
    arrays |= {"own_epochs": 2} if options is OWN_MODEL else {}
    reply = server.send(request_type(run="r", exchange=1, listen="loss", holdout=0.25, **arrays))
    assert "strategy.listen is 'pool', it asks for loss" in refusal(reply)
    reply = server.send(request_type(run="r", exchange=1, listen="pool", holdout=0.9, **arrays))
    assert "strategy.holdout is 0.25, it asks for 0.9" in refusal(reply)
    if options is OWN_MODEL:
        asked = {"run": "r", "exchange": 1, "holdout": 0.25, "arrays": server.weights}
        assert "asks for 3" in refusal(server.send(EvaluatePooled(**asked, listen="pool", own_epochs=3)))
        alone = HostileServer(tmp_path, *JOB, *OWN_MODEL, "listen=none")
        assert "listen is 'none'" in refusal(alone.send(EvaluatePooled(**asked, listen="pool", own_epochs=2)))
        assert "pooled with listen=pool" in refusal(alone.send(EvaluatePooled(**asked, listen="none", own_epochs=2)))
        strict = HostileServer(tmp_path, *JOB, *OWN_MODEL, policy="max-epsilon: 8\nmetrics: exact\n")
        asked |= {"run": "strict", "listen": "pool", "own_epochs": 2}
        assert "policy asks for epsilon <= 8; PersonalEvaluation." in refusal(strict.send(EvaluatePooled(**asked)))
