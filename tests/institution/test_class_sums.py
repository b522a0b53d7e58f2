"""What one patient changes in an institution's class sums: at most 1, whatever the weights, images and labels are."""

from collections import defaultdict
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from harness import SHARDS, write_shards
from hostile_server import HostileServer, drawn_at, refusal, weights
from PIL import Image

from flwr_replay.clients.fedstats import groups
from flwr_replay.data.datasets import load
from flwr_replay.learning.heads import features_of
from flwr_replay.models.layers import as_input
from flwr_replay.models.zoo import backbone
from flwr_replay.payloads.fedsgd import Differentiate
from flwr_replay.payloads.fedstats import PRODUCTS, Summarise, pairs_of
from flwr_replay.privacy.sums import SHARE, class_sums, packed

WIDTH = 64
PLAIN = [*SHARDS, "classes=3", "model=mlp", f"model.width={WIDTH}", "device=cpu", "strategy=fedstats"]


def ask_class_sums(server, change=None, clip=10.0):
    arrays = {**server.weights, **(change or {})}
    products = pairs_of(arrays["head.fc.weight"].shape[1])
    reply = server.send(Summarise(arrays=arrays, run="sums", clip=clip, products=products))
    assert not refusal(reply)
    return weights(reply)


def sums_in(arrays, examples):
    """Return numbers, sums, and products, one after another, in units in which a patient adds at most 1."""
    names = "head.fc.bias", "head.fc.weight", PRODUCTS
    return np.concatenate([arrays[name].ravel() for name in names]).astype(np.float64) * examples


def added_by(features, labels):
    """Return what a patient with these features, of a norm of at most 1, adds before all is clipped; in loops."""
    rest = np.sqrt((1 - SHARE**2) / 2)
    numbers, sums_CF, products_FF = np.zeros(3), np.zeros((3, WIDTH)), np.zeros((WIDTH, WIDTH))
    for f, label in zip(features, labels, strict=True):
        numbers[label] += SHARE
        sums_CF[label] += rest * f
        products_FF += rest * np.outer(f, f)
    assert np.linalg.norm(packed(torch.from_numpy(products_FF))) == pytest.approx(
        np.linalg.norm(products_FF), rel=1e-12
    )
    pairs = [products_FF[i, j] * (1 if i == j else 2**0.5) for i in range(WIDTH) for j in range(i, WIDTH)]
    return np.concatenate([numbers, sums_CF.ravel(), pairs])


