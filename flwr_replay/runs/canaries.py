"""Canaries inside an institution's training: examples that are in by a fair coin, and scores that say which were.

A canary that is out keeps its row. So |D|, the sampling rate and the number of steps are the same either way, and the
two data sets are neighbours as the account means it: one has an example more, and their number is taken as known.

Here are canaries that are gradients. In place of its row's gradient, a canary that is in adds a vector of ten times the
clipping norm to each step for which its row is drawn. It is clipped with the examples' own code. The auditor sees the
noisy sums, and is told which part of them the real examples had: their masks are drawn independently, so epsilon holds
against such an auditor, too. This tests sampling, clipping, noise and accounting. It does not test whether an example's
gradient depends on that example alone.

No option and no message leads here. `flwr_replay.client_app` must not import this room, as the import contract says.

`m` canaries, `D` rows of the institution, `d` parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log, log1p, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_replay.config.sections import require
from flwr_replay.institution.budget import DPTraining
from flwr_replay.learning.training import torch_rng
from flwr_replay.privacy.accounting import SampledGaussian
from flwr_replay.privacy.dpsgd import add_clipped, trained_parameters
from flwr_replay.privacy.secret import Stream
from flwr_replay.rng import derived_rng

__all__ = ["Canaries", "Directions", "GradientCanaries"]

BEFORE_CLIPPING = 10.0  # norm of a canary's gradient, in units of C: so clipping is needed
AT_ONCE = 2**24  # numbers in the canaries' gradients that are clipped together


@dataclass(frozen=True)
class Canaries:
    """Which rows of an institution are canaries, and how their coins fell.

    Attributes
    ----------
    rows_m : NDArray
        Row of each canary, int64 (m,).
    was_in_m : NDArray
        Whether it is in, bool (m,).
    number_D : Tensor
        Number of the canary in each row, int64 (D,); −1: none.
    """

    rows_m: NDArray[np.int64]
    was_in_m: NDArray[np.bool_]
    number_D: Tensor

    @classmethod
    def tossed(cls, canaries: int, examples: int, seed: int) -> Canaries:
        """Choose rows and toss a fair coin for each.

        Raises
        ------
        ConfigError
            If there are not more examples than canaries, or fewer than two canaries.
        """
        require(
            2 <= canaries < examples,
            f"canaries stand in rows of training examples, at least 2 and fewer than there are, {examples:,} here; got "
            f"{canaries:,}: choose fewer canaries, or an institution with more examples",
        )
        rng = derived_rng(seed, "canaries")
        rows_m = np.sort(rng.permutation(examples)[:canaries])
        number_D = torch.full((examples,), -1)
        number_D[torch.from_numpy(rows_m)] = torch.arange(canaries)
        return cls(rows_m, rng.random(canaries) < 0.5, number_D)


class Directions:
    """Unit vectors of m canaries in the space of a module's parameters, each on coordinates of its own.

    The coordinates are dealt at random over all parameters, and the signs are random.

    Parameters
    ----------
    parameters : list[Tensor]
        Those that are trained, d numbers in all, at least m.
    canaries : int
        m.
    seed : int
        Of coordinates and signs.
    """

    def __init__(self, parameters: list[Tensor], canaries: int, seed: int) -> None:
        self.shapes, self.canaries = [parameter.shape for parameter in parameters], canaries
        d, device = sum(parameter.numel() for parameter in parameters), parameters[0].device
        require(
            d >= canaries,
            f"canaries that are gradients need a parameter each; got {canaries:,} canaries and {d:,} parameters: "
            "choose fewer canaries or a larger model",
        )
        rng, each = torch_rng(seed, "directions"), d // canaries
        self.owner_d = torch.full((d,), canaries)  # the number m belongs to no canary
        self.owner_d[torch.randperm(d, generator=rng)[: each * canaries]] = torch.arange(each * canaries) % canaries
        self.owner_d = self.owner_d.to(device)
        signs_d = torch.randint(0, 2, (d,), generator=rng) * 2 - 1
        self.values_d = (signs_d / sqrt(each)).to(device)

    def gradients(self, numbers_K: Tensor) -> list[Tensor]:
        """Return the vectors of K canaries, for each parameter (K, ...)."""
        vectors_Kd = (self.owner_d == numbers_K.to(self.owner_d.device)[:, None]) * self.values_d
        parts = torch.split(vectors_Kd, [shape.numel() for shape in self.shapes], dim=1)
        return [part.reshape(len(numbers_K), *shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def products(self, vector: list[Tensor]) -> NDArray[np.float64]:
        """Return the inner product of a vector, given for each parameter, with each canary's, (m,)."""
        flat_d = torch.cat([part.flatten() for part in vector]).double() * self.values_d
        sums = torch.zeros(self.canaries + 1, dtype=torch.float64, device=flat_d.device)
        found: NDArray[np.float64] = sums.index_add_(0, self.owner_d, flat_d)[:-1].cpu().numpy()
        return found


