"""Clipped sums without the examples' own gradients, beside those of Opacus' hooks."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.nn import functional

from flwr_replay.models.layers import stage
from flwr_replay.models.staged import StagedModel
from flwr_replay.models.zoo import Elements
from flwr_replay.privacy.dpsgd import clipped_sums
from flwr_replay.privacy.ghost import Ghost


def staged(*layers):
    return StagedModel(OrderedDict((f"layer{i}", stage(it=layer)) for i, layer in enumerate(layers)))


def units():
    return staged(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3, bias=False))


def few_pixels():
    """Products of places are fewer than the weights here."""
    return staged(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 9, 3, stride=2), nn.Flatten())


def many_pixels():
    return staged(nn.Conv2d(2, 3, 2, dilation=2, bias=False), nn.ReLU(), nn.Conv2d(3, 1, 1), nn.Flatten())


def sets():
    """A layer of units for every element of a set."""
    return staged(nn.Linear(4, 30), nn.ReLU(), nn.Linear(30, 2), nn.Flatten())


def bags():
    """A DeepSet: units on every place, and a mean over those that are there."""
    return staged(Elements(2, 7), nn.ReLU(), nn.Linear(7, 2))


CASES = [(bags, (2, 3, 3)), (units, (6,)), (few_pixels, (2, 4, 4)), (many_pixels, (2, 9, 9)), (sets, (3, 4))]


@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize(("build", "shape"), CASES)
def test_the_sums_are_those_of_the_hooks(build, shape, frozen, monkeypatch):
    torch.manual_seed(0)
    model, x = build(), torch.randn(7, *shape) * torch.arange(1, 8).view(-1, *[1] * len(shape))
    y = torch.randint(2, (7,))
    for parameter in list(model.parameters())[:frozen]:
        parameter.requires_grad_(False)
    for clip in (0.05, 1.0, float("inf")):

        def losses(x, y):
            return functional.cross_entropy(model(x), y, reduction="none")

        assert Ghost.serves(model)
        quick, loss = clipped_sums(model, losses, (x, y), clip)
        with monkeypatch.context() as patched:
            patched.setattr(Ghost, "serves", lambda module: False)
            slow, other = clipped_sums(model, losses, (x, y), clip)
        torch.testing.assert_close(quick, slow, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(loss, other)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(4, 3)),  # somebody's own, which may use a layer twice
        staged(nn.Linear(4, 3), nn.LayerNorm(3)),
        staged(nn.Conv2d(2, 2, 1, groups=2)),
        staged(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")),
    ],
    ids=["no stages", "a norm layer", "groups", "reflected borders"],
)
def test_others_are_left_to_the_hooks(model):
    assert not Ghost.serves(model)


def test_a_parameter_that_the_loss_does_not_need_gets_nothing():
    model = units()
    sums, _ = clipped_sums(model, lambda x: model.layer0(x).sum(1), (torch.ones(2, 6),), 1.0)
    assert [bool(summed.any()) for summed in sums] == [True, True, False]


def test_a_large_common_activation_does_not_hide_a_gradient():
    """Inner products of places would cancel here, and the norm seem to be 0."""
    model = staged(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 40, 1, bias=False), nn.Flatten())
    with torch.no_grad():
        model.layer0[0].weight.fill_(1.0)
        model.layer0[0].bias.fill_(1e4)
    x, signs = torch.rand(3, 1, 4, 4), torch.tensor([1.0, -1.0]).repeat(320)

    def losses(x):
        return model(x) @ signs

    sums, _ = clipped_sums(model, losses, (x[:1],), 1.0)
    assert torch.cat([of.flatten() for of in sums]).norm() <= 1 + 1e-5


@pytest.mark.parametrize("size", [1e-23, 1e23])
def test_norms_neither_vanish_nor_overflow(size):
    """Squares of these activations, and of these gradients, leave float32."""
    model = staged(nn.Linear(4, 3, bias=False))
    x = torch.rand(2, 4) + 1
    sums, _ = clipped_sums(model, lambda x: model(x * size).sum(1) / size * 10, (x,), 1.0)
    expected = (x / (x.norm(dim=1, keepdim=True) * 3**0.5)).sum(0)
    torch.testing.assert_close(sums[0], expected.expand(3, 4))
