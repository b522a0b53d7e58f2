"""Distances of images in pixels."""

from __future__ import annotations

import torch
from torch import Tensor

from flwr_replay.generators.base import AT_ONCE

__all__ = ["distances"]


def distances(a_A: Tensor, b_B: Tensor) -> Tensor:
    """Return Euclidean distances (A, B) of images or latents (A, ...) and (B, ...), float64.

    Each is computed from differences: a matrix product would round small distances, and the nearest is what counts.
    """
    b_BF = b_B.flatten(1).double()
    parts = torch.split(a_A.flatten(1).double(), AT_ONCE)
    return torch.cat([torch.cdist(a_AF, b_BF, compute_mode="donot_use_mm_for_euclid_dist") for a_AF in parts])
