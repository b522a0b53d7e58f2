"""Trainings that may take several messages: an institution trains a piece of them at each.

No method's idea is here. A piece ends by the clock, and leaves what the next one needs in the state directory. So the
training goes on after a crash, which loses the steps of one message, and ends with the same bits however it was cut.

Under DP steps are charged block by block, before they are taken. A block that a crash has repeated is charged again,
with fresh noise. Where the budget allows no further block, the training ends.
"""

import sys
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

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

__all__ = ["Pieces", "Training", "mechanism_at"]


class Training(ABC):
    """A training in steps numbered from 0, which can stop after any and go on later."""

    mechanisms: Mapping[str, int]  # in the order of the training: the steps of each

    @abstractmethod
    def block(self, step: int, charged: bool) -> int:
        """Return how many steps are taken together from this one on, under DP or not; the mechanism may end before."""

    @abstractmethod
    def take(self, steps: range, dp: DPTraining | None) -> Iterator[tuple[int, Tensor | None]]:
        """Take these steps, all of one block; yield how many were taken, and their mean loss.

        Without DP the caller may stop after any. Under DP, `dp` takes the steps, and there is no loss.
        """


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

    def advance(
        self, training: Training, done: TrainingProgress, request: ChargedRequest, most: int = sys.maxsize
    ) -> NDArray[np.floating]:
        """Make steps until the time is over, `most` are made, or the training is complete; call it within `alone`.

        The training is as it was after the steps that are `done`, to which those made here are added. Returned are the
        losses that `training.take` gave.

        Raises
        ------
        PrivacyError
            If the budget does not allow a first block of a mechanism, nor the whole of one before the last; or if the
            account states less than before.
        DivergedError
            If a loss is not finite.
        """
        first, losses = done.steps, list[Tensor]()
        total = first + done.steps_left
        end = min(total, first + most)
        charged = self.budget if any(map(self.covers, training.mechanisms)) else None  # if one is, all are
        while done.steps < end and (done.steps == first or self.in_time):
            trained = mechanism_at(training.mechanisms, done.steps)
            steps = range(done.steps, min(end, trained.end, done.steps + training.block(done.steps, bool(charged))))
            try:
                dp = charged.begin_steps(trained.mechanism, steps, request) if charged else None
            except BudgetError:
                if trained.end < total or done.steps == trained.start:  # what was trained would be of no use
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
            what = trained.mechanism
            raise DivergedError(f"the loss of a {what} must stay finite; it is not: lower {what}.lr")
        return numbers

    def images(self, data: Shard, mechanism: str) -> Shard:
        """Return examples with images in the range that a generator or prior needs.

        Under DP numbers outside [0, 1] are clipped, since an error would reveal them; without DP they are a DataError.
        """
        if self.covers(mechanism):
            return data if data.x.dtype == torch.uint8 else replace(data, x=data.x.clamp(0, 1))
        if data.x.dtype != torch.uint8 and not (data.x.min() >= 0 and data.x.max() <= 1):
            raise DataError("a generator needs images of bytes, or of numbers in [0, 1]; got others: rescale them")
        return data

    def spent(self, run: str) -> dict[str, Any]:
        """Return the epsilon and delta that an answer states; none without DP."""
        return self.budget.spent(run) if self.budget else {}

    def covers(self, mechanism: str) -> bool:
        """Return whether a mechanism is trained under DP."""
        return self.budget is not None and self.budget.plan.covers(mechanism)

    @property
    def in_time(self) -> bool:
        """Whether the message may take longer."""
        return time.monotonic() - self.began < self.seconds


class MechanismSteps(NamedTuple):
    """The steps of a training that train one mechanism."""

    mechanism: str
    start: int
    end: int


def mechanism_at(mechanisms: Mapping[str, int], step: int) -> MechanismSteps:
    """Return the mechanism that a step trains.

    >>> mechanism_at({"generator": 20, "prior": 5}, 20)
    MechanismSteps(mechanism='prior', start=20, end=25)
    """
    ends = [*accumulate(mechanisms.values())]
    i = bisect_right(ends, step)
    mechanism, steps = [*mechanisms.items()][i]
    return MechanismSteps(mechanism, ends[i] - steps, ends[i])
