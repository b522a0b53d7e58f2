"""Clipped gradients of a linear head on kept features, whose logits no rounding touches.

Rounding in a product of matrices may depend on a row's place and on the number of rows, and a hostile server's weights
can make it as large as the whole (`flwr_replay.privacy.places`). Here features and weights are whole numbers of units,
which are powers of two: of each example's own largest feature, of the largest weight. They have so few bits that every
sum of products stays below 2^53, where float64 is exact in whatever order it adds. So who else is there changes no bit
of an example's logits.

    d_i = ⌊x_i / u_i⌉, of which `Centred` takes off the rounded mean           |d_ij| ≤ 2^b
    W' = ⌊W / v⌉                                                               |W'_cj| ≤ 2^b,  F 4^b ≤ 2^53
    logits_i = (W' d_i) s_i v + bias                                           s_i d_i: the features

With 1,280 features b is 21: a few bits less than float32 has. The gradient is one at the rounded features, whose norm
is clipped, so what bounds it does not hang on b.

Legend: B examples, C outputs, F features.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from flwr_replay.models.frozen import Frozen
from flwr_replay.models.layers import NORM, SMALLEST, Centred
from flwr_replay.models.staged import StagedModel
from flwr_replay.privacy.dpsgd import scales
from flwr_replay.privacy.ghost import norms_of

__all__ = ["ExactHead"]

EXACT = 53  # bits of float64


class ExactHead(NamedTuple):
    """The one layer that trains, in float64, on features that are kept."""

    layer: nn.Linear
    centred: bool  # whether features pass `Centred` first

    @classmethod
    def of(cls, model: nn.Module, x: Tensor) -> Self | None:
        """Return a model's head if all before it is done: the inputs x (N, ...) are features that a layer takes."""
        match [layer for layer in model.modules() if type(layer) not in (nn.Sequential, StagedModel)]:
            case [Frozen() as frozen, *between, nn.Linear(bias=Tensor()) as layer] if (
                type(layer) is nn.Linear  # a class of a user's own, also of a sequence, may compute anything
                and frozen.takes_as_features(x)
                and len(frozen.shape) == 1
                and [type(other) for other in between] in ([], [Centred])
                and all(parameter.requires_grad for parameter in layer.parameters())
            ):
                return cls(layer, bool(between))
        return None

    def clipped(self, x_BF: Tensor, losses: Callable[[Tensor], Tensor], clip: float) -> list[Tensor]:
        """Sum the examples' gradients, each scaled down to a norm of at most C, as `clipped_sums` does.

        Parameters
        ----------
        x_BF : Tensor
            Features as they are kept, float32. An example's add nothing where one of them is not finite.
        losses : Callable
            Maps logits (B, C) to the sum of the examples' losses, each of which depends on its own logits alone.
        clip : float
            C; infinite: no clipping.

        Returns
        -------
        list of Tensor
            Of the weight, (C, F), and of the bias, (C,), float64.
        """
        bits = (EXACT - math.ceil(math.log2(x_BF.shape[1]))) // 2
        d_BF, s_B1, norm_B1 = self.rounded(x_BF, bits)
        weight_CF, bias_C = self.layer.weight.detach(), self.layer.bias.detach()
        v = unit_of(weight_CF.abs().amax(), bits)
        logits_BC = (d_BF @ (weight_CF / v).round_().T).mul_(s_B1 * v).add_(bias_C).requires_grad_()
        (g_BC,) = torch.autograd.grad(losses(logits_BC), logits_BC)
        norms_B = (norm_B1.square() + 1).sqrt()[:, 0] * norms_of(g_BC)
        factors_B, counts_B = scales(clip, len(x_BF), g_BC.dtype, norms_B)
        rows = slice(None) if counts_B.all() else counts_B
        g_BC = (g_BC * factors_B[:, None])[rows]
        weighted_BC = functional.hardshrink(g_BC * s_B1[rows], torch.finfo(g_BC.dtype).tiny)  # as in `ghost.summed`
        return [weighted_BC.T @ d_BF[rows], g_BC.sum(0)]

    def rounded(self, x_BF: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return whole numbers d, (B, F) float64, s, (B, 1), such that the features are s d, and the features' norm."""
        s_B1 = unit_of(x_BF.abs().amax(1, keepdim=True), bits - self.centred)
        d_BF = x_BF.double().div_(s_B1).round_()
        if self.centred:
            d_BF -= (d_BF.sum(1, keepdim=True) / d_BF.shape[1]).round_()
        norm_B1 = torch.linalg.vector_norm(d_BF, dim=1, keepdim=True) * s_B1
        by_B1 = NORM / norm_B1.clamp(min=SMALLEST) if self.centred else 1
        return d_BF, s_B1 * by_B1, norm_B1 * by_B1


def unit_of(largest: Tensor, bits: int) -> Tensor:
    """Return the power of two, float64, of which finite numbers up to these are at most 2^bits."""
    exponent = (torch.frexp(largest).exponent.long() - bits).clamp(-1022, 1023)
    return (exponent + 1023 << 52).view(torch.float64)  # its bits: no function that rounds makes it
