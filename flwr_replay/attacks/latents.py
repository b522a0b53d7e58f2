"""Images from latents: what FedReplay uploads once, SplitNN's institutions in every batch; and from codes.

Whoever receives latents has the encoder, too (Qu et al. 2022, section 3.3.1: "white-box").

invert             arg min over x̃ of ‖E(x̃) − E(x)‖² / ‖E(x)‖² + α TV(x̃): eq. 2 (He et al. 2019), by AdamW
learned_decoder    a network that learned to undo E on auxiliary images (He et al. 2019, section 4.2)
nearest_auxiliary  the auxiliary image with the most similar latents: what a mere look-up finds

decoded            the images of a VQ-VAE-2's codes: they are a small picture of the image, with the decoder that
                   travelled as their key (Razavi et al. 2019, arXiv 1906.00446; Qu et al. 2022, Algorithm 1)

Eq. 2 is divided by ‖E(x)‖², so that one α suits all cuts.

Latents come as float32, as `flwr_replay.learning.latents.unpack` returns them. An encoder is used as it stands, in
training or evaluation mode. FedReplay's latents were made in evaluation mode. SplitNN's were made in training mode, so
with batch norm (`mixes`) they are attacked one batch at a time, as they were made. The encoder given is not changed.

`n` images, `B` batch, `C` channels, `H` height, `W` width, `F` numbers of an image's latents.
"""

import copy
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_replay.attacks.distances import distances
from flwr_replay.attacks.search import Search, minimise, total_variation
from flwr_replay.generators.autoencoder import VQVAE2
from flwr_replay.generators.base import AT_ONCE
from flwr_replay.generators.codes import unpack_codes
from flwr_replay.learning.latents import ROWS_TOGETHER, pack, unpack
from flwr_replay.learning.training import at_once, batches, torch_rng
from flwr_replay.models import has_batch_norm
from flwr_replay.models.layers import as_input
from flwr_replay.models.seeding import seeded
from flwr_replay.rng import derived_seed

__all__ = ["LatentDecoder", "decoded", "invert", "latents_of", "learned_decoder", "mixes", "nearest_auxiliary"]

BATCH = 64  # examples of a decoder's step
WIDTH, NARROWEST = 64, 16  # its channels at the latents' size; every doubling of the size halves them


def mixes(encoder: nn.Module) -> bool:
    """Say whether an image's latents depend on the others in its batch: batch norm in training mode."""
    return encoder.training and has_batch_norm(encoder)


def latents_of(encoder: nn.Module, images_nCHW: Tensor, dtype: str = "float32", batch: int = ROWS_TOGETHER) -> Tensor:
    """Send auxiliary images through the encoder, and through the rounding that the victim's latents had.

    Images are uint8 or in [0, 1], on the encoder's device; latents (n, ...) float32. They travel as float32, float16 or
    int8. So many images as `batch` pass the encoder together, which matters where it `mixes` them.
    """
    encoder = _frozen(encoder)
    with torch.no_grad():
        batches = [encoder(as_input(x_BCHW)) for x_BCHW in torch.split(images_nCHW, batch)]
    latents: Tensor = torch.from_numpy(unpack(*pack(torch.cat(batches), dtype))).to(images_nCHW.device)
    return latents


def invert(encoder: nn.Module, latents_n: Tensor, form: tuple[int, int, int], search: Search, seed: int) -> Tensor:
    """Look for images with these latents: eq. 2.

    Latents are (n, ...) float32, on the encoder's device; `form` is (C, H, W) of an image. Choose α, steps and restarts
    by `flwr_replay.attacks.search.tuned`. Images are (n, C, H, W) in [0, 1].
    """
    encoder = _frozen(encoder)
    together = mixes(encoder)
    size = len(latents_n) if together else at_once(torch.empty(1, *form), AT_ONCE)
    images = []
    for batch, latents_B in enumerate(torch.split(latents_n, size)):
        objective = _mismatch(encoder, latents_B, search.alpha, together)
        seed_of_batch = derived_seed(seed, "part", batch)
        images.append(minimise(objective, (len(latents_B), *form), search, seed_of_batch, latents_B.device))
    return torch.cat(images)


