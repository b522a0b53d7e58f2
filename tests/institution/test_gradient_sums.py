"""What one example changes in the sums of dp=gradient: at most C, whatever weights and images are; and that it runs."""

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from harness import SHARDS, write_shards
from hostile_server import HostileServer, drawn_at, metrics, refusal, weights
from PIL import Image
from torch.nn.functional import cross_entropy

from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import ConfigError
from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.models.zoo import backbone
from flwr_replay.payloads.fedsgd import Differentiate
from flwr_replay.privacy import dpsgd
from flwr_replay.privacy.dpsgd import refuse_chance
from flwr_replay.report.progress import Display

N, C = 40, 0.5
SMALL = [*SHARDS, "classes=3", "device=cpu", "strategy=fedsgd", "momentum=0"]
NOISY = [*SMALL, "dp=gradient", "delta=0.001", f"privacy.clip={C}", "privacy.sigma=1", "rounds=4"]


def ask_gradient_sums(server, run="r", change=None, **other):
    arrays = {**server.weights, **(change or {})}
    return server.send(Differentiate(arrays=arrays, run=run, **{"exchange": 1, "total": 3 * N} | other))


def exact(self, mechanism, sums, step, stream):
    """Return the sums without their noise, in units of C; only for tests."""
    return {name: of.numpy() for name, of in sums.items()}


@pytest.fixture
def noiseless(monkeypatch):
    monkeypatch.setattr(PrivacyBudget, "noisy", exact)


@pytest.mark.parametrize("memory", [2**28, 10_000])
@pytest.mark.parametrize("model", [["model=mlp", "model.width=6"], ["model=cnn", "model.width=4", "model.norm=group"]])
def test_the_sum_is_that_of_a_slow_loop_over_examples(tmp_path, noiseless, monkeypatch, model, memory):
    monkeypatch.setattr(dpsgd, "MEMORY", memory)
    x_N, y_N = write_shards(tmp_path, {"a": N})["a"]
    server = HostileServer(tmp_path, *NOISY, *model)
    net = backbone(server.config.model, server.config.task)(0).double()
    slow, clipped = {name: torch.zeros_like(p) for name, p in net.named_parameters()}, 0
    for x, y in zip(x_N.double(), y_N.long(), strict=True):
        gradients = torch.autograd.grad(cross_entropy(net(x[None]), y[None]), list(net.parameters()))
        scale = min(1.0, C / torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients])).item())
        clipped += scale < 1
        for total, gradient in zip(slow.values(), gradients, strict=True):
            total += scale * gradient
    reply = ask_gradient_sums(server)
    assert clipped > 0
    assert weights(reply).keys() == slow.keys()
    for name, noisy in weights(reply).items():
        np.testing.assert_allclose(noisy * C, slow[name].numpy(), rtol=2e-5, atol=1e-9)
    assert metrics(reply).keys() == {"num-examples", "examples-seen", "num-steps", "epsilon", "delta"}  # no loss


def test_noise_has_the_standard_deviation_that_was_charged(tmp_path):
    write_shards(tmp_path, {"a": N})
    server = HostileServer(tmp_path, *NOISY, "model=mlp", "model.width=64")
    first, second = (weights(ask_gradient_sums(server, run)) for run in "rs")
    noise = np.concatenate([(first[name] - second[name]).ravel() for name in first]) * N / 2**0.5
    assert noise.std() == pytest.approx(C, rel=0.05)
    assert server.charges("r")[0]["rate"] == server.charges("r")[0]["sigma"] == 1


