"""VQ-VAE-2 (Razavi et al. 2019, arXiv 1906.00446): an image as two small grids of codes.

Idea: an encoder rounds its features at an eighth of the image's size to the vectors of one codebook (top), and at a
quarter, knowing the top, to those of another (bottom); a decoder makes the image from both. Images of 256 pixels have
32x32 top and 64x64 bottom codes (Qu et al. 2022, section 4.1), of 32 pixels 4x4 and 8x8.

    h_top = E_top(x);  e_top = nearest vectors;  h_bottom = E_bottom(x, e_top);  e_bottom = nearest vectors
    loss  = ‖x − D(e)‖² + Σ_levels ‖sg[h] − e‖² + β ‖sg[e] − h‖²

Squared norms are means over numbers and examples. With codebook=ema, running means take the place of the middle term.

Deviations: images lie in [0, 1], and the reconstruction term counts four times, as it would for images in [-1, 1].
Images whose size is no multiple of eight are padded with their border, and cropped afterwards.

`B` batch, `C` channels, `H` height, `W` width, `N` codes of an image, `D` length of a vector.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_replay.config.sections import (
    FRACTION,
    NOT_NEGATIVE,
    NOT_NEGATIVE_FINITE,
    PASSES,
    WIDTH,
    GeneratorConfig,
    one_of,
    within,
)
from flwr_replay.errors import WireError
from flwr_replay.generators.base import by_level
from flwr_replay.generators.codebooks import EMACodebook, GradientCodebook, perplexity
from flwr_replay.models.seeding import seeded

__all__ = ["VQVAE2", "VQVAE2Config", "build_generator", "summed_loss"]


@dataclass(frozen=True, kw_only=True)
class VQVAE2Config(GeneratorConfig):
    """The VQ-VAE-2 and its training (Qu et al. 2022, section 4.1; Razavi et al. 2019)."""

    draws_with: ClassVar[tuple[str, ...]] = ("generator", "prior")  # which draws the codes that the decoder decodes
    length: ClassVar[str] = "generator.epochs, prior.epochs"

    codes: int = 128  # vectors in each of the two codebooks
    dim: int = 16  # numbers in each vector
    width: int = 32  # channels of the encoders and the decoder
    blocks: int = 1  # residual blocks of every network
    residual_width: int = 8  # channels within a residual block
    beta: float = 0.25  # weight of the commitment loss
    codebook: str = "ema"  # ema: running means, dead codes revived | gradient: learned by the loss, as DP-SGD needs it
    decay: float = 0.99  # ema: the share of the running means that a step keeps
    lr: float = 4e-4  # of Adam
    lr_halving: int = 150  # epochs after which the learning rate is halved; 0: never
    epochs: int = 6  # at each institution

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("generator.codebook", self.codebook, ("ema", "gradient"))
        within("generator.", self, codes=(2, 2**16), width=(2, WIDTH), dim=(1, WIDTH), blocks=(0, 100))
        within("generator.", self, residual_width=(1, WIDTH))
        within("generator.", self, epochs=(1, PASSES), lr_halving=NOT_NEGATIVE)
        within("generator.", self, beta=NOT_NEGATIVE_FINITE, decay=FRACTION)

    @property
    def dp_passes(self) -> int:
        """One for each epoch."""
        return self.epochs

    @property
    def dp_fault(self) -> str:
        """Running means mix examples."""
        if self.codebook == "gradient":
            return ""
        return (
            "under differential privacy no layer may mix examples, and running means do; got "
            f"generator.codebook={self.codebook}: choose generator.codebook=gradient"
        )


TOP = 8  # pixels of a top code's side; a bottom code has half of them


def build_generator(config: VQVAE2Config, channels: int, size: int, seed: int) -> VQVAE2:
    """Build a generator for images of `size` x `size` pixels; a mask is one more channel.

    It is on the CPU, in training mode. Its fresh weights depend on the seed alone; PyTorch's global rng is left as it
    was.
    """
    with seeded(seed), torch.device("cpu"):
        return VQVAE2(config, channels, size)


class VQVAE2(nn.Module):
    """A model that turns images into codes and codes into images; built by `build_generator`.

    No layer mixes examples; with codebook=gradient neither do the codebooks. While it is trained, weights and running
    statistics travel as `state_dict`. A receiver of codes needs `decoder_state_dict` only.

    Attributes
    ----------
    grids : tuple of (int, int)
        Height and width of each level's codes, the top's first; an image has N = Σ height · width codes.
    codebook_size : int
        Every code lies in [0, codebook_size).
    """

    decodes = re.compile(r"decoder\.|(top|bottom)\.(vectors\.weight|quantiser\._codebook\.embed)$")

    def __init__(self, config: VQVAE2Config, channels: int, size: int) -> None:
        super().__init__()
        padded = -(-size // TOP) * TOP
        width, dim, side = config.width, config.dim, padded // TOP
        self.size, self.before, self.after = size, (padded - size) // 2, (padded - size + 1) // 2
        self.grids = (side, side), (2 * side, 2 * side)
        self.codebook_size, self.beta = config.codes, config.beta
        halved, residual = width // 2, (config.blocks, config.residual_width)
        self.encoder = nn.Sequential(
            _down(channels, halved), nn.ReLU(), _down(halved, width), nn.ReLU(), *_body(width, width, *residual)
        )
        self.encoder_top = nn.Sequential(_down(width, halved), nn.ReLU(), *_body(halved, width, *residual))
        self.to_top = nn.Conv2d(width, dim, 1)
        self.from_top = nn.Sequential(*_body(dim, width, *residual), _up(width, dim))
        self.to_bottom = nn.Conv2d(width + dim, dim, 1)
        self.top = _codebook(config, side**2)
        self.bottom = _codebook(config, 4 * side**2)
        self.decoder = Decoder(dim, width, *residual, channels)
        # After PyTorch's own initialisation features hardly differ between images: all of them round to one code.
        for network in (self.encoder, self.encoder_top, self.to_top, self.to_bottom):
            for layer in network.modules():
                if isinstance(layer, nn.Conv2d):
                    nn.init.kaiming_normal_(layer.weight)

    def loss(self, x_BCHW: Tensor, rng: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of a batch; in training mode, running statistics move too.

        Parameters
        ----------
        x_BCHW : Tensor
            Images in [0, 1], float32.
        rng : torch.Generator
            On the CPU; all randomness of the step comes from it.

        Returns
        -------
        loss : Tensor
            Mean over the examples, a scalar.
        terms : dict of str to Tensor
            Detached scalars: `reconstruction` (mean squared error of pixels in [0, 1]), `commitment`, `codebook`, and
            the perplexities of this batch's codes, `perplexity-top` and `perplexity-bottom`.
        """
        seed = int(torch.randint(2**62, (), generator=rng))
        with seeded(seed, x_BCHW.device):  # the EMA codebooks' draws
            e_top, e_bottom, codes, commitment, codebook = self._rounded(x_BCHW, learn=True)
        reconstruction = F.mse_loss(self._decoded(e_top, e_bottom), x_BCHW)
        top, bottom = by_level(codes, self.grids)
        terms = {
            "reconstruction": reconstruction,
            "commitment": commitment,
            "codebook": codebook,
            "perplexity-top": perplexity(top, self.codebook_size),
            "perplexity-bottom": perplexity(bottom, self.codebook_size),
        }
        loss = 4 * reconstruction + codebook + self.beta * commitment
        return loss, {name: term.detach() for name, term in terms.items()}

    @torch.no_grad()
    def encode(self, x_BCHW: Tensor) -> Tensor:
        """Encode images in [0, 1]: codes (B, N) int64, level by level, row by row; nothing is learned."""
        return self._rounded(x_BCHW, learn=False)[2]

    @torch.no_grad()
    def decode(self, codes_BN: Tensor) -> Tensor:
        """Decode codes to images (B, C, H, W) in [0, 1]."""
        top, bottom = by_level(codes_BN, self.grids)
        return self._decoded(self.top.lookup(top), self.bottom.lookup(bottom)).clamp(0, 1)

    @property
    def codes_per_image(self) -> int:
        """N."""
        return sum(height * width for height, width in self.grids)

    def decoder_state_dict(self) -> dict[str, Tensor]:
        """Return the weights that `decode` needs and no others."""
        return {name: value for name, value in self.state_dict().items() if self.decodes.match(name)}

    def load_decoder(self, state: Mapping[str, Tensor]) -> None:
        """Copy another one's `decoder_state_dict`; raise `WireError` if its names or shapes are not this one's."""
        own = self.decoder_state_dict()
        if faults := sorted(own.keys() ^ state.keys()) or [
            name for name in own if own[name].shape != state[name].shape
        ]:
            raise WireError(
                f"a decoder must have the generator's own names and shapes; they differ at {faults[0]!r}: use the same "
                "generator.*, task.channels and task.size everywhere"
            )
        for name, value in own.items():
            value.copy_(state[name])

    def _rounded(self, x_BCHW: Tensor, learn: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return e_top, e_bottom, codes (B, N), and both levels' commitment and codebook losses, summed."""
        h = self.encoder(F.pad(x_BCHW, (self.before, self.after) * 2, mode="replicate"))
        h_top = self.to_top(self.encoder_top(h))
        e_top, top, loss_top = self.top(h_top, learn)
        h_bottom = self.to_bottom(torch.cat([self.from_top(e_top), h], dim=1))
        e_bottom, bottom, loss_bottom = self.bottom(h_bottom, learn)
        commitment = F.mse_loss(h_top, e_top.detach()) + F.mse_loss(h_bottom, e_bottom.detach())
        codes = torch.cat([top.flatten(1), bottom.flatten(1)], dim=1)
        return e_top, e_bottom, codes, commitment, loss_top + loss_bottom

    def _decoded(self, e_top: Tensor, e_bottom: Tensor) -> Tensor:
        images: Tensor = self.decoder(e_top, e_bottom)
        kept = slice(self.before, self.before + self.size)
        return images[..., kept, kept]


class Decoder(nn.Module):
    """Both levels' vectors, (B, D, h, w) and (B, D, 2h, 2w), to images (B, C, 8h, 8w)."""

    def __init__(self, dim: int, width: int, blocks: int, residual_width: int, channels: int) -> None:
        super().__init__()
        self.widen = _up(dim, dim)
        self.body = nn.Sequential(
            *_body(2 * dim, width, blocks, residual_width), _up(width, width // 2), nn.ReLU(), _up(width // 2, channels)
        )

    def forward(self, e_top: Tensor, e_bottom: Tensor) -> Tensor:
        """Map vectors to images, padding included."""
        images: Tensor = self.body(torch.cat([self.widen(e_top), e_bottom], dim=1))
        return images


class Residual(nn.Module):
    """x + conv1x1(ReLU(conv3x3(ReLU(x)))), with `inner` channels between."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.ReLU(), nn.Conv2d(width, inner, 3, padding=1), nn.ReLU(), nn.Conv2d(inner, width, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to the same shape."""
        changed: Tensor = x + self.body(x)
        return changed


def _body(inputs: int, width: int, blocks: int, inner: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, width, 3, padding=1), *(Residual(width, inner) for _ in range(blocks)), nn.ReLU()]


def _down(inputs: int, outputs: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 4, stride=2, padding=1)


def _up(inputs: int, outputs: int) -> nn.ConvTranspose2d:
    return nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1)


def _codebook(config: VQVAE2Config, positions: int) -> EMACodebook | GradientCodebook:
    if config.codebook == "gradient":
        return GradientCodebook(config.codes, config.dim)
    return EMACodebook(config.codes, config.dim, config.decay, config.batch_size * positions / config.codes)


def summed_loss(model: VQVAE2, rng: torch.Generator, x_B: Tensor) -> Tensor:
    """Return the sum of the examples' losses, their mean times their number; no loss depends on another example."""
    return model.loss(x_B, rng)[0] * len(x_B)
