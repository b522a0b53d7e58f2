"""An institution's privacy budget in a run: DP-SGD is charged before its first step, latents before they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flwr_replay.config.sections import require
from flwr_replay.errors import BudgetError, ConfigError, PrivacyError
from flwr_replay.institution.owner import Institution, Shard
from flwr_replay.models.layers import as_input
from flwr_replay.payloads.common import ChargedRequest
from flwr_replay.privacy.account import Account
from flwr_replay.privacy.accounting import SampledGaussian
from flwr_replay.privacy.dpsgd import clipped_sums, noisy_step, poisson_batches
from flwr_replay.privacy.plan import COUNTS, PrivacyPlan
from flwr_replay.privacy.secret import Stream, noise_stream
from flwr_replay.privacy.shares import shared
from flwr_replay.privacy.sums import noisy
from flwr_replay.state.spent import AllRuns
from flwr_replay.state.store import StateStore
from flwr_replay.wire.records import StateDict

__all__ = ["DPTraining", "PrivacyBudget"]

EXACT = 2**53  # whole numbers below it are exact in float64


class PrivacyBudget:
    """What an institution may spend in a run, and what it has spent.

    Noise comes from `seed` only with `privacy.noise=seeded`, which is for tests and protects nothing.
    """

    def __init__(self, plan: PrivacyPlan, institution: Institution, state: StateStore, seed: int) -> None:
        self.plan, self.institution, self.state, self.seed = plan, institution, state, seed
        self.begun: list[tuple[str, DPTraining]] = []  # what this message has charged for
        self.training: Callable[[float, SampledGaussian, Stream, int], DPTraining] = DPTraining  # an audit has its own

    @property
    def examples(self) -> int:
        """|D|, from which batches are drawn."""
        pooled = self.plan.pooled and self.institution.read_pooled is not None
        return len(self.institution.pooled if pooled else self.institution.train)

    def account(self, run: str) -> Account:
        """Return the account of a run."""
        delta = self.plan.checked_delta(self.examples)
        self.institution.policy.check_delta(delta)
        limit, accountant = self.plan.config.limit, self.plan.accountant
        return Account(self.state.of_run(run), delta=delta, limit=limit, accountant=accountant)

    def charged(self, run: str) -> tuple[str, ...]:
        """Return the mechanism of each charge so far, without reading any data."""
        return Account(self.state.of_run(run), delta=1.0).mechanisms

    @property
    def all_runs(self) -> AllRuns:
        """What all runs have spent, and may."""
        return self.institution.policy.all_runs(self.institution.state)

    def take_room(self, run: str, begins: bool) -> None:
        """Keep the budget for a run from its roll call on, if all runs may have that much; later it goes on."""
        if not begins:
            self.all_runs.goes_on(run)
        elif self.institution.policy.max_total_epsilon is not None:
            account = self.account(run)
            self.all_runs.reserve(run, account.limit, account.delta)

    def begin(self, mechanism: str, epochs: int, request: ChargedRequest) -> DPTraining | None:
        """Charge for some epochs of a mechanism and return its DP-SGD; None if the run does not train it under DP.

        Raises
        ------
        PrivacyError
            If the budget does not allow all epochs, the server asks for none, or the account states less than before.
            Then no step may be taken.
        """
        if not self.plan.covers(mechanism):
            return None
        if epochs < 1:
            raise PrivacyError(f"a training under DP has at least one epoch; the server asks for {epochs}")
        cost = self.plan.cost(mechanism, self.examples, epochs)
        stream = self.stream(mechanism, request)  # first: a key that cannot be read costs nothing
        self.charge(mechanism, cost, request)
        return self.beginning(mechanism, replace(cost, steps=cost.steps // epochs), stream, epochs)

    def check_room(self, steps: Mapping[str, int], run: str) -> None:
        """Refuse steps of which the budget does not allow all, or no label counts at their end; nothing is charged."""
        costs = {of: replace(self.plan.cost(of, self.examples, 1), steps=number) for of, number in steps.items()}
        (mechanism, cost), *others = costs.items()
        counts = [self.plan.counts()] if "prior" in steps and self.plan.counted else []
        self.account(run).check(mechanism, cost, *(of for _, of in others), *counts)

    def check_charged(self, mechanism: str, steps: int, run: str) -> None:
        """Refuse so many steps of a mechanism if a run was charged for fewer: its account, or they, are another's."""
        account = Account(self.state.of_run(run), delta=1.0)
        charges = zip(account.mechanisms, account.spent, strict=True)
        if steps > (charged := sum(cost.steps for of, cost in charges if of == mechanism)):
            raise PrivacyError(
                f"a privacy account never states less than before; {steps} steps of {mechanism} were made in run "
                f"{run!r}, and its account has {charged}: restore the newest copy of both, or begin a new run"
            )

    def begin_steps(self, mechanism: str, steps: range, request: ChargedRequest) -> DPTraining:
        """Charge for the steps of these numbers, and return their DP-SGD, as `begin` does."""
        self.check_room({mechanism: len(steps)}, request.run)
        cost = replace(self.plan.cost(mechanism, self.examples, 1), steps=len(steps))
        stream = self.stream(mechanism, request, steps.start)
        self.charge(mechanism, cost, request)
        return self.beginning(mechanism, cost, stream, 1)

    def beginning(self, mechanism: str, epoch_cost: SampledGaussian, stream: Stream, epochs: int) -> DPTraining:
        """Return the DP-SGD of a training that was charged."""
        training = self.training(self.plan.config.clip_of(mechanism), epoch_cost, stream, epochs)
        self.begun.append((mechanism, training))
        return training

    def check_steps(self) -> None:
        """Refuse an answer before all steps were taken that this message was charged for.

        If one is missing, the method may have taken others, without noise.
        """
        for mechanism, training in self.begun:
            if training.left:
                raise PrivacyError(
                    f"a training under DP takes every step that was charged by DPTraining.step; of {mechanism} "
                    f"{training.left} of {training.charged} were not: train by these steps alone"
                )

    def charge(self, mechanism: str, cost: SampledGaussian, request: ChargedRequest) -> None:
        """Charge the account, unless it states less than the institution stated before, or the data have changed."""
        self.state.check_data(request.run, dp=True, pooled=self.plan.pooled)
        account, noise = self.account(request.run), self.plan.config.noise
        self.all_runs.charge(account, mechanism, cost, noise, request.stated)

    def step(self, mechanism: str, answer: StateDict) -> float:
        """Return what a whole number of an answer of this form is worth; 0: its noise is not shared.

        Raises
        ------
        PrivacyError
            If there is none for so many numbers, or examples.
        """
        if not self.plan.institutions:
            return 0.0
        try:
            step = self.plan.step(mechanism, self.examples, sum(array.size for array in answer.values()))
            require(
                self.examples / step < EXACT,
                f"sums of {self.examples:,} examples in steps of {step:.2g} leave no room in 64 bits: choose a smaller "
                "epsilon, or more noise",
            )
        except ConfigError as error:
            raise PrivacyError(str(error)) from None
        return step

    def noisy(self, mechanism: str, sums: Mapping[str, Tensor], step: float, stream: Stream) -> StateDict:
        """Return sums over all examples with noise, divided by |D|, float32; with shared noise whole numbers, int64.

        `sums` are float64, in units of their sensitivity; `step` is what the method of this name returns.
        """
        plan, n = self.plan, self.examples
        flat = torch.cat([of.flatten() for of in sums.values()])  # one draw costs less than several
        if step:
            made = shared(flat, step, stream)
        else:
            made = (noisy(flat, plan.share(mechanism, n), stream) * (plan.config.sensitivity(mechanism) / n)).float()
        flats = torch.split(made, [of.numel() for of in sums.values()])
        return {name: flat.view(of.shape).numpy() for (name, of), flat in zip(sums.items(), flats, strict=True)}

    def noisy_counts(self, counts: Tensor, request: ChargedRequest) -> Tensor:
        """Return noisy label counts: whole numbers, none negative, at least one of them positive."""
        cost = self.plan.counts()
        stream = self.stream(COUNTS, request)
        self.charge(COUNTS, cost, request)
        noise = stream.normal(counts.shape) * cost.sigma
        noisy = (counts + noise).round().clamp(min=0).long()
        return noisy if noisy.sum() else torch.ones_like(noisy)

    def spent(self, run: str) -> dict[str, Any]:
        """Return epsilon and delta of all releases in this run, as an answer states them; none before the first."""
        account = self.account(run)
        return {"epsilon": account.stated_epsilon, "delta": account.delta} if account.mechanisms else {}

    def rest(self, mechanism: str, request: ChargedRequest) -> None:
        """Record that a mechanism's weights leave once more, unchanged, which costs nothing.

        If nothing was charged in this run, these weights would have no epsilon: a BudgetError.
        """
        if not self.charged(request.run):
            raise BudgetError(
                f"the privacy budget does not allow a first pass of {mechanism}: choose more noise or a larger epsilon"
            )
        cost = self.plan.counts() if mechanism == COUNTS else self.plan.cost(mechanism, self.examples, 1)
        self.charge(mechanism, replace(cost, steps=0), request)

    def stream(self, mechanism: str, request: ChargedRequest, *first: int) -> Stream:
        """Open a stream of noise; `first` is the number of its first step, where one message takes several streams."""
        purpose = (self.seed, self.institution.name, mechanism, request.exchange, *first)
        return noise_stream(self.plan.config.noise, self.institution.state, *purpose)


