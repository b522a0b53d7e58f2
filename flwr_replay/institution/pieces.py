"""Trainings that may take several messages: an institution trains a piece of them at each.

A piece ends by the clock. What the next one needs lies in the run's folder: weights, the optimizer's state, the state
of the random numbers, losses. So the training goes on where it was after a crash, which loses the steps of one message,
and ends with the same bits however it was cut. What a complete training has found is kept, too: a message that is sent
once more is answered with it.

A training goes on only with what it began with: the run and its options, the weights, the examples, what is replayed.
Requests that bring weights begin it anew where anything differs. Requests without weights are refused then.

Under DP steps are charged block by block, before they are taken. Nothing that was trained leaves before the last
message; until then only numbers of steps do, which follow from public numbers and the clock. A block that a crash has
repeated is charged again, with fresh noise.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from flwr_replay.errors import BudgetError, TrainingError
from flwr_replay.files.atomic import alone, private_folder
from flwr_replay.files.tensors import digest, nested, unnested
from flwr_replay.institution.budget import DPTraining, PrivacyBudget
from flwr_replay.institution.owner import Institution
from flwr_replay.learning.training import mean_loss
from flwr_replay.payloads.common import ChargedRequest
from flwr_replay.state.store import StateStore
from flwr_replay.wire.records import StateDict
from flwr_replay.wire.weights import load_arrays, load_optimizer_arrays, optimizer_arrays, to_arrays

__all__ = ["Pieces", "Progress", "StepwiseTraining"]

CHARGED_AT_ONCE = 10  # steps of a block, which is charged as a whole; an image may take a second


class StepwiseTraining(ABC):
    """A training by Adam, in epochs of equally many steps, which can stop after any step and go on later.

    Parameters
    ----------
    mechanism : str
        What is trained: generator or prior.
    model : nn.Module
        On the institution's device.
    lr : float
        Of the first epoch.
    epochs, in_epoch : int
        Number of epochs, and of steps in each.
    """

    releases: tuple[str, ...]  # mechanisms under DP on which the last answer depends

    def __init__(self, mechanism: str, model: nn.Module, lr: float, epochs: int, in_epoch: int) -> None:
        self.mechanism, self.model, self.epochs, self.in_epoch = mechanism, model, epochs, in_epoch
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    @abstractmethod
    def begin(self, given: StateDict) -> None:
        """Load the weights that a request has brought.

        Raises
        ------
        WireError
            If they have other names or shapes than the model.
        """

    @abstractmethod
    def begin_epoch(self, epoch: int) -> None:
        """Set the learning rate and the random numbers of an epoch."""

    @abstractmethod
    def steps(self, epoch: int, places: range, dp: DPTraining | None) -> Iterator[tuple[Tensor | None, int]]:
        """Take these steps of an epoch, counted from 0; yield each one's loss and how many examples it has seen.

        The caller may stop after any. Under DP, `dp` takes the steps, and there is no loss.
        """

    @abstractmethod
    def result(self) -> StateDict:
        """Return what the last answer holds beside weights and losses; called once, after the last step."""

    @abstractmethod
    def kept(self) -> StateDict:
        """Return what later pieces need beside model and optimizer, within the current epoch too."""

    @abstractmethod
    def load_kept(self, kept: StateDict) -> None:
        """Restore what `kept` returned; within an epoch after `begin_epoch`."""


@dataclass
class Progress:
    """How far a training is."""

    total: int  # steps
    steps: int = 0
    seen: int = 0  # examples
    losses: list[float] = field(default_factory=list)  # means of whole epochs
    open: list[Tensor] = field(default_factory=list)  # losses of the steps of the current epoch
    result: StateDict = field(default_factory=dict)

    @property
    def steps_left(self) -> int:
        """Steps to the end."""
        return self.total - self.steps

    def arrays(self) -> StateDict:
        """Return it as named arrays."""
        return {
            "numbers": np.array([self.total, self.steps, self.seen]),
            "losses": np.array(self.losses, np.float64),
            "open": np.array([float(loss) for loss in self.open], np.float32),
            **{f"result-{name}": array for name, array in self.result.items()},
        }

    @classmethod
    def of(cls, arrays: StateDict, device: torch.device) -> Self:
        """Restore what `arrays` returned."""
        result = {name.removeprefix("result-"): array for name, array in arrays.items() if name.startswith("result-")}
        opened = [*torch.from_numpy(arrays["open"]).to(device)]
        total, steps, seen = map(int, arrays["numbers"])
        return cls(total, steps, seen, arrays["losses"].tolist(), opened, result)


class Pieces:
    """Trains the pieces of an institution's trainings, and keeps what lies between them.

    Parameters
    ----------
    institution : Institution
        Whose examples are trained on.
    state : StateStore
        Where progress is kept.
    budget : PrivacyBudget | None
        Charged before steps under DP; None: there is no DP.
    seconds : float
        After which a message is answered; at least one step is made.
    """

    def __init__(
        self, institution: Institution, state: StateStore, budget: PrivacyBudget | None, seconds: float
    ) -> None:
        self.institution, self.state, self.budget, self.seconds = institution, state, budget, seconds
        self.began = 0.0

    @contextmanager
    def alone(self, run: str) -> Iterator[None]:
        """Keep other processes from training the same; one that has waited goes on from where the first has stopped."""
        self.began = time.monotonic()
        with alone(private_folder(self.state.of_run(run) / "training"), wait=True):
            yield

    def train(self, training: StepwiseTraining, request: ChargedRequest, given: StateDict, around: str) -> Progress:
        """Train the next piece, and keep it; call it within `alone`. A complete training is left as it is.

        Parameters
        ----------
        training : StepwiseTraining
            With fresh weights. Afterwards its model has the trained ones.
        request : ChargedRequest
            What the server asks.
        given : StateDict
            The weights that the request has brought; empty: it asks to go on.
        around : str
            What the training depends on beside options and weights, as a digest.

        Raises
        ------
        TrainingError
            If the request has brought no weights, and nothing that fits was begun in its exchange.
        PrivacyError
            If the budget does not allow the whole training, or the account states less than before.
        DivergedError
            If a mean loss is not finite.
        """
        key, bound = f"training-{training.mechanism}", [digest(given) if given else "", around]
        budget = self.budget if self.budget and self.budget.plan.covers(training.mechanism) else None
        found = unnested(self.found(key, request, bound) or {})
        if found:
            bound[0] = _text(found["bound"]["given"])
            progress = self.restored(training, found)
        elif given:
            progress = Progress(training.epochs * training.in_epoch)
            training.begin(given)
            if budget:
                budget.check_room(training.mechanism, progress.total, request)
            self.state.forget(key, request.run)
        else:
            raise TrainingError(
                "a training goes on in the exchange in which it began, with the same examples and replays; this "
                f"institution has begun none such of a {training.mechanism} in exchange {request.server_round} of run "
                f"{request.run!r}: send the weights"
            )
        if progress.result:  # complete before this message
            for mechanism in training.releases if budget else ():
                budget.rest(mechanism, request)  # type: ignore[union-attr]
        else:
            charged = self.advance(training, progress, request, budget)
            if not progress.steps_left:
                progress.result = {"complete": np.ones(1, np.uint8), **training.result()}
                if budget and not charged:
                    budget.rest(training.mechanism, request)
        self.keep(key, request, training, progress, bound)
        return progress

    def advance(
        self, training: StepwiseTraining, progress: Progress, request: ChargedRequest, budget: PrivacyBudget | None
    ) -> bool:
        """Make steps until the time is over or the training complete; return whether any were charged."""
        first = progress.steps
        while progress.steps_left and (progress.steps == first or self.in_time):
            epoch, place = divmod(progress.steps, training.in_epoch)
            if not place:
                training.begin_epoch(epoch)
            places, dp = range(place, training.in_epoch), None
            if budget:
                places = places[:CHARGED_AT_ONCE]
                steps = range(progress.steps, progress.steps + len(places))
                try:
                    dp = budget.begin_steps(training.mechanism, steps, request)
                except BudgetError:
                    if not progress.steps:
                        raise
                    progress.total = progress.steps  # what a crash had repeated was charged twice
                    break
            for loss, seen in training.steps(epoch, places, dp):
                progress.seen += seen
                if loss is not None:
                    progress.steps += 1
                    progress.open.append(loss)
                    if not self.in_time:
                        break
            if dp:
                progress.steps += len(places)  # all of the block
            if progress.open and not progress.steps % training.in_epoch:
                progress.losses.append(mean_loss(progress.open))
                progress.open.clear()
        return bool(budget) and progress.steps > first

    @property
    def in_time(self) -> bool:
        """Whether the message may take longer."""
        return time.monotonic() - self.began < self.seconds

    def found(self, key: str, request: ChargedRequest, bound: list[str]) -> StateDict | None:
        """Return what is kept of a training that this request goes on with; None if there is none."""
        given, around = bound
        if given:  # an earlier exchange may have begun it
            kept = self.state.load(key, request.run, request.server_round + 1)
        else:
            kept = self.state.at(key, request.run, request.server_round)
        if kept is None or _text(kept["bound.around"]) != around or given not in ("", _text(kept["bound.given"])):
            return None
        return kept

    def restored(self, training: StepwiseTraining, found: dict[str, StateDict]) -> Progress:
        """Restore a training; return how far it is."""
        progress = Progress.of(found["progress"], self.institution.device)
        load_arrays(training.model, found["model"])
        if not progress.result:
            load_optimizer_arrays(training.optimizer, found["optimizer"])
            training.begin_epoch(progress.steps // training.in_epoch)
            training.load_kept(found["kept"])
        return progress

    def keep(
        self, key: str, request: ChargedRequest, training: StepwiseTraining, progress: Progress, bound: list[str]
    ) -> None:
        """Write down how far a training is; once it is complete, without what only further steps need."""
        parts = {
            "bound": {name: _array(text) for name, text in zip(("given", "around"), bound, strict=True)},
            "progress": progress.arrays(),
            "model": to_arrays(training.model),
        }
        if not progress.result:
            parts |= {"kept": training.kept(), "optimizer": optimizer_arrays(training.optimizer)}
        self.state.save(key, request.run, request.server_round, nested(parts), self.institution.durable)


def _array(text: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.frombuffer(text.encode(), np.uint8)


def _text(array: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> str:
    return array.tobytes().decode()
