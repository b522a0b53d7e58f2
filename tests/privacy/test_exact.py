"""Logits of a linear head that no other example moves, whatever the weights; and clipped sums made of them."""

from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from flwr_replay.models.frozen import Frozen
from flwr_replay.models.layers import Centred, stage
from flwr_replay.models.staged import StagedModel
from flwr_replay.privacy.dpsgd import clipped_sums
from flwr_replay.privacy.exact import ExactHead


class Halved(nn.Sequential):
    """A user's own sequence, which computes more than its layers."""

    def forward(self, x):
        return super().forward(x) / 2


class HalvedLinear(nn.Linear):
    """A user's own linear layer."""

    def forward(self, x):
        return super().forward(x) / 2


def model_of(features, between=(), trained=True):
    """Return a head on features of images of two rows, in float64."""
    encoder = Frozen(OrderedDict(flat=nn.Flatten()), torch.zeros(1, 1, 2, features // 2), alone=False)
    layers = dict(between)
    layers.setdefault("fc", nn.Linear(features, 3))
    head = stage(**layers).requires_grad_(trained)
    return StagedModel(OrderedDict(features=encoder, head=head)).double()


def logits_of(head, x_BF):
    """Return the logits that the loss is given."""
    seen = []
    head.clipped(x_BF, lambda z_BC: seen.append(z_BC.detach().clone()) or z_BC.sum(), 1.0)
    return seen[0]


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 90), st.sampled_from([2, 18, 442, 1280]), st.booleans())
def test_no_bit_of_an_example_depends_on_the_others(seed, examples, features, centred):
    """Rows of weights sum to zero, of any size: what remains of a logit is rounding, if anything rounds."""
    draws = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-18, 19, (4,), generator=draws)
    head = ExactHead.of(model_of(features, [("centred", Centred())] * centred), torch.zeros(1, features, 1, 1))
    half = torch.rand(3, features // 2, generator=draws) * sizes[0] * sizes[1]
    mixed = torch.stack([torch.cat([row, -row])[torch.randperm(features, generator=draws)] for row in half])
    head.layer.weight.data = (mixed.clamp(-3e38, 3e38) if seed % 2 else mixed.sign() * 3e38).double()
    x_BF = torch.rand(examples, features, generator=draws) * sizes[2] if seed % 3 else torch.ones(examples, features)
    x_BF[::3] *= sizes[3]
    whole_BC, order_B = logits_of(head, x_BF), torch.randperm(examples, generator=draws)
    for some_B in (order_B, order_B[: examples // 2], order_B[:1], torch.arange(1, examples)):
        assert torch.equal(logits_of(head, x_BF[some_B]), whole_BC[some_B])


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("clip", [0.3, float("inf")])
@pytest.mark.parametrize("size", [1e-40, 1.0, 1e30])
def test_the_sums_are_those_of_a_float64_model(centred, clip, size):
    torch.manual_seed(0)
    model, x = model_of(40, [("centred", Centred())] * centred), torch.rand(20, 40, 1, 1) * size
    x[4, 7], x[9, 3] = torch.nan, torch.inf
    y, head = torch.randint(3, (20,)), ExactHead.of(model, x)

    def losses(x_B, y_B):
        return cross_entropy(model(x_B), y_B, reduction="none")

    slow, _ = clipped_sums(model, losses, (x.double(), y), clip)
    exact = head.clipped(x.flatten(1), lambda z_BC: cross_entropy(z_BC, y, reduction="sum"), clip)
    for ours, theirs in zip(exact, slow, strict=True):
        assert theirs.norm() > 0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * theirs.norm().item())


@pytest.mark.parametrize(
    ("between", "trained", "shape"),
    [
        ([("relu", nn.ReLU())], True, (40, 1, 1)),
        ([("first", nn.Linear(40, 40))], True, (40, 1, 1)),
        ([("fc", HalvedLinear(40, 3))], True, (40, 1, 1)),
        ([("centred", Halved(Centred()))], True, (40, 1, 1)),
        ([], False, (40, 1, 1)),
        ([], True, (1, 2, 20)),
    ],
)
def test_no_other_model_or_input_is_taken_for_one(between, trained, shape):
    assert ExactHead.of(model_of(40, between, trained), torch.zeros(1, *shape)) is None
