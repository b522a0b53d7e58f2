"""Look for the images that would have sent what was sent: steps on pixels in [0, 1], from several random starts.

Source: Qu et al. 2022, section 3.3.1, eq. 1 and 2: a mismatch between messages plus α times the total variation. They
use AdamW with 20,000 iterations; α is not given. Here it is chosen on auxiliary images (`tuned`), never on a victim's.

Deviations: pixels are kept in [0, 1] after every step, and the rate falls to a tenth after 3/8, 5/8 and 7/8 of the
steps (both as in Geiping et al. 2020, arXiv 2003.14053). AdamW's weight decay is 0, since it would darken the images.

`B` batch, `C` channels, `H` height, `W` width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_replay.attacks.distances import distances
from flwr_replay.learning.training import torch_rng
from flwr_replay.models.layers import as_input

__all__ = ["Search", "minimise", "total_variation", "tuned"]


@dataclass(frozen=True, kw_only=True)
class Search:
    """How an attack looks for images; all of it is the attacker's own choice."""

    alpha: float = 1e-3  # weight of the total variation; the mismatch is 1 for a message of nothing
    steps: int = 400  # the paper: 20,000
    lr: float = 0.3  # of AdamW, range of pixels per step at first
    restarts: int = 1  # random starts, of which the one with the least objective is kept
    signs: bool = False  # step on the signs of the gradient only (Geiping et al. 2020)
    statistics: float = 0.0  # weight of batch norm's statistics, where they came back; of gradients and weights only


def minimise(
    objective: Callable[[Tensor], Tensor], shape: Sequence[int], search: Search, seed: int, device: torch.device
) -> Tensor:
    """Return images with a small objective.

    `objective` is from images (B, C, H, W) to one number for each, (B,), or to one number for all, a scalar: of the
    restarts, the best is kept for each image or for all together. Images are in [0, 1], float32, of this shape.
    """
    best_BCHW = torch.full(tuple(shape), 0.5, device=device)
    least = objective(best_BCHW).detach()  # a grey image, which no restart may fall behind
    for restart in range(search.restarts):
        x = torch.rand(tuple(shape), generator=torch_rng(seed, "restart", restart)).to(device).requires_grad_()
        optimizer = torch.optim.AdamW([x], lr=search.lr, weight_decay=0.0)
        milestones = [search.steps * eighths // 8 for eighths in (3, 5, 7)]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.1)
        for _ in range(search.steps):
            (x.grad,) = torch.autograd.grad(objective(x).sum(), x)
            if search.signs:
                x.grad.sign_()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                x.clamp_(0, 1)
        values = objective(x).detach()
        better = values < least
        best_BCHW = torch.where(better.reshape(-1, 1, 1, 1), x.detach(), best_BCHW)
        least = torch.where(better, values, least)
    return best_BCHW


def total_variation(x_BCHW: Tensor) -> Tensor:
    """Return each image's total variation, (B,): mean absolute difference of neighbours, down plus right (anisotropic;
    Rudin et al. 1992). An image of one pixel has none.
    """
    down = (x_BCHW[:, :, 1:] - x_BCHW[:, :, :-1]).abs().flatten(1)
    right = (x_BCHW[:, :, :, 1:] - x_BCHW[:, :, :, :-1]).abs().flatten(1)
    return (down.sum(1) + right.sum(1)) / max(1, down.shape[1])


def tuned(candidates: Sequence[Search], attack: Callable[[Search], Tensor], auxiliary_BCHW: Tensor) -> Search:
    """Choose α, steps and restarts by attacking messages that the attacker has made of auxiliary images.

    `attack` is from settings to reconstructions of the auxiliary images, in any order: the attack on messages that
    these images give when they are sent through the same model. Returns the candidate with the least mean squared
    distance from an auxiliary image to the nearest reconstruction; of equally good ones the first.
    """
    right_BCHW = as_input(auxiliary_BCHW)

    def distance(search: Search) -> float:
        return float(distances(right_BCHW, attack(search).to(right_BCHW)).amin(1).square().mean())

    return min(candidates, key=distance)
