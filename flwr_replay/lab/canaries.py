"""Canaries inside an institution's training: examples that are in by a fair coin, and scores that say which were.

A canary that is out keeps its row. So |D|, the sampling rate and the number of steps are the same either way, and the
two data sets are neighbours as the account means it: one has an example more, and their number is taken as known.

Here are canaries that are gradients. In place of its row's gradient, a canary that is in adds a vector of ten times the
clipping norm to each step for which its row is drawn. It is clipped with the examples' own code. The first real example
of each batch has a loss ten thousand times as large, and must be clipped, too. The auditor sees by how much each step
moves the weights, and the sums without noise: masks are drawn independently, so epsilon holds against such an auditor,
too. The steps test sampling, clipping, noise and charges (`flwr_replay.lab.seen_steps`), guesses the whole. Not
tested: whether an example's gradient depends on that example alone, and a step's replayed examples, which are left out.

No option and no message leads here. `flwr_replay.client_app` must not import this room, as the import contract says.

`m` canaries, `D` rows of the institution, `d` parameters.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import log, log1p, sqrt
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flwr_replay.config.sections import require
from flwr_replay.institution.budget import DPTraining
from flwr_replay.lab.seen_steps import SeenSteps
from flwr_replay.learning.training import torch_rng
from flwr_replay.privacy.accounting import SampledGaussian
from flwr_replay.privacy.dpsgd import add_clipped, trained_parameters
from flwr_replay.privacy.secret import Stream
from flwr_replay.rng import derived_rng

__all__ = ["Canaries", "Directions", "GradientCanaries"]

BEFORE_CLIPPING = 10.0  # norm of a canary's gradient, in units of C: so clipping is needed
LARGER = 1e4  # by which the loss of one real example is multiplied, for the same reason
AT_ONCE = 2**24  # numbers in the canaries' gradients that are clipped together


@dataclass(frozen=True)
class Canaries:
    """Which rows of an institution are canaries, and how their coins fell."""

    rows_m: NDArray[np.int64]  # of each canary
    was_in_m: NDArray[np.bool_]  # whether it is in
    number_D: Tensor  # of the canary in each row, int64; −1: none

    @classmethod
    def tossed(cls, canaries: int, examples: int, seed: int) -> Self:
        """Choose rows and toss a fair coin for each; refuse fewer than two, or as many as there are examples."""
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

    The coordinates are dealt at random over all parameters that are trained, d numbers in all, at least m. The signs
    are random.
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
        vectors = torch.split(vectors_Kd, [shape.numel() for shape in self.shapes], dim=1)
        return [vector.reshape(len(numbers_K), *shape) for vector, shape in zip(vectors, self.shapes, strict=True)]

    def products(self, vector_d: Tensor) -> NDArray[np.float64]:
        """Return the inner product of a vector, float64, with each canary's, (m,)."""
        sums = torch.zeros(self.canaries + 1, dtype=torch.float64, device=vector_d.device)
        products_m: NDArray[np.float64] = sums.index_add_(0, self.owner_d, vector_d * self.values_d)[:-1].cpu().numpy()
        return products_m


