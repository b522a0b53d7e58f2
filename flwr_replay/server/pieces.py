"""Trainings that may take several messages: the server's half; the institution's is `institution/pieces.py`.

    request with the weights        →  steps made, steps left
    request without, as often as it takes
                                    →  steps made, steps left
                                    →  at the end: the weights

A message that is lost is sent once more, when the institution is there again: its machine or its SuperNode has stopped,
or it did not answer in time. It goes on where it was. If that is lost too, before any step, the visit has failed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TypeVar

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from flwr_replay.errors import WireError
from flwr_replay.payloads.replay import Generated, TrainedPrior, TrainGenerator, TrainPrior, Trains
from flwr_replay.report.progress import shown_time
from flwr_replay.server.exchange import Exchanger
from flwr_replay.server.members import Member
from flwr_replay.server.roll import Roll
from flwr_replay.wire.payload import Payload, Request
from flwr_replay.wire.records import StateDict, opened
from flwr_replay.wire.weights import form_of

__all__ = ["Asking", "check_going_on", "shown_progress"]

Answer = TypeVar("Answer", Generated, TrainedPrior)
Read = TypeVar("Read", bound=Payload)
LOST = 2  # messages in a row, after which the visit has failed
PAUSE = 1.0  # seconds between two looks for an institution that has gone


@dataclass(frozen=True)
class Asking:
    """Asks institutions in one exchange, one message at a time.

    Parameters
    ----------
    exchange : Exchanger
        Writes, sends and reads messages.
    roll : Roll
        Tells who has come back.
    grid : Grid
        Flower's.
    server_round : int
        The number of the exchange.
    extra : ConfigRecord
        Further instructions, sent unchanged.
    """

    exchange: Exchanger
    roll: Roll
    grid: Grid
    server_round: int
    extra: ConfigRecord

    def train(
        self, member: Member, request: TrainGenerator | TrainPrior, declared: type[Answer], total: int
    ) -> Answer | None:
        """Send message after message until a training is complete; return the last answer.

        Parameters
        ----------
        member : Member
            The institution.
        request : TrainGenerator | TrainPrior
            With the weights.
        declared : type
            The answers' class.
        total : int
            The most steps that the training has.

        Returns
        -------
        Generated | TrainedPrior | None
            With weights of the form that was sent; None if the institution failed, which is then recorded.
        """
        sent, part = opened(request.arrays or {}), declared.declared()["arrays"].part
        made, lost, there = -1, 0, True
        while there and lost < LOST:
            began = time.monotonic()
            answer = self.answer(member, request, declared)
            if answer is None:
                lost += 1
                again = member.name in self.exchange.lost and lost < LOST
                there = again and self.waited_for(member)
                continue
            try:
                check_going_on(made, answer, total)
                _check_form(sent, answer, part)
            except WireError as error:
                self.exchange.recorder.failed(self.server_round, member.name, str(error))
                return None
            if not answer.steps_left:
                return answer
            self.exchange.recorder.log(
                shown_progress(member.name, request.stage, made, answer, time.monotonic() - began)
            )
            made, lost, request = answer.steps, 0, replace(request, arrays=None)
        return None

    def answer(self, member: Member, request: Request, declared: type[Read]) -> Read | None:
        """Send one request; return its answer, or None if there is no valid one, which is then recorded."""
        member = self.exchange.members.get(member.name) or member  # it may have come back as another node
        message = self.exchange.message(member, request, self.extra)
        for reply in self.exchange(self.grid, self.server_round, [message], needed=False):
            try:
                return declared.decode(reply.content)
            except WireError as error:
                self.exchange.recorder.failed(self.server_round, member.name, str(error))
        return None

    def waited_for(self, member: Member) -> bool:
        """Wait until an institution is there, for as long as at the beginning of a run; return whether it is."""
        deadline = time.monotonic() + self.exchange.settings.wait
        while True:
            self.roll.call(self.grid, self.server_round)
            if self.exchange.members.get(member.name):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(PAUSE)


def shown_progress(name: str, stage: str, made: int, answer: Trains, seconds: float) -> str:
    """Write how far a training is, and from its second message on, how long the rest takes at this one's pace.

    >>> answer = Generated(num_examples=9, examples_seen=0, steps=300, steps_left=100)
    >>> shown_progress("north", "train-generator", 200, answer, 60.0)
    'north: train-generator, 300 of 400 steps, 0:01:00 left'
    """
    left = f", {shown_time(seconds * answer.steps_left / (answer.steps - made))} left" if made >= 0 else ""
    return f"{name}: {stage}, {answer.steps:,} of {answer.steps + answer.steps_left:,} steps{left}"


def check_going_on(made: int, answer: Trains, total: int) -> None:
    """Refuse an answer that would never end a training: without a further step, or with more steps than it has.

    Parameters
    ----------
    made : int
        Steps that the last answer said, -1 before the first.
    answer : Trains
        The answer.
    total : int
        The most steps that the training has.

    Raises
    ------
    WireError
        If so.
    """
    if answer.steps_left and not made < answer.steps <= total - answer.steps_left:
        raise WireError(
            f"must train on to step {total}; its generator had {max(0, made)} steps, now it has {answer.steps} and "
            f"{answer.steps_left} to go"
        )


def _check_form(sent: StateDict, answer: Generated | TrainedPrior, part: bool) -> None:
    """Refuse weights before the end of a training, and at its end others than those of the form that was sent."""
    returned = opened(answer.arrays or {})
    wanted = {name: array for name, array in sent.items() if not part or name in returned}
    if answer.steps_left and returned:
        raise WireError(f"weights come back at the end of a training; these came with {answer.steps_left} steps to go")
    if not answer.steps_left and (not returned or form_of(returned) != form_of(wanted)):
        raise WireError("weights must come back as they were sent, at the end of a training; others came, or none")
