"""Gabor features: they tell orientations apart, no image changes another's, and nothing but the head is learned."""

import math
from dataclasses import replace

import pytest
import torch

from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import TaskConfig
from flwr_replay.errors import ConfigError
from flwr_replay.files.tensors import digest
from flwr_replay.models import build
from flwr_replay.models.gabor import GRID, ORIENTATIONS, filters
from flwr_replay.models.layers import Projected
from flwr_replay.models.zoo import bytes_of
from flwr_replay.privacy.dpsgd import refuse_mixing
from flwr_replay.privacy.ghost import Ghost

TASK = TaskConfig(name="mnist", format="mnist", channels=1, size=28, classes=10)
MODEL = ModelConfig(name="gabor")


def test_only_the_head_is_learned_or_travels():
    model = build(MODEL, TASK, 0)
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == {
        "head.fc.weight": (10, 9 * 49),
        "head.fc.bias": (10,),
    }
    assert not any(value.any() for value in model.state_dict().values())
    refuse_mixing(model)
    assert Ghost.serves(model)


def test_filters_have_no_mean_and_norm_one():
    flat = filters().flatten(1)
    torch.testing.assert_close(flat.mean(1), torch.zeros(16), atol=1e-7, rtol=0)
    torch.testing.assert_close(flat.norm(dim=1), torch.ones(16))


@pytest.mark.parametrize("k", range(ORIENTATIONS))
def test_a_grating_has_the_most_energy_at_its_own_orientation(k):
    place = torch.arange(28.0)
    y, x = torch.meshgrid(place, place, indexing="ij")
    angle = math.pi * k / ORIENTATIONS
    grating = torch.cos(2 * math.pi / 4 * (x * math.cos(angle) + y * math.sin(angle)))
    energies = build(MODEL, TASK, 0).energies(grating.view(1, 1, 28, 28)).view(ORIENTATIONS + 1, GRID**2)
    assert int(energies[:ORIENTATIONS, GRID**2 // 2].argmax()) == k


def test_an_images_features_depend_on_no_other_and_not_on_its_contrast():
    x, layer = torch.rand(4, 3, 16, 16), build(MODEL, TaskConfig(**{**vars(TASK), "channels": 3}), 0).energies
    torch.testing.assert_close(layer(x)[:1], layer(x[:1]))
    torch.testing.assert_close(layer(x), layer(3 * x), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layer(x).norm(dim=1), torch.full((4,), 10.0))
    assert layer(torch.zeros(2, 3, 16, 16)).isfinite().all()


def test_small_images_have_fewer_places():
    model = build(MODEL, TaskConfig(**{**vars(TASK), "size": 5}), 0)
    assert model(torch.rand(2, 1, 5, 5)).shape == (2, 10)


@pytest.mark.parametrize(
    ("features", "dim", "known"), [(9, 9, "f2dff7b1"), (1280, 256, "93b20106"), (441, 200, "e944f142")]
)
def test_a_projection_is_orthonormal_and_the_same_everywhere(features, dim, known):
    """Its bits are part of an encoder's hash, which institutions compare."""
    rows = Projected(features, dim).rows_DF
    torch.testing.assert_close(rows @ rows.T, torch.eye(dim))
    assert (rows != 0).sum(0).tolist() == [1] * features
    assert digest({"": rows.numpy()}).startswith(f"sha256:{known}")


def test_a_projection_brings_features_to_one_norm_and_never_adds_any():
    model = build(replace(MODEL, dim=40), TASK, 0)
    assert model.stages == ("energies", "projection", "head")
    assert model.state_dict()["head.fc.weight"].shape == (10, 40)
    features = model.projection(model.energies(torch.rand(3, 1, 28, 28)))
    torch.testing.assert_close(features.norm(dim=1), torch.full((3,), 10.0))
    refuse_mixing(model)
    with pytest.raises(ConfigError, match=r"model\.dim projects the encoder's 441 features to fewer numbers; got 442"):
        build(replace(MODEL, dim=442), TASK, 0)


def test_the_bytes_of_a_projection_are_known_without_it():
    model, task = replace(MODEL, dim=4096, train="head"), TaskConfig(**{**vars(TASK), "channels": 92})
    assert bytes_of(model, task) == 4 * (4096 + 1) * 10
    assert bytes_of(model, task, whole=True) > 4 * 4096 * 4900


def test_tables_are_refused():
    with pytest.raises(ConfigError, match="model=gabor sees edges in images"):
        build(MODEL, TaskConfig(**{**vars(TASK), "size": 1, "format": "table"}), 0)
