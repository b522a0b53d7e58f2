"""Small parts that several models are made of."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

__all__ = ["norm_layer", "stage"]


def stage(**layers: nn.Module) -> nn.Sequential:
    """Return named layers in sequence."""
    return nn.Sequential(OrderedDict(layers))


def norm_layer(kind: str, channels: int) -> nn.Module:
    """Return a norm layer for `channels` feature maps; `kind` is ``batch`` or ``group``.

    Group norm has the largest number of groups that divides `channels`, is at most 32 (Wu and He 2018,
    arXiv 1803.08494) and leaves
    four channels to a group. With one channel, a map of one pixel (ResNet's last stages on small images) would be
    normalised to zero; with two, to plus or minus one, whose gradient vanishes: resnet18 of width 16 then stays at
    chance on 8x8 digits.
    """
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    most = max(1, min(32, channels // 4))
    return nn.GroupNorm(next(groups for groups in range(most, 0, -1) if channels % groups == 0), channels)
