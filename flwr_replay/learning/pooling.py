"""Two classifiers as one: a logarithmic opinion pool, with weights that fit examples which the first has not seen.

Source: Genest and Zidek 1986 (doi 10.1214/ss/1177013825), section 3; a product of experts, Hinton 2002.

    log p(y | x) = a log f(y | x) + b log h(y | x) + constant

A model that is unsure about an example leaves it to the other. With b = 0 it is f's answer, with a = 0 it is h's.
Cross-entropy rewards doubt, so the least one alone can have fewer right answers than one half has by itself.

Legend: N examples, C classes.
"""

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from flwr_replay.learning.training import at_once
from flwr_replay.models.layers import as_input

__all__ = ["Pool", "weights_of"]

OWN = (1.0, 0.5, 0.25, 0.1, 0.0)  # candidates for a: networks that were trained to the end are too sure of themselves
OTHERS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)  # candidates for b


class Pool(nn.Module):
    """The pool of two classifiers; its outputs are logits."""

    def __init__(self, own: nn.Module, other: nn.Module, weights: tuple[float, float]) -> None:
        super().__init__()
        self.own, self.other, self.weights = own, other, weights

    @classmethod
    def fitted(cls, own: nn.Module, other: nn.Module, x: Tensor, y: Tensor) -> Self:
        """Pool two classifiers with the weights that fit examples (N, ...) and their labels (N,)."""
        return cls(own, other, weights_of(_logits(own, x), _logits(other, x), y))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C)."""
        halves = zip(self.weights, (self.own, self.other), strict=True)
        logits: list[Tensor] = [weight * model(x) for weight, model in halves if weight]
        return torch.stack(logits).sum(0)  # logits and log-probabilities differ by a constant for each example


def _logits(model: nn.Module, x: Tensor) -> Tensor:
    model.eval()
    with torch.inference_mode():
        return torch.cat([model(as_input(x_B)) for x_B in torch.split(x, at_once(x, 512, model))])


def weights_of(f_NC: Tensor, h_NC: Tensor, y_N: Tensor) -> tuple[float, float]:
    """Choose a and b by the least mean cross-entropy of those pools that are right as often as the better half.

    Of equals the first, which listens least. Logits are (N, C), labels (N,) int64.

    >>> sure, wrong = torch.tensor([[9.0, 0.0], [0.0, 9.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> weights_of(sure, wrong, torch.tensor([0, 1]))
    (1.0, 0.0)
    """
    candidates = [(a, b) for b in OTHERS for a in OWN if a or b]
    pools = [a * f_NC + b * h_NC for a, b in candidates]
    right = torch.stack([(pool.argmax(1) == y_N).sum() for pool in pools])
    least = max(right[candidates.index(half)] for half in ((1.0, 0.0), (0.0, 1.0)))
    losses = torch.stack([functional.cross_entropy(pool, y_N) for pool in pools])
    return candidates[int(losses.masked_fill(right < least, torch.inf).argmin())]