class LatentDecoder(nn.Module):
    """Maps latents to images: the mean auxiliary image plus what convolutions make of the latents, cut off to [0, 1].

    Nothing is squashed by a sigmoid: under squared error that saturates on images that are mostly black. The mean and
    spread of auxiliary latents, (n, F) or maps (n, K, h, w), standardise what is decoded.
    """

    mean: Tensor
    scale: Tensor
    blank_CHW: Tensor

    def __init__(self, latents_n: Tensor, images_nCHW: Tensor) -> None:
        super().__init__()
        self.size = tuple(images_nCHW.shape[2:])
        shape = latents_n.shape[1:]
        self.register_buffer("mean", latents_n.mean(0))
        spread = latents_n.var(0, unbiased=False)
        self.register_buffer("scale", (spread.mean((1, 2), keepdim=True) if spread.ndim == 3 else spread).sqrt() + 1e-6)
        self.register_buffer("blank_CHW", images_nCHW.mean(0))
        if len(shape) == 3 and shape[1] > 1:
            self.first: nn.Module = nn.Conv2d(shape[0], WIDTH, 3, padding=1)
            side = shape[1]
        else:  # no place is left: spread all numbers over a quarter of the image's size
            side = -(-self.size[0] // 4)
            fc = nn.Linear(shape.numel(), WIDTH * side**2)
            self.first = nn.Sequential(nn.Flatten(), fc, nn.Unflatten(1, (WIDTH, side, side)))
        layers: list[nn.Module] = [nn.ReLU()]
        width = WIDTH
        while side < self.size[0]:
            side, inputs, width = 2 * side, width, max(NARROWEST, width // 2)
            layers += [nn.ConvTranspose2d(inputs, width, 4, stride=2, padding=1), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.last = nn.Conv2d(width, images_nCHW.shape[1], 3, padding=1)

    def forward(self, latents_B: Tensor) -> Tensor:
        """Return images (B, C, H, W), not yet cut off, as they are trained."""
        maps = self.body(self.first((latents_B - self.mean) / self.scale))
        change: Tensor = self.last(F.interpolate(maps, size=self.size))
        return self.blank_CHW + change

    @torch.no_grad()
    def images(self, latents_n: Tensor) -> Tensor:
        """Return images (n, C, H, W) in [0, 1] of latents (n, ...)."""
        return torch.cat([self(latents_B).clamp(0, 1) for latents_B in torch.split(latents_n, BATCH)])


def learned_decoder(latents_n: Tensor, images_nCHW: Tensor, steps: int, seed: int, lr: float = 2e-3) -> LatentDecoder:
    """Train a decoder on auxiliary images and their `latents_of`: Adam on the mean squared error.

    A step takes a batch of 64. Adam's rate per step falls to 0 along a cosine. Images are uint8 or in [0, 1].
    """
    images_nCHW = as_input(images_nCHW).to(latents_n.device)
    with seeded(derived_seed(seed, "decoder")), torch.device("cpu"):
        decoder = LatentDecoder(latents_n.cpu(), images_nCHW.cpu())
    decoder.to(latents_n.device)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    shuffle, taken = torch_rng(seed, "decoder", "batches"), 0
    rows = torch.arange(len(latents_n), device=latents_n.device)
    while taken < steps:
        for latents_B, rows_B in batches(latents_n, rows, BATCH, shuffle, only=slice(steps - taken)):
            optimizer.zero_grad()
            F.mse_loss(decoder(latents_B), images_nCHW[rows_B]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            taken += 1
    return decoder.requires_grad_(False)


def nearest_auxiliary(latents_n: Tensor, auxiliary_latents_M: Tensor, auxiliary_MCHW: Tensor) -> Tensor:
    """Return for each of the victim's latents (n, ...) the auxiliary image with the nearest latents, (n, C, H, W)."""
    nearest_n = distances(latents_n, auxiliary_latents_M).argmin(1)
    return as_input(auxiliary_MCHW.to(latents_n.device)[nearest_n])


def decoded(generator: VQVAE2, packed: NDArray[np.uint8]) -> Tensor:
    """Decode the codes of a message, (n, bytes), as every receiver does to replay them: (n, C, H, W) in [0, 1]."""
    codes = torch.from_numpy(unpack_codes(packed, generator.codes_per_image, generator.codebook_size))
    device = next(iter(generator.state_dict().values())).device
    return torch.cat([generator.decode(batch.to(device)) for batch in torch.split(codes, AT_ONCE)])


def _mismatch(encoder: nn.Module, latents_B: Tensor, alpha: float, together: bool) -> Callable[[Tensor], Tensor]:
    """Return eq. 2 as a function of images: for each of them, or summed if they are to be judged together."""
    squares_B = latents_B.flatten(1).square().sum(1).clamp(min=1e-12)

    def objective(x_BCHW: Tensor) -> Tensor:
        mismatch_B: Tensor = (encoder(x_BCHW) - latents_B).flatten(1).square().sum(1) / squares_B
        losses_B = mismatch_B + alpha * total_variation(x_BCHW)
        return losses_B.sum() if together else losses_B

    return objective


def _frozen(encoder: nn.Module) -> nn.Module:
    """Copy an encoder, with its mode; the copy's weights need no gradients, and its statistics may move."""
    return copy.deepcopy(encoder).requires_grad_(False)
