"""The privacy loss of FedER's generator, its second step of training (Pennisi et al. 2023, section III-B, eq. 3).

The paper penalises synthetic images that look like real ones. Eq. 3, as it is printed, is the sum of their *distances*:
minimising that pulls synthetic images towards real ones. So here a distance below a margin m is penalised. The paper
has no margin and no weight λ.

    m: the median, over real images, of the distance to the nearest other real image
    nearest: λ · mean over synthetic s of max(0, 1 − min over all own real r of d(r, s) / m)
    pairs:   λ · 1/b · Σ over the batch's real r, synthetic s of max(0, 1 − d(r, s) / m)
    printed: λ · 1/b · Σ over the batch's real r, synthetic s of d(r, s) / m                      # eq. 3 over m

The loss is evidence of distance, and no guarantee: no (ε, δ) follows from it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from flwr_replay.generators.base import Look
from flwr_replay.generators.perceptual import nearest, nearest_other, squared_distances

__all__ = ["KINDS", "PrivacyLoss"]

KINDS = ("none", "nearest", "pairs", "printed")


class PrivacyLoss:
    """A loss on synthetic images that look like an institution's own.

    Its kind is one of `KINDS` but none, and distance is by `look`. `images_nCHW` are all of the institution's images,
    uint8 or in [0, 1]. The attribute `margin` is m.
    """

    def __init__(self, kind: str, look: Look, images_nCHW: Tensor, device: torch.device) -> None:
        self.kind, self.look = kind, look
        self.own_nF = look.embed_all(images_nCHW, device)
        # Identical images would make a margin of 0, under which nothing is too near.
        self.margin = max(float(nearest_other(self.own_nF).median()), 1e-6)

    def __call__(self, synthetic_BCHW: Tensor, rows_B: Tensor) -> Tensor:
        """Return the loss without λ, a scalar; `rows_B` are the own images in the batch."""
        s_BF = self.look.embed(synthetic_BCHW)
        if self.kind == "nearest":
            return F.relu(1 - nearest(s_BF, self.own_nF) / self.margin).mean()
        distances_BB = squared_distances(s_BF, self.own_nF[rows_B]) / self.margin
        summed = F.relu(1 - distances_BB) if self.kind == "pairs" else distances_BB
        return summed.sum() / len(rows_B)