@pytest.mark.parametrize("width", [10, WIDTH])
@pytest.mark.parametrize("left", ["first", "last"])
def test_weights_cannot_make_one_patient_show_in_the_features_of_others(tmp_path, monkeypatch, width, left):
    """Sums that cancel, 1e12 times a pixel, leave rounding errors: of how many images pass at once, and of places."""
    rng, answers, many = np.random.default_rng(0), [], 40
    big = rng.random((width, width // 2)) * 1e6
    layer, second = np.zeros((width, 64), np.float32), [rng.permutation(row) for row in np.hstack([big, -big])]
    layer[:, 0] = 1e6
    change = {"hidden1.fc.weight": layer, "hidden2.fc.weight": np.float32(second)}
    change |= {name: np.zeros(width, np.float32) for name in ("hidden1.fc.bias", "hidden2.fc.bias")}
    write_shards(tmp_path, {"a": many})
    arrays, draws = dict(np.load(tmp_path / "a.npz")), torch.from_numpy(rng.random(many))
    options = [f"model.width={width}", "dp=statistics", "delta=0.001", f"privacy.sigma={SIGMA}"]
    for gone in range(4):
        kept = slice(gone, many) if left == "first" else slice(many - gone)
        (hospital := tmp_path / f"without {gone}").mkdir()
        np.savez(hospital / "a.npz", **{name: of[kept] if "train" in name else of for name, of in arrays.items()})
        drawn = partial(drawn_at, draws[kept])
        monkeypatch.setattr("flwr_replay.clients.fedstats.drawn_places", drawn)
        answers.append(sums_in(ask_class_sums(HostileServer(hospital, *PLAIN, *options), change), many - gone))
    assert all(np.linalg.norm(b - a) <= 1 + 4 * SIGMA * a.size**0.5 for a, b in pairwise(answers))


COLUMN = ["P", "P", "P", "", "NA", "q/ 1", "P", "P", "P", "q/ 1"]
CLIP, SIGMA = 1e-2, 0.01


@pytest.fixture
def hospital(tmp_path):
    """Thirteen images, ten of them to train on; two patients have several, in an order of their own."""
    rng, labels = np.random.default_rng(0), [0, 1, 2, 0, 1, 2, 0, 0, 1, 1, 0, 1, 2]
    (tmp_path / "a.npz").mkdir()
    with open(tmp_path / "a.npz" / "manifest.csv", "w", encoding="utf-8") as file:
        print("image,label,patient,split", file=file)
        for n, label in enumerate(labels):
            Image.fromarray(rng.integers(0, 256, (8, 8), np.uint8)).save(tmp_path / "a.npz" / f"{n}.png")
            print(n, ".png,", label, ",", *(COLUMN[n : n + 1]), ",", "train" if n < 10 else "test", sep="", file=file)
    return tmp_path


@pytest.mark.parametrize("dp", [True, False])
def test_under_dp_all_images_of_a_patient_are_clipped_together(hospital, dp):
    under = ["dp=statistics", "delta=0.001", f"privacy.sigma={SIGMA}"] if dp else []
    server = HostileServer(hospital, "task=folder", "task.channels=1", *PLAIN[1:], f"strategy.clip={CLIP}", *under)
    reply, config = ask_class_sums(server, clip=CLIP), server.config
    train = load(replace(config.task, data_dir=str(hospital / "a.npz"))).train
    f_NF = features_of(backbone(config.model, config.task)(0), as_input(torch.from_numpy(train.x))).double().numpy()
    f_NF /= np.maximum(1, np.linalg.norm(f_NF, axis=1, keepdims=True) / CLIP)
    of = [patient if dp and patient not in ("", "NA") else n for n, patient in enumerate(COLUMN)]
    rows = [[n for n, other in enumerate(of) if other == patient] for patient in {*of}]
    own = [added_by(f_NF[some] / CLIP, train.y[some]) for some in rows]
    slow = sum(added / max(1, np.linalg.norm(added)) for added in own)
    assert len(own) == (4 if dp else 10)
    assert np.abs(sums_in(reply, 10) - slow).max() < (6 * SIGMA if dp else 1e-5)


@pytest.mark.parametrize("clip", [0.3, 100.0])
@pytest.mark.parametrize("model", [["model=mlp", f"model.width={WIDTH}"], ["model=gabor", "model.train=head"]])
def test_under_dp_the_gradient_of_a_patient_is_clipped_as_a_whole(hospital, model, clip):
    """Beside a loop over patients; noise of 0.01 C hides less than an example."""
    own = ["strategy=fedsgd", "dp=gradient", "delta=0.001", f"privacy.sigma={SIGMA}", f"privacy.clip={clip}", *model]
    server = HostileServer(hospital, "task=folder", "task.channels=1", *SHARDS[1:], "classes=3", "device=cpu", *own)
    reply, config = server.send(Differentiate(arrays=server.weights, run="patients", exchange=1)), server.config
    assert not refusal(reply)
    train = load(replace(config.task, data_dir=str(hospital / "a.npz"))).train
    model, slow = backbone(config.model, config.task)(0).double(), defaultdict(float)
    of = [patient if patient not in ("", "NA") else n for n, patient in enumerate(COLUMN)]
    for patient in set(of):
        rows = [n for n, other in enumerate(of) if other == patient]
        x, y = as_input(torch.from_numpy(train.x[rows])).double(), torch.from_numpy(train.y[rows])
        loss = torch.nn.functional.cross_entropy(model(x), y.long(), reduction="sum")
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        scale = min(1, clip / torch.cat([g.flatten() for g in gradients]).norm().item())
        for (name, _), g in zip(model.named_parameters(), gradients, strict=True):
            slow[name] = slow[name] + g.numpy() * scale
    off = [np.abs(10 * weights(reply)[name] - of_all).max() for name, of_all in slow.items()]
    assert max(off) < 6 * SIGMA * clip


EXTREME = {
    "largest": lambda x_NF: x_NF.sign() * 3.4e38,
    "subnormal": lambda x_NF: x_NF * 1e-44,
    "no number": lambda x_NF: x_NF.where(x_NF > -1, torch.nan),
    "infinite": lambda x_NF: x_NF / x_NF.where(x_NF > -1, 0),
    "one": lambda x_NF: torch.ones_like(x_NF) * 1e30,
    "of all sizes": lambda x_NF: x_NF * 10.0 ** torch.linspace(-44, 38, len(x_NF))[:, None],
}


@pytest.mark.parametrize("made", EXTREME.values(), ids=EXTREME)
@pytest.mark.parametrize("images", [1, 257, 3000])
def test_a_patient_adds_at_most_one_whatever_the_features(made, images):
    rng = torch.Generator().manual_seed(0)
    others, own = torch.randn(300, 9, generator=rng), made(torch.randn(images, 9, generator=rng))
    labels_N, of_N = torch.arange(300 + images) % 3, torch.cat([torch.arange(300), torch.full((images,), 150)])
    for clip, products in [(1e-6, True), (10.0, True), (10.0, False), (1e6, True)]:

        def summed(features_NF, of, clip=clip, products=products):
            of_N, total = np.unique(of, return_inverse=True)[1], 0.0
            for rows in map(torch.from_numpy, groups(of_N, 256)):
                about = features_NF[rows], labels_N[rows], torch.from_numpy(of_N)[rows], 3, clip, products
                sums, products_FF = class_sums(*about)
                total += torch.cat([sums.flatten(), packed(products_FF)])
            return total

        of_N[150] = 300 + images  # who would be 150, too, is somebody else
        added = summed(torch.cat([others * clip, own]), of_N) - summed(others * clip, of_N[:300])
        assert added.norm() <= 1 + 1e-9


def test_examples_in_groups_keep_patients_together_and_memory_bounded():
    rng = np.random.default_rng(0)
    for size in (1, 7, 256):
        for patients in (1, 5, 90, 1000):
            of = np.unique(rng.integers(0, patients, 500), return_inverse=True)[1]
            groups_of_rows = groups(of, size)
            assert sorted(np.concatenate(groups_of_rows)) == list(range(500))
            owners = [set(of[rows]) for rows in groups_of_rows]
            assert sum(map(len, owners)) == of.max() + 1
            assert max(map(len, groups_of_rows)) < size + np.bincount(of).max()


def test_a_label_outside_the_classes_is_not_counted_as_another_patients():
    features = torch.ones(3, 2)
    for wrong in (-1, 2):
        with pytest.raises((IndexError, RuntimeError)):
            class_sums(features, torch.tensor([0, wrong, 1]), torch.tensor([0, 1, 2]), 2, 1.0)
