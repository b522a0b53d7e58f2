"""Federated SGD: the institution's half; the server's half is `strategies/fedsgd.py`.

Source: McMahan et al. 2017, section 2: g_k = ∇L_k(θ), the average gradient over all local examples.
"""

import copy
import math
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_replay.clients.fedavg import SumsClient
from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.institution.learner import mixed_batches
from flwr_replay.institution.owner import Shard
from flwr_replay.learning.augment import changed
from flwr_replay.learning.training import at_once, mean_loss, refuse_single_batches
from flwr_replay.memory import remembered
from flwr_replay.models.layers import as_input
from flwr_replay.payloads.fedsgd import Differentiate, Gradient
from flwr_replay.privacy.dpsgd import (
    ROUNDING,
    clipped_sums,
    refuse_chance,
    refuse_mixing,
    single_gradients,
    trained_parameters,
)
from flwr_replay.privacy.exact import ExactHead
from flwr_replay.privacy.places import NOBODY, at_places, drawn_places, places_for
from flwr_replay.privacy.plan import GRADIENT
from flwr_replay.privacy.secret import Stream
from flwr_replay.privacy.shares import beside
from flwr_replay.wire.records import array_record, opened
from flwr_replay.wire.weights import load_arrays

__all__ = ["FedSGDClient"]

ROWS_AT_ONCE = 256  # most examples in memory at once; batch norm normalises over these rows
ROWS = 4096  # the same under DP, where groups are smaller