class DPTraining:
    """Poisson batches and noisy steps of a training that was charged.

    `clip` is C, the largest L2 norm of one example's gradient. `epoch_cost` has sampling rate, noise and steps of one
    epoch, of which `epochs` were charged; `stream` draws masks and noise.
    """

    def __init__(self, clip: float, epoch_cost: SampledGaussian, stream: Stream, epochs: int = 1) -> None:
        self.clip, self.epoch_cost, self.stream = clip, epoch_cost, stream
        self.charged = self.left = epochs * epoch_cost.steps  # steps

    def rows(self, examples: int) -> Iterator[Tensor]:
        """Yield the row numbers of each batch of an epoch."""
        return poisson_batches(examples, self.epoch_cost, self.stream)

    def uniform(self, examples: int, numbers: int) -> Tensor:
        """Draw numbers in [0, 1) for each example of a batch, (examples, numbers) float32, as secret as the noise."""
        drawn = self.stream.uniform(examples * numbers).float().clamp(max=1 - 2**-24)
        return drawn.view(examples, numbers)

    def batches(self, data: Shard) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield an epoch's batches of examples and labels. Sizes vary; a batch may be empty."""
        for rows in self.rows(len(data)):
            chosen = rows.to(data.x.device)
            yield as_input(data.x.index_select(0, chosen)), data.y[chosen]  # on bytes ten times as fast as x[chosen]

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        losses: Callable[..., Tensor],
        batch: tuple[Tensor, ...],
        batch_size: int,
        num_replayed: int = 0,
    ) -> None:
        """Take one step. Its loss has no noise, so it is not returned.

        Model, optimizer and losses are as for `flwr_replay.privacy.dpsgd.noisy_step`. The batch has the replayed
        examples, `num_replayed`, then the institution's own, of which b, `batch_size`, are expected.

        Raises
        ------
        PrivacyError
            If all charged steps have been taken.
        """
        if not self.left:
            raise PrivacyError(
                f"a training under DP takes the steps that were charged, {self.charged}, and no more; it goes on: "
                "charge every epoch"
            )
        self.left -= 1
        noisy_step(
            model,
            optimizer,
            losses,
            tuple(tensor[num_replayed:] for tensor in batch),
            clip=self.clip,
            sigma=self.epoch_cost.sigma,
            batch_size=batch_size + num_replayed,
            stream=self.stream,
            public=tuple(tensor[:num_replayed] for tensor in batch),
            sums_of=self.sums,
        )

    def sums(
        self, module: nn.Module, losses: Callable[..., Tensor], batch: tuple[Tensor, ...], clip: float
    ) -> tuple[list[Tensor], Tensor]:
        """Return what `flwr_replay.privacy.dpsgd.clipped_sums` does: the sums that get noise."""
        return clipped_sums(module, losses, batch, clip)
