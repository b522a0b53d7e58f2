"""Adaptive discriminator augmentation (Karras et al. 2020, arXiv 2006.06676), for small data sets.

Every image that the discriminator sees is changed with probability p, real and generated ones alike. p rises while the
discriminator is sure of the real images, r = E[sign D(x)] > 0.6, and falls otherwise.

Deviations: The changes are flips, quarter turns, shifts, scaling, rotation, brightness and contrast; the paper has
colour rotations and filters too.

`B` batch, `C` channels, `H` height, `W` width.
"""

from math import pi

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["TARGET", "adapted", "augmented"]

TARGET = 0.6  # of r
SHIFT = 0.125  # of an image's side, at most
SCALE = 0.2  # standard deviation of the logarithm (base 2) of the size
BRIGHTNESS = 0.2  # standard deviation; images lie in [-1, 1]
CONTRAST = 0.5  # standard deviation of the logarithm (base 2) of the factor


def adapted(p: float, sign: float, images: int, images_per_unit: float) -> float:
    """Return the next p, in [0, 1].

    `sign` is r, the mean of sign D(x) over real images. The discriminator has seen so many images since p was adapted
    last; in `images_per_unit` real ones p rises from 0 to 1 at most.

    >>> adapted(0.5, 0.9, 100, 1000), adapted(0.5, 0.1, 100, 1000), adapted(0.0, 0.1, 100, 1000)
    (0.6, 0.4, 0.0)
    """
    step = images / images_per_unit * (1 if sign > TARGET else -1)
    return min(1.0, max(0.0, p + step))


def augmented(x_BCHW: Tensor, p: float, rng: torch.Generator) -> Tensor:
    """Change images in [-1, 1], each change with probability p; with p = 0 they are returned as they are.

    `rng` is on the CPU; its draws do not depend on p.
    """
    B, device = len(x_BCHW), x_BCHW.device

    def chosen() -> Tensor:
        return torch.rand(B, generator=rng) < p

    def normal(scale: float) -> Tensor:
        return torch.randn(B, generator=rng) * scale * chosen()

    flip = 1 - 2.0 * ((torch.rand(B, generator=rng) < 0.5) & chosen())
    turn = torch.randint(4, (B,), generator=rng) * chosen() * (pi / 2)
    angle = turn + (torch.rand(B, generator=rng) * 2 - 1) * pi * chosen()
    shift_B2 = (torch.rand(B, 2, generator=rng) * 2 - 1) * 2 * SHIFT * chosen()[:, None]
    size = 2 ** normal(SCALE)
    brightness, contrast = normal(BRIGHTNESS), 2 ** normal(CONTRAST)
    if p == 0:
        return x_BCHW
    cos, sin = torch.cos(angle) * size, torch.sin(angle) * size
    rows = [torch.stack([cos * flip, -sin, shift_B2[:, 0]], 1), torch.stack([sin * flip, cos, shift_B2[:, 1]], 1)]
    grid = F.affine_grid(torch.stack(rows, 1).to(device), list(x_BCHW.shape), align_corners=False)
    moved = F.grid_sample(x_BCHW, grid, padding_mode="reflection", align_corners=False)
    factor, offset = (draws_B.to(device)[:, None, None, None] for draws_B in (contrast, brightness))
    return moved * factor + offset
