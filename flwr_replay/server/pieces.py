"""Trainings that may take several messages: the server's half; the institution's is `institution/pieces.py`.

No method's idea is here, only how its messages are cut.

    request, for replay with the weights    →  steps made, steps left
    request without, as often as it takes   →  steps made, steps left
                                            →  at the end, for replay: the weights

For replay a message that is lost is sent once more, when the institution is there again: its machine or its SuperNode
has stopped, or it did not answer in time. It goes on where it was. If that is lost too, before any step, the visit has
failed.
"""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from flwr_replay.errors import WireError
from flwr_replay.payloads.replay import Trains
from flwr_replay.report.progress import shown_time
from flwr_replay.server.exchange import Exchanger
from flwr_replay.server.members import Member
from flwr_replay.server.roll import Roll
from flwr_replay.wire.payload import Payload, Request
from flwr_replay.wire.records import StateDict, opened
from flwr_replay.wire.weights import form_of

__all__ = ["Answer", "Asking", "shown_progress"]

Answer = TypeVar("Answer", bound=Trains)
Read = TypeVar("Read", bound=Payload)
LOST = 2  # messages in a row, after which an institution has failed that is waited for
PAUSE = 1.0  # seconds between two looks for an institution that has gone


@dataclass(frozen=True)
class Asking:
    """Asks institutions in one exchange; without a `roll`, which tells who has come back, nobody is waited for."""

    exchanger: Exchanger
    roll: Roll | None
    grid: Grid
    exchange: int
    extra: ConfigRecord

    def train(self, totals: Mapping[Member, int], request: Request, declared: type[Answer]) -> dict[str, list[Answer]]:
        """Send message after message until every training is complete, or its institution has failed.

        Given are, by institution, the most steps that its training has, and the first message; later ones have no
        weights. Returned are, by institution, of complete trainings alone, the first to end first, all answers. If
        weights were sent, the last one has weights of their form.
        """
        sent = opened(vars(request).get("arrays") or {})
        further = replace(request, arrays=None) if sent else request  # type: ignore[call-arg]
        heard: dict[str, list[Answer]] = {member.name: [] for member in totals}
        complete: dict[str, list[Answer]] = {}
        lost, members = Counter[str](), [*totals]
        while members:
            began, going_on = time.monotonic(), list[Member]()
            answers = self.answers({m: further if heard[m.name] else request for m in members}, declared)
            gone = {*self.exchanger.lost}
            for member in members:
                name, earlier = member.name, heard[member.name]
                lost[name] = 0 if name in answers else lost[name] + 1
                if name in answers:
                    answer, made = answers[name], earlier[-1].steps if earlier else -1
                    try:
                        _check(made, answer, totals[member], sent)
                    except WireError as error:
                        self.exchanger.recorder.failed(self.exchange, name, str(error))
                        continue
                    earlier.append(answer)
                    if answer.steps_left:
                        seconds = time.monotonic() - began
                        self.exchanger.recorder.log(shown_progress(name, request.stage, made, answer, seconds))
                        going_on.append(member)
                    else:
                        complete[name] = earlier
                elif self.roll and name in gone and lost[name] < LOST and self.waited_for(member, self.roll):
                    going_on.append(member)
            members = going_on
        return complete

    def answers(self, requests: Mapping[Member, Request], declared: type[Read]) -> dict[str, Read]:
        """Send a request to each institution; return the valid answers by name. Others are recorded as failures."""
        # one that was away may have come back as another node
        pairs = [(self.exchanger.members.get(member.name) or member, request) for member, request in requests.items()]
        messages = [self.exchanger.message(member, request, self.extra) for member, request in pairs]
        by_name: dict[str, Read] = {}
        replies = self.exchanger(self.grid, self.exchange, messages, needed=False)
        for member, reply in self.exchanger.answers(replies):
            try:
                by_name[member.name] = declared.decode(reply.content)
            except WireError as error:
                self.exchanger.recorder.failed(self.exchange, member.name, str(error))
        return by_name

    def waited_for(self, member: Member, roll: Roll) -> bool:
        """Wait until an institution is there, for as long as at the beginning of a run; return whether it is."""
        deadline = time.monotonic() + self.exchanger.settings.wait
        while True:
            roll.call(self.grid, self.exchange)
            if self.exchanger.members.get(member.name):
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(PAUSE)


def shown_progress(name: str, stage: str, made: int, answer: Trains, seconds: float) -> str:
    """Write how far a training is, and from its second message on, how long the rest takes at this one's pace.

    >>> answer = Trains(steps=300, steps_left=100)
    >>> shown_progress("north", "train-generator", 200, answer, 60.0)
    'north: train-generator, 300 of 400 steps, 0:01:00 left'
    """
    left = f", {shown_time(seconds * answer.steps_left / (answer.steps - made))} left" if made >= 0 else ""
    return f"{name}: {stage}, {answer.steps:,} of {answer.steps + answer.steps_left:,} steps{left}"


def _check(made: int, answer: Trains, total: int, sent: StateDict) -> None:
    """Refuse an answer that would never end a training: without a further step, or with more steps than it has.

    So are weights before its end, and at its end others than those of the form that was sent.
    """
    if answer.steps_left and not made < answer.steps <= total - answer.steps_left:
        raise WireError(
            f"must train on to step {total}; its generator had {max(0, made)} steps, now it has {answer.steps} and "
            f"{answer.steps_left} to go"
        )
    returned = opened(vars(answer).get("arrays") or {})
    if answer.steps_left and returned:
        raise WireError(f"weights come back at the end of a training; these came with {answer.steps_left} steps to go")
    if sent and not answer.steps_left:
        part = type(answer).declared()["arrays"].part
        wanted = {name: array for name, array in sent.items() if not part or name in returned}
        if not returned or form_of(returned) != form_of(wanted):
            raise WireError("weights must come back as they were sent, at the end of a training; others came, or none")