class GradientCanaries:
    """Canaries that are gradients inside DP-SGD, scored on every noisy sum that an institution computes.

    The score of a step is the logarithm of how much likelier its sum is if the canary is in, by the charged rate and
    noise (as in Mironov, Talwar and Zhang 2019). All steps of all trainings are added up.

    Parameters
    ----------
    canaries : Canaries
        At the institution.
    seed : int
        Of their directions.

    Attributes
    ----------
    scores_m : NDArray
        Larger means in, (m,).
    """

    def __init__(self, canaries: Canaries, seed: int) -> None:
        self.canaries, self.seed = canaries, seed
        self.scores_m = np.zeros(len(canaries.rows_m))
        self._directions: dict[tuple[torch.Size, ...], Directions] = {}

    def training(self, clip: float, epoch_cost: SampledGaussian, stream: Stream, epochs: int = 1) -> DPTraining:
        """Return the DP-SGD of a charged training, with the canaries in it."""
        return _WithGradients(self, clip, epoch_cost, stream, epochs)

    def directions(self, parameters: list[Tensor]) -> Directions:
        """Return the canaries' directions, the same in all trainings of a module."""
        shapes = tuple(parameter.shape for parameter in parameters)
        if shapes not in self._directions:
            self._directions[shapes] = Directions(parameters, len(self.scores_m), self.seed)
        return self._directions[shapes]

    def saw(self, products_m: NDArray[np.float64], cost: SampledGaussian) -> None:
        """Add a step to the scores; `products_m` are the sums' inner products with the directions, in units of C."""
        likelier_m = (2 * products_m - 1) / (2 * cost.sigma**2)  # of a row that was drawn
        missed = log1p(-cost.rate) if cost.rate < 1 else -np.inf
        self.scores_m += np.logaddexp(missed, log(cost.rate) + likelier_m)


class _WithGradients(DPTraining):
    """A training whose noisy sums hold the canaries' gradients, too."""

    def __init__(self, audit: GradientCanaries, *charged: object) -> None:
        super().__init__(*charged)  # type: ignore[arg-type]
        self.audit = audit
        self.drawn, self.real = torch.empty(0, dtype=torch.int64), list[Tensor]()

    def rows(self, examples: int) -> Iterator[Tensor]:
        canaries = self.audit.canaries
        for rows in super().rows(examples):
            number_B = canaries.number_D[rows]
            drawn = number_B[number_B >= 0]
            self.drawn = drawn[torch.from_numpy(canaries.was_in_m)[drawn]]
            yield rows[number_B < 0]

    def sums(
        self, module: nn.Module, losses: Callable[..., Tensor], batch: tuple[Tensor, ...], clip: float
    ) -> tuple[list[Tensor], Tensor]:
        sums, loss = super().sums(module, losses, batch, clip)
        self.real = [summed.clone() for summed in sums]
        directions = self.audit.directions(sums)
        for numbers_K in torch.split(self.drawn, max(1, AT_ONCE // len(directions.owner_d))):
            gradients = [part * (BEFORE_CLIPPING * clip) for part in directions.gradients(numbers_K)]
            add_clipped(sums, list(gradients), clip, len(numbers_K))
        return sums, loss

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        losses: Callable[..., Tensor],
        batch: tuple[Tensor, ...],
        batch_size: int,
        num_replayed: int = 0,
    ) -> None:
        def score(*_: object) -> None:
            """Score the gradient that the optimizer gets: the noisy sum over b."""
            directions = self.audit.directions(self.real)
            noisy = [parameter.grad * (batch_size + num_replayed) for parameter in trained_parameters(model)]
            seen = [one - real for one, real in zip(noisy, self.real, strict=True)]
            self.audit.saw(directions.products(seen) / self.clip, self.epoch_cost)

        hook = optimizer.register_step_pre_hook(score)
        try:
            super().step(model, optimizer, losses, batch, batch_size, num_replayed)
        finally:
            hook.remove()
