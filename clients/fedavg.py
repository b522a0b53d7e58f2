"""Federated averaging: the institution's half; the server's half is `strategies/fedavg.py`.

Source: McMahan et al. 2017, Algorithm 1, ClientUpdate; Qu et al. 2022, section 4.1 for the number of iterations.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from flwr_replay.files.tensors import digest
from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.institution.client import InstitutionClient
from flwr_replay.institution.learner import Learner
from flwr_replay.learning.training import iterations
from flwr_replay.payloads.common import Train, Trained
from flwr_replay.payloads.fedsgd import Differentiate
from flwr_replay.payloads.mutual import TrainMutually
from flwr_replay.privacy.dpsgd import ROUNDING, refuse_mixing
from flwr_replay.privacy.plan import UPDATE
from flwr_replay.privacy.secret import Stream
from flwr_replay.privacy.shares import beside
from flwr_replay.privacy.sums import clipped
from flwr_replay.wire.records import StateDict, opened

__all__ = ["FedAvgClient", "SumsClient"]

ASKED = "asked"  # key of a request's digest, beside what answered it
AGAIN = ("stated", "continues")  # instructions that may be others where a request is repeated


class SumsClient(InstitutionClient):
    """Base of clients that send sums with noise, in every exchange."""

    def once(
        self,
        mechanism: str,
        request: Train | Differentiate | TrainMutually,
        budget: PrivacyBudget,
        summed: Callable[[Stream], Mapping[str, Tensor]],
    ) -> StateDict:
        """Return noisy sums, which are charged and kept before they leave.

        Who asks again, as after a crash, gets the same bytes, which cost nothing. `summed` makes the sums, float64, in
        units of their sensitivity, before the charge: what it refuses costs nothing. If the budget is used up nothing
        is trained.
        """
        weights, scalars, instructions = request.contents()
        sent, about = opened(weights or {}), {**scalars, **instructions}
        told = repr(sorted((name, of) for name, of in about.items() if name not in AGAIN)).encode()
        asked = np.frombuffer(digest({**sent, ASKED: np.frombuffer(told, np.uint8)}).encode(), np.uint8)
        kept = self.state.at(mechanism, request.run, request.exchange)
        if kept and np.array_equal(kept[ASKED], asked):
            budget.rest(mechanism, request)
        else:
            budget.check_room({mechanism: 1}, request.run)
            stream, step = budget.stream(mechanism, request), budget.step(mechanism, sent)
            sums = summed(stream)
            budget.charge(mechanism, budget.plan.cost(mechanism, budget.examples, 1), request)
            kept = {**budget.noisy(mechanism, sums, step, stream), ASKED: asked}
            self.state.save(mechanism, request.run, request.exchange, kept, self.institution.durable)
        return {name: array for name, array in kept.items() if name != ASKED}

    def noisy_update(
        self, request: Train | TrainMutually, budget: PrivacyBudget, trained: Callable[[], nn.Module]
    ) -> StateDict:
        """Return what training adds to the weights received, clipped as a whole, with noise, and zeros beside it.

        `trained` returns the trained model, before the charge. Where that diverged the update is zero.
        """
        sent, clip = opened(request.arrays), budget.plan.config.clip_of(UPDATE)
        refuse_mixing(self.scratch_model(request.arrays))  # weights of another form cost nothing

        def update(_: Stream) -> dict[str, Tensor]:
            after = {name: of.detach().cpu() for name, of in trained().named_parameters() if of.requires_grad}
            moved = [of.double() - torch.from_numpy(sent[name].astype(np.float64)) for name, of in after.items()]
            whole = clipped(torch.cat([of.flatten() for of in moved])[None], clip / ROUNDING)[0]
            pieces = torch.split(whole / budget.plan.config.sensitivity(UPDATE), [of.numel() for of in moved])
            return {name: of.view(like.shape) for name, of, like in zip(after, pieces, moved, strict=True)}

        made = self.once(UPDATE, request, budget, update)
        return beside({name: np.zeros_like(array) for name, array in sent.items()}, made)


class FedAvgClient(SumsClient):
    """Trains the global model on the institution's data."""

    def train(self, request: Train) -> Trained:
        """Train for E passes and return the weights; with dp=update the update, with noise."""
        if self.budget and self.budget.plan.covers(UPDATE):
            return self.under_dp(request, self.budget)
        return self.trained(request, self.passes(request), len(self.training_data()))

    def passes(self, request: Train) -> Learner:
        """Train for E passes."""
        data, learner = self.training_data(), self.learner(request)
        shuffle = self.shuffle(request.exchange)  # every pass draws a new order from it
        for _ in range(request.local_epochs):
            for x_B, y_B in learner.batches(data, shuffle):
                learner.step(x_B, y_B)
        return learner

    def under_dp(self, request: Train, budget: PrivacyBudget) -> Trained:
        """Train and return the update with noise; nothing else that leaves depends on more than numbers of examples."""

        def trained() -> nn.Module:
            learner = self.passes(request)
            self.suspend(request, learner.optimizer)
            return learner.model

        arrays, n = self.noisy_update(request, budget, trained), len(self.training_data())
        steps = request.local_epochs * iterations(n, self.batch_size)
        return Trained(
            arrays=arrays,
            num_examples=n,
            examples_seen=steps * min(n, self.batch_size),
            num_steps=steps,
            **self.spent(request.run),
        )
