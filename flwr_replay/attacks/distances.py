"""Distances of images in pixels."""

import torch
from torch import Tensor

from flwr_replay.generators.base import AT_ONCE

__all__ = ["distances", "nearest"]

NEAR = 1e-6  # of the squared lengths: below it a matrix product rounds too much
TIE = 1e-9  # copies of an image are equally near, whatever a matrix product rounds


def distances(a_A: Tensor, b_B: Tensor) -> Tensor:
    """Return Euclidean distances (A, B) of images or latents (A, ...) and (B, ...), float64.

    By a matrix product, ten times as fast; small ones from differences, since the nearest is what counts.
    """
    a_AF, b_BF = a_A.flatten(1).double(), b_B.flatten(1).double()
    return torch.cat([_distances(batch_BF, b_BF) for batch_BF in torch.split(a_AF, AT_ONCE)])


def nearest(distances_AB: Tensor) -> Tensor:
    """Say for each of A which of B are nearest to it, bool (A, B); copies of an image are nearest together."""
    return distances_AB <= distances_AB.amin(1, keepdim=True) * (1 + TIE)


def _distances(a_AF: Tensor, b_BF: Tensor) -> Tensor:
    lengths_AB = a_AF.square().sum(1)[:, None] + b_BF.square().sum(1)
    squared_AB = torch.addmm(lengths_AB, a_AF, b_BF.T, alpha=-2)
    near_AB = squared_AB < NEAR * lengths_AB
    few = int(near_AB.sum()) <= len(a_AF) + len(b_BF)
    if not few or not bool(squared_AB.isfinite().all()):  # NaN or infinite pixels spoil only their own distances
        return torch.cdist(a_AF, b_BF, compute_mode="donot_use_mm_for_euclid_dist")
    rows, columns = torch.nonzero(near_AB, as_tuple=True)
    squared_AB[rows, columns] = (a_AF[rows] - b_BF[columns]).square().sum(1)
    return squared_AB.sqrt()
