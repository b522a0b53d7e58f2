"""Distances of images by features, and the privacy loss of StyleGAN2's second phase."""

import numpy as np
import pytest
import scipy.linalg
import torch
import torchvision
from numpy.testing import assert_allclose
from sklearn.datasets import load_digits

from flwr_replay.errors import ConfigError
from flwr_replay.generators.base import ImageForm
from flwr_replay.generators.perceptual import (
    LocalFeatures,
    LpipsFeatures,
    Pixels,
    frechet,
    nearest,
    nearest_other,
    precision,
    spread,
    squared_distances,
)
from flwr_replay.generators.privacy_loss import PrivacyLoss
from flwr_replay.generators.stylegan2 import StyleGAN2, StyleGAN2Config

FORM, CPU = ImageForm(1, 8, 2), torch.device("cpu")
TINY = {
    "latents": 8,
    "mapping": 2,
    "width": 4,
    "max_width": 8,
    "batch_size": 4,
    "ada_images": 200,
    "path_length": False,
}


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def gan(**changes):
    return StyleGAN2(
        StyleGAN2Config(name="stylegan2", **{**TINY, "steps": 3, "privacy_steps": 5, **changes}), FORM, 1, CPU
    )


def images(n=24, size=8, channels=1):
    rng = np.random.default_rng(3)
    x = rng.integers(0, 256, (n, channels, size, size), dtype=np.uint8)
    return torch.from_numpy(x), torch.from_numpy(rng.integers(0, 2, n))


def state_of(model):
    return {name: torch.as_tensor(value) for name, value in model.state().items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- distances --------------------------------------------------------------------------------------------------------


def test_the_vectors_distance_is_the_mean_over_places_and_layers():
    look = LocalFeatures(FORM, 0)
    x, y = torch.rand(2, 1, 1, 8, 8)
    slow = 0.0
    for a, b in zip(look.maps(x), look.maps(y), strict=True):
        a, b = a / a.norm(dim=1, keepdim=True).clamp(min=1e-5), b / b.norm(dim=1, keepdim=True).clamp(min=1e-5)
        slow += (a - b).square().sum(1).mean().item() / 3
    assert squared_distances(look.embed(x), look.embed(y)).item() == pytest.approx(slow, rel=1e-3)
    assert float(squared_distances(Pixels().embed(x), Pixels().embed(y))) == pytest.approx(
        float((x - y).square().mean()), rel=1e-4
    )


def test_nearest_and_nearest_other_are_those_of_a_loop():
    a, b = torch.rand(5, 7), torch.rand(300, 7)
    slow = torch.stack([torch.stack([(x - y).square().sum() for y in b]).min() for x in a])
    torch.testing.assert_close(nearest(a, b), slow)
    slow = torch.stack([min((x - y).square().sum() for j, y in enumerate(b) if j != i) for i, x in enumerate(b)])
    torch.testing.assert_close(nearest_other(b), slow)


@pytest.mark.sampled(2, of="slow learning")
def test_local_features_learn_the_institutions_task_and_depend_on_the_seed_alone():
    x = torch.cat([torch.full((20, 1, 8, 8), 30), torch.full((20, 1, 8, 8), 220)]).byte()
    y = torch.repeat_interleave(torch.arange(2), 20)
    first, again, other = (LocalFeatures(FORM, seed).learn(x, y) for seed in (0, 0, 1))
    assert torch.equal(first.embed_all(x, CPU), again.embed_all(x, CPU))
    assert not torch.equal(first.embed_all(x, CPU), other.embed_all(x, CPU))
    scores = first.head(first.pooled(x / 255))
    assert torch.equal(scores.argmax(1), y)


def test_large_images_are_made_smaller_first():
    look = LocalFeatures(ImageForm(3, 256, 2), 0)
    assert (
        look.embed(torch.rand(1, 3, 256, 256)).shape[1]
        == LocalFeatures(ImageForm(3, 64, 2), 0).embed(torch.rand(1, 3, 64, 64)).shape[1]
    )


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    """A file with AlexNet's convolutions, whose weights are made up."""
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("backbone") / "alexnet.pth"
    features = torchvision.models.alexnet(weights=None).features.state_dict()
    torch.save({f"features.{name}": value for name, value in features.items()}, file)
    return file


@pytest.mark.sampled(1)
@pytest.mark.parametrize("channels", [1, 3])
def test_lpips_distances_are_those_of_its_package(backbone, channels):
    look = LpipsFeatures(str(backbone), ImageForm(channels, 64, 2))
    x, y = torch.rand(2, 4, channels, 64, 64)
    expected = look.lpips(x.expand(-1, 3, -1, -1), y.expand(-1, 3, -1, -1), normalize=True).flatten()
    torch.testing.assert_close(
        squared_distances(look.embed(x), look.embed(y)).diagonal(), expected, rtol=1e-3, atol=1e-5
    )
    assert look.name == "LPIPS, alex"


def test_wrong_backbones_are_refused_in_one_line(backbone, tmp_path):
    torch.save({"conv1.weight": torch.zeros(3)}, tmp_path / "other.pth")
    (tmp_path / "broken.pth").write_bytes(b"none")
    with pytest.raises(ConfigError, match="AlexNet or VGG-16"):
        LpipsFeatures(str(tmp_path / "other.pth"), FORM)
    with pytest.raises(ConfigError, match=r"generator\.perceptual-weights must be a \.safetensors or \.pth file"):
        LpipsFeatures(str(tmp_path / "broken.pth"), FORM)
    with pytest.raises(ConfigError, match="1 or 3 channels; got 2"):
        LpipsFeatures(str(backbone), ImageForm(2, 64, 2))


def test_frechet_is_the_formula_with_a_matrix_root():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(200, 3)), rng.normal(1, 2, size=(100, 3))
    covs = [np.cov(x, rowvar=False) for x in (a, b)]
    slow = np.square(a.mean(0) - b.mean(0)).sum() + np.trace(
        covs[0] + covs[1] - 2 * scipy.linalg.sqrtm(covs[0] @ covs[1])
    )
    assert_allclose(frechet(a, b), slow.real, rtol=1e-6)
    assert_allclose(frechet(a, a), 0, atol=1e-6)


