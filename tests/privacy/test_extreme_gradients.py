"""What an example moves stays within C, however large or small weights, images and losses are; what is refused."""

import copy
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from flwr_replay.config.privacy import PrivacyConfig
from flwr_replay.errors import ConfigError
from flwr_replay.models.layers import stage
from flwr_replay.models.staged import StagedModel
from flwr_replay.privacy.dpsgd import clipped_sums

EXTREMES = st.integers(-45, 38).map(lambda exponent: 10.0**exponent)


def staged(*layers):
    return StagedModel(OrderedDict((f"layer{i}", stage(it=layer)) for i, layer in enumerate(layers)))


def layers_of(kind, bias):
    torch.manual_seed(1)
    return {
        "units": [nn.Linear(6, 4, bias=bias), nn.Linear(4, 2, bias=bias)],
        "places": [nn.Conv2d(1, 3, 3, bias=bias), nn.Flatten(), nn.Linear(12, 2, bias=bias)],
    }[kind]


@settings(max_examples=150, derandomize=True)
@given(
    kind=st.sampled_from(["units", "places"]),
    hooks=st.booleans(),
    scales=st.tuples(EXTREMES, EXTREMES, EXTREMES, EXTREMES),
    clip=st.integers(-9, 9).map(lambda exponent: 10.0**exponent),
    bias=st.booleans(),
)
def test_no_example_moves_a_sum_by_more_than_c(kind, hooks, scales, clip, bias):
    first, last, images, loss = scales
    layers = layers_of(kind, bias)
    with torch.no_grad():
        for layer, scale in ((layers[0], first), (layers[-1], last)):
            for parameter in layer.parameters():
                parameter.mul_(scale)
    model = nn.Sequential(*layers) if hooks else staged(*layers)
    x = images * (torch.randn(2, 6) if kind == "units" else torch.randn(2, 1, 4, 4))
    for example in x:
        sums, _ = clipped_sums(model, lambda x: model(x).sum(1) * loss, (example[None],), clip)
        norm = torch.linalg.vector_norm(torch.stack([tensor.double().norm() for tensor in sums]))
        assert norm <= clip * (1 + 1e-6)


def test_products_of_subnormal_numbers_do_not_round_up():
    """What goes out, scaled down below float32's normal numbers, met what came in, 3e38: 1.996 C at a C of 1.7e-6."""
    model, x, worst = staged(nn.Linear(1, 64, bias=False)), torch.full((1, 1), 3e38), 0.0
    for clip in torch.logspace(-6.5, -5, 80).tolist():
        [summed], _ = clipped_sums(model, lambda x: model(x).sum(1) * 1e-8, (x,), clip)
        worst = max(worst, float(summed.double().norm()) / clip)
    assert worst <= 1 + 1e-6


def test_a_bound_that_floats_cannot_hold_is_refused():
    for clip in (1e-10, 1e10, float("nan")):
        with pytest.raises(ConfigError, match=r"privacy\.clip lies in"):
            PrivacyConfig(dp="classifier", clip=clip)


# --- what clipping bounds nothing of ----------------------------------------------------------------------------------


class Twice(StagedModel):
    """Calls its first stage twice."""

    def forward(self, x):
        return self.layer1(self.layer0(self.layer0(x)))


def tied_layers():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    return [first, second]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (staged(*tied_layers()), "no two layers may share weights"),
        (nn.Sequential(*tied_layers()), "no two layers may share weights"),
        (
            Twice(OrderedDict(layer0=stage(it=nn.Linear(4, 4)), layer1=stage(it=nn.Linear(4, 1)))),
            "every layer is called once",
        ),
        (staged(nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"), nn.Flatten()), "padded by zeros"),
        (nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")), "padded by zeros"),
    ],
    ids=["tied stages", "tied layers", "called twice", "reflected", "circular"],
)
def test_what_would_be_clipped_wrongly_is_refused(model, says):
    conv = "Conv2d" in str(model)
    x = torch.randn(3, 1, 4, 4) if conv else torch.randn(3, 4)
    with pytest.raises(ConfigError, match=says):
        clipped_sums(model, lambda x: model(x).flatten(1).sum(1), (x,), 1.0)


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name_is_clipped_like_padding_in_pixels(padding):
    named = staged(nn.Conv2d(1, 2, 3, padding=padding), nn.Flatten())
    pixels = copy.deepcopy(named)
    pixels.layer0[0].padding = (1, 1) if padding == "same" else (0, 0)
    x = torch.randn(3, 1, 5, 5)
    sums, expected = (clipped_sums(m, lambda x, m=m: m(x).pow(2).sum(1), (x,), 0.5)[0] for m in (named, pixels))
    for left, right in zip(sums, expected, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("kind", ["units", "places"])
@pytest.mark.parametrize("small", [1e-170, 1e-163, 1e-158, 1e-150])
def test_a_gradient_whose_squares_leave_float64_is_clipped_all_the_same(kind, small):
    """A layer's input may be so large that the product of both is not small."""
    net, clip = staged(*layers_of(kind, bias=False)).double(), 1e-30
    x = torch.full((3, 6) if kind == "units" else (3, 1, 4, 4), 1e150, dtype=torch.float64)
    sums, _ = clipped_sums(net, lambda x_B: net(x_B).sum(1) * small, (x,), clip)
    assert torch.linalg.vector_norm(torch.cat([of.flatten() for of in sums])) <= 3 * clip
