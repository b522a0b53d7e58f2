"""Trainings that may take several messages: an institution trains a piece of them at each.

No method's idea is here. A piece ends by the clock, and leaves what the next one needs in the state directory. So the
training goes on after a crash, which loses the steps of one message, and ends with the same bits however it was cut.

Under DP steps are charged block by block, before they are taken. A block that a crash has repeated is charged again,
with fresh noise. Where the budget allows no further block, the training ends.
"""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flwr_replay.errors import BudgetError, DataError, DivergedError
from flwr_replay.files.atomic import alone, private_folder
from flwr_replay.generators.synthesis import TrainingProgress
from flwr_replay.institution.budget import DPTraining, PrivacyBudget
from flwr_replay.institution.owner import Shard
from flwr_replay.payloads.common import ChargedRequest

__all__ = ["Pieces", "Training"]


class Training(ABC):
    """A training in steps numbered from 0, which can stop after any and go on later."""

    mechanisms: Mapping[str, int]  # in the order of the training: the steps of each
    releases: tuple[str, ...] = ()  # mechanisms under DP on which the last answer depends
    done: TrainingProgress
    losses: NDArray[np.floating]  # that `take` gave

    @abstractmethod
    def resume(self, request: ChargedRequest) -> None:
        """Go on from what was kept, or begin; an error if it may do neither."""

    @abstractmethod
    def block(self, step: int, charged: bool) -> int:
        """Return how many steps are taken together from this one on, under DP or not; the mechanism may end before."""

    @abstractmethod
    def take(self, steps: range, dp: DPTraining | None) -> Iterator[tuple[int, Tensor | None]]:
        """Take these steps, all of one block; yield how many were taken, and their mean loss.

        Without DP the caller may stop after any. Under DP, `dp` takes the steps, and there is no loss.
        """

    @abstractmethod
    def end(self, request: ChargedRequest) -> None:
        """Find what the last answer says beside weights and losses; called once, after the last step."""

    @abstractmethod
    def keep(self, request: ChargedRequest) -> None:
        """Write down all that `resume` needs; called after every piece, also one without a step."""


class Pieces:
    """Trains the pieces of an institution's trainings.

    A message is answered after `seconds`, but at least one block is begun.
    """

    def __init__(self, budget: PrivacyBudget | None, seconds: float) -> None:
        self.budget, self.seconds = budget, seconds
        self.began = 0.0

    @contextmanager
    def alone(self, folder: Path) -> Iterator[None]:
        """Keep other processes from training the same; one that has waited goes on from where the first has stopped."""
        self.began = time.monotonic()
        with alone(private_folder(folder), wait=True):
            yield

    def train(self, training: Training, request: ChargedRequest, most: int = sys.maxsize) -> None:
        """Train the next piece, at most so many steps, and keep it; call it within `alone`.

        A complete training is left as it is. What is released once more costs nothing, but is recorded.

        Raises
        ------
        PrivacyError
            If the budget does not allow a first block of a mechanism, nor the whole of one before the last; or if the
            account states less than before, or has fewer steps than the training.
        DivergedError
            If a loss is not finite.
        """
        training.resume(request)
        done, first = training.done, training.done.steps
        self.check_charged(training.mechanisms, first, request.run)
        if done.steps_left:
            self.advance(training, request, first + min(done.steps_left, most))
            if not done.steps_left:
                training.end(request)
        if done.steps == first and not done.steps_left:
            for released in training.releases:
                if budget := self.budget_of(released):
                    budget.rest(released, request)
        training.keep(request)

    def check_charged(self, mechanisms: Mapping[str, int], steps: int, run: str) -> None:
        """Refuse a training that has made so many of its mechanisms' steps, if the run was charged for fewer."""
        for mechanism, number in mechanisms.items():
            made, steps = min(number, steps), max(0, steps - number)
            if budget := self.budget_of(mechanism):
                budget.check_charged(mechanism, made, run)

    def advance(self, training: Training, request: ChargedRequest, last: int) -> None:
        """Make steps until the time is over, or this one is reached, or the budget ends; note losses and progress."""
        done, losses = training.done, list[Tensor]()
        first, total = done.steps, done.steps + done.steps_left
        ends = [*zip(training.mechanisms, accumulate(training.mechanisms.values()), strict=True)]
        while done.steps < last and (done.steps == first or self.in_time):
            mechanism, end = next((mechanism, end) for mechanism, end in ends if done.steps < end)
            budget = self.budget_of(mechanism)
            steps = range(done.steps, min(end, last, done.steps + training.block(done.steps, bool(budget))))
            try:
                dp = budget.begin_steps(mechanism, steps, request) if budget else None
            except BudgetError:
                if end < total or done.steps == end - training.mechanisms[mechanism]:  # it would be of no use
                    raise
                done.steps_left = 0  # what a crash had repeated was charged twice
                break
            for taken, loss in training.take(steps, dp):
                done.steps, done.steps_left = done.steps + taken, done.steps_left - taken
                losses += [] if loss is None else [loss]
                if not (dp or self.in_time):
                    break
        numbers = torch.stack(losses).cpu().numpy() if losses else np.zeros(0, np.float32)
        if not np.isfinite(numbers).all():
            raise DivergedError(f"the loss of a {mechanism} must stay finite; it is not: lower {mechanism}.lr")
        training.losses = np.concatenate([training.losses, numbers])

    def images(self, data: Shard, mechanism: str) -> Shard:
        """Return examples with images in the range that a generator or prior needs.

        Under DP numbers outside [0, 1] are clipped, since an error would reveal them; without DP they are a DataError.
        """
        if self.budget_of(mechanism):
            return data if data.x.dtype == torch.uint8 else replace(data, x=data.x.clamp(0, 1))
        if data.x.dtype != torch.uint8 and not (data.x.min() >= 0 and data.x.max() <= 1):
            raise DataError("a generator needs images of bytes, or of numbers in [0, 1]; got others: rescale them")
        return data

    def spent(self, run: str) -> dict[str, Any]:
        """Return the epsilon and delta that an answer states; none without DP."""
        return self.budget.spent(run) if self.budget else {}

    def budget_of(self, mechanism: str) -> PrivacyBudget | None:
        """Return the budget if a mechanism is trained under DP."""
        return self.budget if self.budget and self.budget.plan.covers(mechanism) else None

    @property
    def in_time(self) -> bool:
        """Whether the message may take longer."""
        return time.monotonic() - self.began < self.seconds