def test_the_spread_of_one_image_per_class_is_nothing():
    x, _ = images(4)
    y = torch.tensor([0, 0, 1, 1])
    assert spread(x, y) == pytest.approx(
        float((x[0] / 255 - x[1] / 255).norm() + (x[2] / 255 - x[3] / 255).norm()) / 2, rel=1e-5
    )
    assert spread(x[[0, 0, 1, 1]], y) == 0


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "moves"), [("nearest", 1), ("pairs", 1), ("printed", -1)])
def test_a_step_on_the_loss_moves_images_away_and_the_printed_one_moves_them_nearer(kind, moves):
    x, y = images()
    model = gan()
    loss = PrivacyLoss(kind, LocalFeatures(FORM, 0).learn(x, y), x, CPU)
    w, rows = model.generator.styles(torch.randn(8, 8), torch.randint(2, (8,))).detach(), torch.arange(8)

    def distances():
        own = loss.own_nF if kind == "nearest" else loss.own_nF[rows]
        made = squared_distances(loss.look.embed(model._shown(model.generator.synthesis(w, None))), own)
        return float((made.amin(1) if kind == "nearest" else made).mean())

    before = distances()
    loss.margin = 2 * before  # so that all images are too near
    optimizer = torch.optim.SGD(model.generator.parameters(), lr=1e-3)
    loss(model._shown(model.generator.synthesis(w, None)), rows_B=rows).backward()
    optimizer.step()
    assert (distances() - before) * moves > 0


def test_precision_sees_noise_and_not_real_images():
    x = torch.from_numpy(load_digits().images / 16).float()[:, None]
    look = LocalFeatures(ImageForm(1, 8, 10), 0).freeze()
    real, others, noise = (look.embed_all(images, CPU) for images in (x[:512], x[512:672], torch.rand(160, 1, 8, 8)))
    few = real[:20]
    radii = [sorted(float((a - b).square().sum()) for b in few)[3] for a in few]
    slow = [any(float((a - b).square().sum()) <= r for b, r in zip(few, radii, strict=True)) for a in others]
    assert precision(others, few) == pytest.approx(np.mean(slow), abs=0.02)  # other rounding may turn two of 160
    assert precision(others, real) > 0.4
    assert precision(noise, real) < 0.05


def test_the_margin_is_the_median_distance_of_a_real_image_to_its_nearest_other():
    x, _ = images()
    loss = PrivacyLoss("nearest", Pixels(), x, CPU)
    flat = x.flatten(1) / 255
    slow = [min(float((a - b).square().mean()) for j, b in enumerate(flat) if j != i) for i, a in enumerate(flat)]
    assert loss.margin == pytest.approx(float(torch.tensor(slow).median()), rel=1e-4)


@pytest.mark.parametrize("kind", ["nearest", "pairs"])
def test_an_image_of_the_institution_costs_most_and_one_beyond_the_margin_nothing(kind):
    x, _ = images()
    loss = PrivacyLoss(kind, Pixels(), x, CPU)
    for row in range(4):
        alone = torch.tensor([row])
        assert float(loss(x[alone] / 255, rows_B=alone)) == pytest.approx(1, abs=1e-4)
        assert float(loss(torch.full((1, 1, 8, 8), 20.0), rows_B=alone)) == 0


def test_without_its_weight_the_training_is_the_plain_one():
    x, y = images()
    plain, weighed = gan(privacy_loss="none"), gan(privacy_weight=0.0)
    plain.train(x, y, range(8))
    figures = weighed.train(x, y, range(8))
    ours = {name: value for name, value in state_of(weighed).items() if not name.startswith("look")}
    assert same(ours, state_of(plain))
    assert figures["margin"] > 0
    assert figures["privacy"] >= 0


@pytest.mark.sampled(2, of="slow learning")
def test_the_privacy_loss_sees_images_without_their_noise():
    x, y = images()
    losses = []
    for strength in (0.0, 5.0):
        model = gan(privacy_loss="printed")  # it depends on all images, however far they are
        for name, value in model.generator.named_parameters():
            if name.endswith("strength"):
                value.data.fill_(strength)
        losses.append(model.train(x, y, range(3, 4))["privacy"])
    assert losses[0] == losses[1] > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("broken", [2, 3, 5])
def test_a_training_that_breaks_off_before_or_within_the_second_phase_ends_with_the_same_bits(broken):
    x, y = images()
    whole, first, then = gan(), gan(), gan()
    whole.train(x, y, range(8))
    first.train(x, y, range(broken))
    then.load_state(first.state())
    then.train(x, y, range(broken, 8))
    assert same(state_of(whole), state_of(then))


def test_steps_count_both_phases():
    assert gan().steps(100) == 8
    assert gan(privacy_loss="none").steps(100) == 3


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"privacy_loss": "nearst"}, "did you mean nearest"),
        ({"privacy_weight": -1.0}, "generator.privacy-weight must be finite and not negative"),
        ({"privacy_steps": 0}, "generator.privacy-steps must be at least 1"),
    ],
)
def test_wrong_options_are_refused_in_one_line(wrong, line):
    with pytest.raises(ConfigError, match=line):
        gan(**wrong)
