"""Layers that several models share."""

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import require

__all__ = ["Centred", "Prepared", "Projected", "Standardize"]
__all__ += ["as_input", "centred", "classifier", "norm_layer", "out_of_place", "outlined", "stage", "step"]

Module = TypeVar("Module", bound=nn.Module)

NORM, SMALLEST = 10.0, 1e-6  # of an example's features, where they are centred; what is smaller stays so


class Standardize(nn.Module):
    """Subtract a mean from each channel and divide by a standard deviation; both are given, not computed from data.

    Parameters
    ----------
    mean, std : sequence of float
        One number for each channel, for images in [0, 1].
    """

    mean_C11: Tensor
    std_C11: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean_C11", torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer("std_C11", torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return (B, C, H, W)."""
        return (x_BCHW - self.mean_C11) / self.std_C11


class Prepared(nn.Module):
    """Images as an encoder takes them.

    Parameters
    ----------
    channels : int
        Of the encoder; a grey image is repeated to them.
    size : int
        Pixels along each side.
    mode : str
        How an image of another size is brought to it: bicubic or bilinear.
    mean, std : tuple of float
        Subtracted from each channel, and what it is then divided by.
    """

    def __init__(self, channels: int, size: int, mode: str, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.channels, self.size, self.mode, self.mean, self.std = channels, size, mode, mean, std
        self.standardize = Standardize(mean, std)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return (B, channels, size, size), channels last: depthwise convolutions are faster so."""
        if x_BCHW.shape[-1] != self.size:
            side = (self.size, self.size)
            x_BCHW = functional.interpolate(x_BCHW, side, mode=self.mode, antialias=True, align_corners=False)
        prepared: Tensor = self.standardize(x_BCHW.expand(-1, self.channels, -1, -1))
        return prepared.contiguous(memory_format=torch.channels_last)

    def extra_repr(self) -> str:
        """Say what is done to an image."""
        mean, std = (", ".join(f"{number:g}" for number in dict.fromkeys(of)) for of in (self.mean, self.std))
        return f"images to {self.size} x {self.size} pixels, {self.mode}; mean {mean}, standard deviation {std}"


def centred(features_BF: Tensor) -> Tensor:
    """Bring each example's features to mean 0 and norm 10; examples of one norm lose the least to clipping."""
    features_BF = features_BF - features_BF.mean(1, keepdim=True)
    return NORM * functional.normalize(features_BF, dim=1, eps=SMALLEST)


class Centred(nn.Module):
    """`centred` as a layer."""

    def forward(self, features_BF: Tensor) -> Tensor:
        """Return (B, F)."""
        return centred(features_BF)


def stage(**layers: nn.Module) -> nn.Sequential:
    """Return named layers in sequence."""
    return nn.Sequential(OrderedDict(layers))


class Projected(Centred):
    """Features, `centred`, projected to fewer numbers by a public matrix, and centred again.

    The matrix, (dim, F), depends on its shape alone. Each feature adds to one of the numbers, in an order and with
    signs that SHA-256 draws: its rows are orthonormal, and it is the same on every machine (Charikar, Chen and
    Farach-Colton 2002).
    """

    rows_DF: Tensor

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        require(
            dim <= features,
            f"model.dim projects the encoder's {features:,} features to fewer numbers; got {dim:,}: lower it",
        )
        drawn = [hashlib.sha256(f"{features} {dim} {feature}".encode()).digest() for feature in range(features)]
        order = sorted(range(features), key=drawn.__getitem__)
        of_row = [len(range(row, features, dim)) for row in range(dim)]
        signs = [(1 - 2 * (drawn[of][-1] % 2)) / math.sqrt(of_row[place % dim]) for place, of in enumerate(order)]
        rows_DF = torch.zeros(dim, features)  # no list: on the device `meta` the largest costs nothing
        rows_DF[torch.arange(features) % dim, torch.tensor(order)] = torch.tensor(signs)
        self.register_buffer("rows_DF", rows_DF, persistent=False)  # it never changes, so it does not travel

    def forward(self, features_BF: Tensor) -> Tensor:
        """Return (B, dim)."""
        return centred(functional.linear(centred(features_BF), self.rows_DF))


def classifier(features: int, model: ModelConfig, classes: int, **before: nn.Module) -> OrderedDict[str, nn.Module]:
    """Return the stages on features, as the model's options ask: perhaps `projection`, perhaps `hidden`, and `head`.

    A head that alone has weights begins at zero.
    """
    stages: OrderedDict[str, nn.Module] = OrderedDict()
    if model.dim:
        require(
            model.train != "from:projection",
            "model.dim projects by a matrix that never trains, and is fixed with the features before it; got "
            "model.train=from:projection: choose head, or from:hidden",
        )
        stages["projection"] = stage(projected=Projected(features, model.dim))
        features, before = model.dim, {}
    head = nn.Linear(model.hidden or features, classes)
    if model.hidden:
        stages["hidden"] = stage(**before, fc=nn.Linear(features, model.hidden), relu=nn.ReLU())
        return OrderedDict(stages, head=stage(fc=head))
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return OrderedDict(stages, head=stage(**before, fc=head))


def outlined(module: nn.Module, x: Tensor) -> Tensor:
    """Return an output without its numbers, of an input without its own, on the device `meta`: nothing is computed."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad(), torch.device("meta"):
        output: Tensor = functional_call(module, {name: tensor.to("meta") for name, tensor in tensors.items()}, (x,))
    return output


def out_of_place(net: Module) -> Module:
    """Let no layer write its output over its input: activations at a cut may be kept, and kept features are."""
    for layer in net.modules():
        if "inplace" in vars(layer):
            vars(layer)["inplace"] = False
    return net


def norm_layer(kind: str, channels: int) -> nn.Module:
    """Return a norm layer for `channels` feature maps; `kind` is ``batch`` or ``group``.

    Group norm has the largest number of groups that divides `channels`, is at most 32 (Wu and He 2018,
    arXiv 1803.08494) and has at least four channels in a group. ResNet's last stages on small images have maps of one
    pixel. With one channel in a group, such a map would be normalised to zero. With two, it would be plus or minus
    one, with a vanishing gradient: resnet18 of width 16 then stays at chance on 8x8 digits.
    """
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    most = max(1, min(32, channels // 4))
    return nn.GroupNorm(next(groups for groups in range(most, 0, -1) if channels % groups == 0), channels)


def as_input(x: Tensor) -> Tensor:
    """Convert bytes 0..255 to float32 in [0, 1], and other numbers to float32."""
    return x.float().div_(255) if x.dtype == torch.uint8 else x.float()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """Take one optimizer step on a loss; return the loss, detached and still on its device."""
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()  # here, not before the forward pass: the gradients' memory is free again for it
    return loss.detach()
