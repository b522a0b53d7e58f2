"""Labels from gradients at the cut, where the labels themselves stay at the institution (SplitNN, share-labels=false).

The server has sent the head's input s to the institution, gets ∂L/∂s back, and has handed the head on from institution
to institution itself. It tries every class: the label is the one whose gradient points in the direction of the one that
came back (Erdoğan et al. 2022, UnSplit, arXiv 2108.09033, section 3.3).

What is approximate: the institution's head steps after every batch. Only the head of the visit's beginning is known.

`B` batch, `F` numbers of an example at the cut, `C` classes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["labels_at_cut"]


def labels_at_cut(
    head: nn.Module,
    inputs_B: Tensor,
    gradients_B: Tensor,
    losses: Callable[[Tensor, Tensor], Tensor],
    classes: int,
) -> Tensor:
    """Infer labels from the gradients at a head's input.

    Parameters
    ----------
    head : nn.Module
        What follows the cut at the institution. Its layers must not mix examples; it is run in evaluation mode.
    inputs_B : Tensor
        What the head got, (B, ...).
    gradients_B : Tensor
        ∂L/∂s as it came back, (B, ...). Its scale, such as 1 / B, does not matter.
    losses : callable
        From outputs and labels to each example's loss, (B,).
    classes : int
        C.

    Returns
    -------
    Tensor
        (B,), int64: the classes whose gradients have the largest cosine with those that came back.
    """
    head = copy.deepcopy(head).eval()
    cosines = []
    for label in range(classes):
        s_B = inputs_B.detach().clone().requires_grad_()
        labels_B = torch.full((len(s_B),), label, device=s_B.device)
        (gradient_B,) = torch.autograd.grad(losses(head(s_B), labels_B).sum(), s_B)
        cosines.append(F.cosine_similarity(gradient_B.flatten(1), gradients_B.flatten(1), eps=1e-20))
    return torch.stack(cosines, dim=1).argmax(1)
