"""Random changes of training images: flips and quarter turns (Pennisi et al. 2023, section IV-B.1).

`B` batch, `C` channels, `H` height, `W` width.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["augmented"]


def augmented(x_BCHW: Tensor, how: str, rng: torch.Generator) -> Tensor:
    """Flip each image left to right with probability 1/2, and with flip+rot90 also turn it by random quarters.

    Parameters
    ----------
    x_BCHW : Tensor
        Images; quarter turns need H = W.
    how : str
        none | flip | flip+rot90.
    rng : torch.Generator
        On the CPU.
    """
    if how == "none":
        return x_BCHW
    device, shape = x_BCHW.device, (len(x_BCHW), 1, 1, 1)
    flipped = (torch.rand(shape, generator=rng) < 0.5).to(device)
    x_BCHW = torch.where(flipped, x_BCHW.flip(3), x_BCHW)
    if how == "flip+rot90":
        turns = torch.randint(4, shape, generator=rng).to(device)
        for turn in (1, 2, 3):
            x_BCHW = torch.where(turns == turn, x_BCHW.rot90(turn, (2, 3)), x_BCHW)
    return x_BCHW