class FedSGDClient(SumsClient):
    """Computes one gradient over all of the institution's examples."""

    def differentiate(self, request: Differentiate) -> Gradient:
        """Sum the gradients of groups of rows, each weighted by its share of all examples, replayed ones included."""
        data, losses = self.training_data(), []
        model = self.scratch_model(request.arrays)
        if self.budget and self.budget.plan.covers(GRADIENT):
            return self.under_dp(request, model, self.budget)
        refuse_single_batches(model, len(data), ROWS_AT_ONCE)
        number = math.ceil(len(data) / at_once(data.x, ROWS_AT_ONCE, model))
        stored = list(zip(torch.chunk(data.x, number), torch.chunk(data.y, number), strict=True))
        batches, total = ((as_input(x_B), y_B) for x_B, y_B in stored), len(data)
        if sampler := self.replay_sampler(request):  # every batch gets its share of the replayed examples
            size, draws = math.ceil(len(data) / number), self.shuffle(request.exchange, "replay")
            batches = mixed_batches(batches, sampler, size, draws)
            total += len(stored) * sampler.beside(size)
        for x_B, y_B in changed(iter(batches), self.augmentation(None, request.exchange)):
            loss = self.task.loss(model(x_B), y_B) * (len(y_B) / total)
            loss.backward()  # g_k ← g_k + ∇L of this batch, weighted
            losses.append(loss.detach() * len(stored))  # their mean is the loss over all examples
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        tensors = {**model.state_dict(), **gradients}  # of a frozen or unused parameter 0
        arrays = array_record({name: tensor.cpu().numpy() for name, tensor in tensors.items()})
        loss = mean_loss(losses) if self.institution.reports_losses else None
        return Gradient(arrays=arrays, num_examples=len(data), examples_seen=total, num_steps=0, train_loss=loss)

    def under_dp(self, request: Differentiate, model: nn.Module, budget: PrivacyBudget) -> Gradient:
        """Sum the clipped gradients of all patients, or of all examples where these are not known; add noise."""
        n, model, clip = len(self.training_data()), in_doubles(model), budget.plan.config.clip_of(GRADIENT)
        load_arrays(model, request.arrays)
        refuse_mixing(model)
        refuse_chance(model)
        made, spent = self.once(GRADIENT, request, budget, partial(self.summed, model, clip)), self.spent(request.run)
        arrays = beside(opened(request.arrays), made)
        return Gradient(arrays=arrays, num_examples=n, examples_seen=n, num_steps=0, **spent)

    def summed(self, model: nn.Module, clip: float, stream: Stream) -> dict[str, Tensor]:
        """Sum the clipped gradients, in units of C.

        Sums are in float64: rounding must not tell of an example. Nor must places in groups, which are drawn
        (`flwr_replay.privacy.places`). The examples of a patient who has several pass by themselves.
        """
        data = self.training_data()
        alone_N, several = by_patient(self.institution.data.train.patients, len(data))
        sums = self.clipped(model, data, alone_N, clip, stream)
        for rows_B in several:
            own = self.clipped(model, data, rows_B, math.inf)
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(of) for of in own])) * ROUNDING
            if norm.isfinite():
                sums = [before + of * (clip / norm).clamp(max=1) for before, of in zip(sums, own, strict=True)]
        names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        return dict(zip(names, (of.cpu() / clip for of in sums), strict=True))

    def clipped(
        self, model: nn.Module, data: Shard, rows_N: Tensor, clip: float, stream: Stream | None = None
    ) -> list[Tensor]:
        """Sum the clipped gradients of the examples in these rows; with a stream, at places that are drawn."""

        def losses(x_B: Tensor, y_B: Tensor, real_B: Tensor) -> Tensor:
            return self.task.losses(model(x_B), y_B) * real_B

        sums = [torch.zeros_like(parameter) for parameter in trained_parameters(model)]
        head, many = ExactHead.of(model, data.x), at_once(data.x, ROWS, model)
        if not head:
            size = min(at_once(data.x, places_for(data.x), model), single_gradients(model))
            rows_N, many = placed(rows_N, size, stream), max(1, many // size) * size
        for rows_B in torch.split(rows_N, many):
            x_B, y_B = (at_places(of, rows_B) for of in (data.x, data.y))
            if head:
                summed = head.clipped(x_B.flatten(1), partial(self.losses_at_places, y_B, stream), clip)
            else:
                batch = as_input(x_B).double(), y_B, (rows_B != NOBODY).double().to(x_B.device)
                summed, _ = clipped_sums(model, losses, batch, clip, size)
            sums = [before + of for before, of in zip(sums, summed, strict=True)]
        return sums

    def losses_at_places(self, y_B: Tensor, stream: Stream | None, logits_BC: Tensor) -> Tensor:
        """Sum the losses of logits; only these need places where the logits are exact."""
        size = places_for(logits_BC)
        rows_B = placed(torch.arange(len(y_B)), size, stream)
        chunks = zip(*(torch.split(at_places(of, rows_B), size) for of in (logits_BC, y_B)), strict=True)
        return torch.stack([self.task.losses(*chunk).sum() for chunk in chunks]).sum()


def placed(rows_N: Tensor, size: int, stream: Stream | None) -> Tensor:
    """Return rows at places drawn for them, in groups of this size, -1: nobody's; without a stream in order."""
    if not stream:
        return rows_N
    places = drawn_places(len(rows_N), size, stream)
    return places.where(places == NOBODY, rows_N[places]).flatten()


def by_patient(patients_N: NDArray[np.str_] | None, examples: int) -> tuple[Tensor, list[Tensor]]:
    """Return the rows of patients who have one example, and of each who has several; of no known patients, all rows."""
    if patients_N is None:
        return torch.arange(examples), []
    _, of_N, times_P = np.unique(patients_N, return_inverse=True, return_counts=True)
    rows = torch.split(torch.from_numpy(np.argsort(of_N, kind="stable")), times_P.tolist())
    alone = torch.from_numpy(np.flatnonzero(times_P[of_N] == 1))
    return alone, [of for of in rows if len(of) > 1]


@remembered(maxsize=2)
def in_doubles(model: nn.Module) -> nn.Module:
    """Return a copy of a process's shared model in float64: with an encoder, copying takes longer than a gradient."""
    return copy.deepcopy(model).double()