@pytest.mark.parametrize("left", ["first", "last"])
@pytest.mark.parametrize("memory", [2**28, 3 * 8 * 8515])  # the latter: the gradients of 3 examples
def test_weights_cannot_make_one_example_show_in_the_gradients_of_others(
    tmp_path, noiseless, monkeypatch, left, memory
):
    """Sums that cancel leave rounding errors, of float64 too, which the next layer makes as large as the whole."""
    monkeypatch.setattr(dpsgd, "MEMORY", memory)
    rng, answers, many, width = np.random.default_rng(3), [], 256, 64
    big = rng.random((width, width // 2)) * 1e6
    first, second = np.zeros((width, 64)), [rng.permutation(row) for row in np.hstack([big, -big])]
    first[:, 0] = 1e6
    change = {"hidden1.fc.weight": first, "hidden2.fc.weight": second, "head.fc.weight": rng.normal(size=(3, 64)) * 2e5}
    change |= {f"{layer}.fc.bias": np.zeros(width) for layer in ("hidden1", "hidden2")}
    change = {name: np.float32(of) for name, of in change.items()}
    write_shards(tmp_path, {"a": many})
    arrays, draws = dict(np.load(tmp_path / "a.npz")), torch.from_numpy(rng.random(many))
    for gone in range(2):
        kept = slice(gone, many) if left == "first" else slice(many - gone)
        (hospital := tmp_path / f"without {gone}").mkdir()
        np.savez(hospital / "a.npz", **{name: of[kept] if "train" in name else of for name, of in arrays.items()})
        monkeypatch.setattr(
            "flwr_replay.clients.fedsgd.drawn_places",
            lambda n, size, stream, own=draws[kept]: drawn_at(own, n, size, stream),
        )
        server = HostileServer(hospital, *NOISY, "model=mlp", f"model.width={width}")
        sums = weights(ask_gradient_sums(server, change=change))
        answers.append(np.concatenate([of.ravel() for of in sums.values()]))
    assert np.linalg.norm(answers[0]) > 2
    assert all(np.linalg.norm(b - a) <= 1 + 1e-6 for a, b in pairwise(answers))


@pytest.mark.parametrize("value", [9e5, 1e-30, 0.0])
def test_gradients_that_are_not_finite_or_tiny_stay_within_the_clip(tmp_path, noiseless, value):
    write_shards(tmp_path, {"a": N})
    server = HostileServer(tmp_path, *NOISY, "model=cnn", "model.width=4", "model.norm=group")
    sums = weights(
        ask_gradient_sums(server, change={name: np.full_like(of, value) for name, of in server.weights.items()})
    )
    whole = np.concatenate([of.ravel() for of in sums.values()])
    assert np.isfinite(whole).all()
    assert np.linalg.norm(whole) <= N


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model=resnet34", "model.width=2"], "no layer may mix examples.*choose group norm"),
        (["model=mlp", "training.augment=flip"], "takes each image once, as it is: set training.augment=none"),
        (["model=mlp", "replay=vqvae2"], "choose replay=none"),
        (["model=mlp", "privacy.noise=shared", "masked=true", "privacy.sigma=1e6"], "leaves no room for"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line_and_costs_nothing(tmp_path, options, message):
    job = [*NOISY, "task=digits", "task.classes=10", "nodes=4", *options, f"runs_dir={tmp_path}"]
    with pytest.raises(ConfigError, match=message):
        run_inline(job, Display())


def test_who_asks_again_gets_the_same_bytes_and_other_weights_cost_as_much_again(tmp_path):
    write_shards(tmp_path, {"a": N})
    server = HostileServer(tmp_path, *NOISY, "model=mlp", "model.width=6")
    replies = [
        ask_gradient_sums(server),
        ask_gradient_sums(server),
        ask_gradient_sums(server, change={"head.fc.bias": np.ones(3, np.float32)}),
        ask_gradient_sums(server),
    ]
    first, again, other, last = map(weights, replies)
    assert all(first[name].tobytes() == again[name].tobytes() for name in first)
    for later in (other, last):  # the last: only the newest request's are kept
        assert all((first[name] != later[name]).any() for name in first)
    assert [charge["steps"] for charge in server.charges("r")] == [1, 0, 1, 1]
    told = [metrics(reply)["epsilon"] for reply in replies]
    assert told == sorted(told)


def test_an_institution_refuses_batch_norm_before_it_is_charged(tmp_path):
    write_shards(tmp_path, {"a": N})
    server = HostileServer(tmp_path, *NOISY, "model=resnet34", "model.width=2")
    assert refusal(ask_gradient_sums(server))
    assert not server.charges("r")


def test_a_layer_that_drops_out_is_refused():
    """Its draws are PyTorch's, which are no secret, and each row's hang on the rows before."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    with pytest.raises(ConfigError, match="drops nothing by chance; 1 is a Dropout: leave it out"):
        refuse_chance(net)
    refuse_chance(torch.nn.Sequential(torch.nn.Dropout(0.0), torch.nn.Linear(2, 2)))


def masks(folder):
    """Write a segmentation task of six images; return its options."""
    rng = np.random.default_rng(0)
    for number in range(15):
        image, mask = rng.integers(0, 256, (16, 16)), np.zeros((16, 16))
        mask[:, :8], image[:, :8] = 255, image[:, :8] // 4
        for what, pixels in (("image", image), ("label", mask)):
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{what}_{number:02d}.png")
    unet = ["model=unet", "model.width=2", "model.norm=group", "nodes=3", "partition=iid", "lr=0.1"]
    return ["task=isbi2012", f"task.data-dir='{folder}'", "task.size=16", *unet, "delta=0.01"]


@pytest.mark.parametrize(
    "job",
    [
        ["task=diabetes", "model=mlp", "nodes=3", "lr=0.1"],
        ["task=digits", "model=gabor", "nodes=4", "lr=0.5", "privacy.noise=shared", "masked=true"],
        masks,
    ],
)
def test_a_regression_a_head_and_a_segmentation_learn(tmp_path, job):
    options = ["delta=1e-5", *(job(tmp_path) if callable(job) else job), "strategy=fedsgd", "device=cpu", "rounds=5"]
    options += [
        "dp=gradient",
        "privacy.target-epsilon=100",
        "split=test",
        "momentum=0",
        f"runs_dir={tmp_path / 'runs'}",
    ]
    result, folder = run_inline(options, Display())
    assert all(99 < of["epsilon"] <= 100 for of in result["privacy"].values())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["value"] for row in rows if row["metric"] == "loss" and not row["institution"]]
    assert losses[-1] < losses[0]