class GradientCanaries:
    """Canaries that are gradients inside DP-SGD, and a record of every step that an institution takes.

    The score of a step is the logarithm of how much likelier its noisy sum is if the canary is in, by the charged rate
    and noise (as in Mironov, Talwar and Zhang 2019). All steps of all trainings are added up.

    Attributes
    ----------
    scores_m : NDArray
        Larger means in, (m,).
    stray : int
        Steps without DP-SGD, of any optimizer, on weights that the same message trains by it.
    """

    def __init__(self, canaries: Canaries, seed: int) -> None:
        self.canaries, self.seed = canaries, seed
        self.scores_m = np.zeros(len(canaries.rows_m))
        self.stray = 0
        self.trained = dict[int, Tensor]()  # by DP-SGD, in this message
        self.within = False  # a step of DP-SGD
        self._directions: dict[tuple[torch.Size, ...], Directions] = {}
        self._seen: dict[tuple[float, float, tuple[torch.Size, ...]], SeenSteps] = {}

    def training(self, clip: float, epoch_cost: SampledGaussian, stream: Stream, epochs: int = 1) -> DPTraining:
        """Return the DP-SGD of a charged training, with the canaries in it."""
        return _WithGradients(self, clip, epoch_cost, stream, epochs)

    @contextmanager
    def message(self) -> Iterator[None]:
        """Watch all optimizers of the process while the institution answers a message."""
        others: list[list[Tensor]] = []
        self.trained = {}

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if not self.within:
                others.append([parameter for group in optimizer.param_groups for parameter in group["params"]])

        hook = register_optimizer_step_pre_hook(note)
        try:
            yield
        finally:
            hook.remove()
            self.stray += sum(any(id(parameter) in self.trained for parameter in moved) for moved in others)

    def directions(self, parameters: list[Tensor]) -> Directions:
        """Return the canaries' directions, the same in all trainings of a module."""
        shapes = tuple(parameter.shape for parameter in parameters)
        if shapes not in self._directions:
            self._directions[shapes] = Directions(parameters, len(self.scores_m), self.seed)
        return self._directions[shapes]

    @property
    def seen(self) -> list[SeenSteps]:
        """All steps of DP-SGD so far, by what they were charged as and by the module."""
        return list(self._seen.values())

    def seen_steps(self, cost: SampledGaussian, parameters: list[Tensor]) -> SeenSteps:
        """Return the record to which a step of this module belongs."""
        kind = cost.rate, cost.sigma, tuple(parameter.shape for parameter in parameters)
        sizes = [parameter.numel() for parameter in parameters]
        return self._seen.setdefault(kind, SeenSteps(cost, len(self.canaries.number_D), sizes))

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
        self.rows_B, self.real_d, self.sum_d = torch.empty(0, dtype=torch.int64), torch.empty(0), torch.empty(0)
        self.most, self.taken = 0.0, 0  # by one example; examples of the batch, canaries that are out among them

    def rows(self, examples: int) -> Iterator[Tensor]:
        for self.rows_B in super().rows(examples):
            yield self.rows_B[self.audit.canaries.number_D[self.rows_B] < 0]

    def sums(
        self, module: nn.Module, losses: Callable[..., Tensor], batch: tuple[Tensor, ...], clip: float
    ) -> tuple[list[Tensor], Tensor]:
        def larger(*example: Tensor) -> Tensor:
            return losses(*example) * LARGER

        canaries = self.audit.canaries
        sums, loss = super().sums(module, larger, tuple(tensor[:1] for tensor in batch), clip)
        self.most = float(torch.linalg.vector_norm(flat(sums)))
        rest, others = super().sums(module, losses, tuple(tensor[1:] for tensor in batch), clip)
        for summed, further in zip(sums, rest, strict=True):
            summed += further
        self.real_d = flat(sums)
        number_B = canaries.number_D[self.rows_B]
        drawn = number_B[number_B >= 0]
        self.taken = len(batch[0]) + len(drawn)
        drawn = drawn[torch.from_numpy(canaries.was_in_m)[drawn]]
        directions = self.audit.directions(sums)
        for numbers_K in torch.split(drawn, max(1, AT_ONCE // len(directions.owner_d))):
            gradients = [vector * (BEFORE_CLIPPING * clip) for vector in directions.gradients(numbers_K)]
            add_clipped(sums, list(gradients), clip, len(numbers_K))
        self.sum_d = flat(sums)
        self.most = max(self.most, float(directions.products(self.sum_d - self.real_d).max()))
        return sums, loss + others

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        losses: Callable[..., Tensor],
        batch: tuple[Tensor, ...],
        batch_size: int,
        num_replayed: int = 0,
    ) -> None:
        parameters, audit, b = trained_parameters(model), self.audit, batch_size + num_replayed
        own = tuple(tensor[num_replayed:] for tensor in batch)
        before = [parameter.detach().clone() for parameter in parameters]
        audit.trained |= {id(parameter): parameter for parameter in parameters}
        audit.within = True
        try:
            # by which the weights move, whatever the run's optimizer makes of it, is the noisy sum in units of C
            super().step(model, torch.optim.SGD(parameters, lr=b / self.clip), losses, own, b)
            moved = [old - parameter.detach() for old, parameter in zip(before, parameters, strict=True)]
            for parameter, old, change in zip(parameters, before, moved, strict=True):
                parameter.data.copy_(old)
                parameter.grad = change * (self.clip / b)
            optimizer.step()
            optimizer.zero_grad()
        finally:
            audit.within = False
        seen, moved_d = audit.seen_steps(self.epoch_cost, parameters), flat(moved)
        seen.saw(self.rows_B, self.taken, moved_d, self.sum_d / self.clip, self.most / self.clip)
        audit.saw(audit.directions(parameters).products(moved_d - self.real_d / self.clip), self.epoch_cost)


def flat(tensors: list[Tensor]) -> Tensor:
    """Return the numbers of several tensors, (d,) float64."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).double()
