"""The networks of StyleGAN2 (Karras et al. 2020, arXiv 1912.04958), class-conditional, for images of 8 to 256 pixels.

Equalised learning rates are a factor on a layer's input, so all layers are plain `nn.Conv2d` and `nn.Linear`. A
modulated convolution scales its input by the style and its output by the norm. That equals scaling the weights of every
example (section 2.2 there): conv(x; w s) d = d conv(s x; w).

`B` batch, `I` and `O` channels, `H` height, `W` width, `Z` latents, `F` features.
"""

from itertools import pairwise
from math import log2, sqrt

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Discriminator", "Modulated", "Scaled", "StyleGenerator", "label_deviation"]

SLOPE = 0.2  # of the leaky ReLU
SMALLEST = 4  # pixels of the first block's side


def widths(side: int, width: int, max_width: int) -> list[int]:
    """Return the channels of the blocks, from 4 pixels to `side`: `width` at full size, doubled per halving.

    >>> widths(32, 16, 64)
    [64, 64, 32, 16]
    """
    blocks = int(log2(side // SMALLEST)) + 1
    return [min(max_width, width * 2 ** (blocks - 1 - i)) for i in range(blocks)]


class Scaled(nn.Module):
    """A layer with standard normal weights whose input is divided by the root of its fan-in."""

    def __init__(self, layer: nn.Conv2d | nn.Linear, bias: float = 0.0) -> None:
        super().__init__()
        self.layer, self.gain = layer, 1 / sqrt(layer.weight[0].numel())
        nn.init.normal_(layer.weight)
        if layer.bias is not None:
            nn.init.constant_(layer.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        out: Tensor = self.layer(x * self.gain)
        return out


def linear(inputs: int, outputs: int, bias: float = 0.0) -> Scaled:
    """Return a fully connected layer."""
    return Scaled(nn.Linear(inputs, outputs), bias)


def conv(inputs: int, outputs: int, kernel: int = 3) -> Scaled:
    """Return a convolution that keeps height and width."""
    return Scaled(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2))


def leaky(x: Tensor) -> Tensor:
    """Return the leaky ReLU, scaled to keep the variance."""
    return F.leaky_relu(x, SLOPE).mul_(sqrt(2))


class Modulated(nn.Module):
    """A convolution whose weights are scaled by a style, and normalised if `demodulate`."""

    def __init__(self, inputs: int, outputs: int, styles: int, kernel: int = 3, demodulate: bool = True) -> None:
        super().__init__()
        self.conv = Scaled(nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False))
        self.style = linear(styles, inputs, bias=1.0)
        self.bias_O11 = nn.Parameter(torch.zeros(outputs, 1, 1))
        self.demodulate = demodulate

    def forward(self, x_BIHW: Tensor, w_BZ: Tensor) -> Tensor:
        """Return (B, O, H, W), without bias."""
        s_BI = self.style(w_BZ) * self.conv.gain
        out: Tensor = self.conv.layer(x_BIHW * s_BI[:, :, None, None])
        if self.demodulate:
            squares_OI = self.conv.layer.weight.square().sum((2, 3))
            norm_BO = (s_BI.square() @ squares_OI.T + 1e-8).rsqrt()
            out = out * norm_BO[:, :, None, None]
        return out


class Styled(nn.Module):
    """A modulated convolution with per-pixel noise, bias and leaky ReLU."""

    def __init__(self, inputs: int, outputs: int, styles: int) -> None:
        super().__init__()
        self.modulated = Modulated(inputs, outputs, styles)
        self.strength = nn.Parameter(torch.zeros(()))

    def forward(self, x_BIHW: Tensor, w_BZ: Tensor, rng: torch.Generator | None) -> Tensor:
        """Return (B, O, H, W); without an rng there is no noise."""
        out = self.modulated(x_BIHW, w_BZ)
        if rng is not None:
            noise = torch.randn((len(out), 1, *out.shape[2:]), generator=rng)
            out = out + noise.to(out.device) * self.strength
        return leaky(out + self.modulated.bias_O11)


class StyleGenerator(nn.Module):
    """Mapping and synthesis: latents and labels to images in about [-1, 1].

    Parameters
    ----------
    latents : int
        Z, numbers in a latent, in a label's embedding and in a style.
    mapping : int
        Layers of the mapping network.
    classes, channels, side : int
        Of labels; of an image; its padded height and width.
    width, max_width : int
        Channels at full size; they double with every halving, up to `max_width`.
    """

    def __init__(
        self, latents: int, mapping: int, classes: int, channels: int, side: int, width: int, max_width: int
    ) -> None:
        super().__init__()
        self.latents = latents
        self.embed = nn.Embedding(classes, latents)
        self.mapping = nn.ModuleList(linear(2 * latents if i == 0 else latents, latents) for i in range(mapping))
        sizes = widths(side, width, max_width)
        self.start = nn.Parameter(torch.randn(1, sizes[0], SMALLEST, SMALLEST))
        self.first = Styled(sizes[0], sizes[0], latents)
        self.blocks = nn.ModuleList(
            nn.ModuleList([Styled(a, b, latents), Styled(b, b, latents)]) for a, b in pairwise(sizes)
        )
        self.to_rgb = nn.ModuleList(Modulated(size, channels, latents, 1, demodulate=False) for size in sizes)

    def styles(self, z_BZ: Tensor, labels_B: Tensor, weight: float = 1.0) -> Tensor:
        """Map latents and labels to styles w (B, Z); `weight` is that of the label (gradual conditioning)."""
        label_BZ = normalised(self.embed(labels_B)) * weight
        w_BZ = torch.cat([normalised(z_BZ), label_BZ], dim=1)
        for layer in self.mapping:
            w_BZ = leaky(layer(w_BZ))
        return w_BZ

    def synthesis(self, w_BZ: Tensor, rng: torch.Generator | None) -> Tensor:
        """Make images of styles; without an rng there is no per-pixel noise."""
        x = self.first(self.start.expand(len(w_BZ), -1, -1, -1), w_BZ, rng)
        image = self._rgb(0, x, w_BZ)
        for i, block in enumerate(self.blocks, 1):
            assert isinstance(block, nn.ModuleList)
            x = block[1](block[0](doubled(x), w_BZ, rng), w_BZ, rng)
            image = doubled(image) + self._rgb(i, x, w_BZ)
        return image

    def _rgb(self, i: int, x: Tensor, w_BZ: Tensor) -> Tensor:
        layer = self.to_rgb[i]
        assert isinstance(layer, Modulated)
        rgb: Tensor = layer(x, w_BZ) + layer.bias_O11
        return rgb


class Discriminator(nn.Module):
    """A projection discriminator (Miyato and Koyama 2018, arXiv 1802.05637): ψ(f(x)) + ⟨e_y, f(x)⟩.

    Parameters
    ----------
    classes, channels, side, width, max_width : int
        As of the generator.
    residual : bool
        Whether blocks have two convolutions and a shortcut, as published; otherwise they have one convolution.
    deviation : bool
        Whether it sees how far the examples of a batch deviate, which mixes them.
    """

    def __init__(
        self,
        classes: int,
        channels: int,
        side: int,
        width: int,
        max_width: int,
        residual: bool = True,
        deviation: bool = True,
    ) -> None:
        super().__init__()
        self.residual, self.deviation = residual, deviation
        sizes = widths(side, width, max_width)[::-1]
        self.from_rgb = conv(channels, sizes[0], 1)
        pairs = list(pairwise(sizes))
        self.before = nn.ModuleList(conv(a, a) for a, _ in (pairs if residual else []))
        self.blocks = nn.ModuleList(conv(a, b) for a, b in pairs)
        self.shortcuts = nn.ModuleList(Scaled(nn.Conv2d(a, b, 1, bias=False)) for a, b in (pairs if residual else []))
        last = sizes[-1]
        self.join = conv(last + 1, last)
        self.features = linear(last * SMALLEST**2, last)
        self.score = linear(last, 1)
        self.embed = nn.Embedding(classes, last)

    def forward(self, x_BCHW: Tensor, labels_B: Tensor, weight: float = 1.0) -> Tensor:
        """Return scores (B,); `weight` is that of the label."""
        x = leaky(self.from_rgb(x_BCHW))
        for i, block in enumerate(self.blocks):
            inner = leaky(self.before[i](x)) if self.residual else x
            out = halved(leaky(block(inner)))
            x = (out + self.shortcuts[i](halved(x))) / sqrt(2) if self.residual else out
        deviation = label_deviation(x, labels_B) if self.deviation else torch.zeros_like(x[:, :1])
        x = leaky(self.join(torch.cat([x, deviation], dim=1)))
        f_BF = leaky(self.features(x.flatten(1)))
        projection_B = (normalised(self.embed(labels_B)) * f_BF).sum(1) / sqrt(f_BF.shape[1])
        scores: Tensor = self.score(f_BF)[:, 0] + weight * projection_B
        return scores


def label_deviation(x_BFHW: Tensor, labels_B: Tensor) -> Tensor:
    """Return a map (B, 1, H, W): how far the features of a batch's examples of one label deviate, on average.

    A label with one example in the batch has 0. Across labels the deviation would tell real batches from collapsed ones
    even if every class were one image.
    """
    same_BB = (labels_B[:, None] == labels_B[None]).to(x_BFHW.dtype)
    count_B1 = same_BB.sum(1, keepdim=True)
    flat_BN = x_BFHW.flatten(1)
    mean_BN = same_BB @ flat_BN / count_B1
    variance_BN = same_BB @ (flat_BN - mean_BN).square() / count_B1
    deviation_B = (variance_BN + 1e-8).sqrt().mean(1) * (count_B1[:, 0] > 1)
    return deviation_B[:, None, None, None].expand(-1, 1, *x_BFHW.shape[2:])


def normalised(x_BZ: Tensor) -> Tensor:
    """Divide by the root of the mean square."""
    return x_BZ * (x_BZ.square().mean(1, keepdim=True) + 1e-8).rsqrt()


def doubled(x: Tensor) -> Tensor:
    """Return maps of twice the height and width, by bilinear interpolation."""
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


def halved(x: Tensor) -> Tensor:
    """Return maps of half the height and width, by means."""
    return F.avg_pool2d(x, 2)
