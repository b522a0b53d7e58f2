"""Random changes of training images; an image's change depends on this image and its own draws only.

    flip      left to right, with probability 1/2
    rot90     by 0, 1, 2 or 3 quarters, with flip as Pennisi et al. 2023, section IV-B.1
    rotate    by up to 15 degrees to either side
    shift     by up to a tenth of height and width
    crop      a share of 60 to 100 % of the area, its sides 3:4 to 4:3, resized to the whole (random resized crop)

They come in this order. Rotations and shifts are one affine map, bilinear; black comes in at the border. Resizing is
bilinear and antialiased (torchvision.transforms.v2). Masks move with their images, by the nearest pixel.

`B` batch, `C` channels, `H` height, `W` width.
"""

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

__all__ = ["Augment", "augment_of", "augmented", "changed"]

Augment = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Uniform = Callable[[int, int], Tensor]  # from examples and numbers to (examples, numbers) in [0, 1), float32

DEGREES = 15.0
SHIFT = 0.1  # of height and of width
AREA = 0.6  # the least share that is kept
RATIO = 4 / 3  # of height to width, and the other way round
DRAWS = 7  # angle, right, down, area, ratio, top, left


def augmented(
    x_BCHW: Tensor, y_B: Tensor, changes: Sequence[str], rng: torch.Generator | Uniform
) -> tuple[Tensor, Tensor]:
    """Change each image at random, and masks with their images; other labels stay.

    Parameters
    ----------
    x_BCHW : Tensor
        Images, float; quarter turns need H = W.
    y_B : Tensor
        Labels, (B,), or masks, (B, H, W).
    changes : sequence of str
        flip, rot90, rotate, shift, crop, as in `TrainingConfig.changes`.
    rng : torch.Generator or Uniform
        On the CPU. Every image takes as many draws, whatever it shows. A generator has 32 bits of its seed, which can
        be tried out: secret draws come from a `Uniform`.
    """
    masks = y_B.ndim == 3
    if "flip" in changes:
        flipped = _drawn(rng, len(x_BCHW), 1)[..., None, None] < 0.5
        x_BCHW = torch.where(flipped.to(x_BCHW.device), x_BCHW.flip(3), x_BCHW)
        y_B = torch.where(flipped[:, 0].to(y_B.device), y_B.flip(2), y_B) if masks else y_B
    if "rot90" in changes:
        turns = _drawn(rng, len(x_BCHW), 1, among=4)[..., None, None]
        for turn in (1, 2, 3):
            x_BCHW = torch.where((turns == turn).to(x_BCHW.device), x_BCHW.rot90(turn, (2, 3)), x_BCHW)
            y_B = torch.where((turns == turn)[:, 0].to(y_B.device), y_B.rot90(turn, (1, 2)), y_B) if masks else y_B
    if not {"rotate", "shift", "crop"} & set(changes) or not len(x_BCHW):
        return x_BCHW, y_B
    draws = _drawn(rng, len(x_BCHW), DRAWS).tolist()
    x_BCHW = torch.stack([_moved(x_CHW, draw, changes) for x_CHW, draw in zip(x_BCHW, draws, strict=True)])
    if masks:
        y_B = torch.stack(
            [_moved(y_HW[None], draw, changes, mask=True)[0] for y_HW, draw in zip(y_B, draws, strict=True)]
        )
    return x_BCHW, y_B


def augment_of(changes: Sequence[str], draws: Callable[[], torch.Generator | Uniform]) -> Augment | None:
    """Return what changes the batches of one training, with a generator from `draws`; None if there are no changes."""
    return partial(augmented, changes=changes, rng=draws()) if changes else None


def changed(batches: Iterator[tuple[Tensor, Tensor]], augment: Augment | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every batch of images and labels, changed at random; None: as it is."""
    return (augment(x_B, y_B) for x_B, y_B in batches) if augment else batches


def _drawn(rng: torch.Generator | Uniform, examples: int, numbers: int, among: int = 0) -> Tensor:
    """Draw numbers in [0, 1), or whole numbers below `among`."""
    if isinstance(rng, torch.Generator):
        shape = (examples, numbers)
        return torch.randint(among, shape, generator=rng) if among else torch.rand(shape, generator=rng)
    drawn = rng(examples, numbers)
    return (drawn * among).long() if among else drawn


def _moved(image_CHW: Tensor, draws: Sequence[float], changes: Sequence[str], mask: bool = False) -> Tensor:
    """Rotate, shift and crop one image, or its mask."""
    transforms = importlib.import_module("torchvision.transforms.v2")  # which takes long
    functional, modes = transforms.functional, transforms.InterpolationMode
    mapped, resized = (modes.NEAREST, modes.NEAREST_EXACT) if mask else (modes.BILINEAR, modes.BILINEAR)
    angle, right, down, area, ratio, top, left = draws
    height, width = image_CHW.shape[1:]
    if {"rotate", "shift"} & set(changes):
        degrees = DEGREES * (2 * angle - 1) if "rotate" in changes else 0.0
        pixels = [round(SHIFT * (2 * drawn - 1) * side) for drawn, side in ((right, width), (down, height))]
        pixels = pixels if "shift" in changes else [0, 0]
        image_CHW = functional.affine(image_CHW, degrees, pixels, 1.0, [0.0, 0.0], mapped)
    if "crop" in changes:
        share, form = AREA + (1 - AREA) * area, RATIO ** (2 * ratio - 1)
        high = max(1, min(height, round(height * math.sqrt(share * form))))
        wide = max(1, min(width, round(width * math.sqrt(share / form))))
        corner = int(top * (height - high + 1)), int(left * (width - wide + 1))
        image_CHW = functional.resized_crop(image_CHW, *corner, high, wide, [height, width], resized, antialias=True)
    return image_CHW
