"""Messages and their answers: the roll call, the ledger's lines, failures; what every movement exchanges by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_replay.errors import DivergedError, RunError, WireError
from flwr_replay.movements.answers import check_answer, not_finite
from flwr_replay.movements.members import Member, Members, ask, failure_of, reason_of
from flwr_replay.movements.recorder import Recorder
from flwr_replay.movements.settings import Settings
from flwr_replay.payloads.common import OPEN_STAGES, Failure, LabelScale, Present, RollCall
from flwr_replay.training import form_of, to_arrays
from flwr_replay.wire import CLIENT_APP_RAISED, Payload, Request, metrics_in, opened, request_of, rows

__all__ = ["Exchanging"]

NO_APPS_FAULT = 0  # Flower's code for what no app has caused
SAME_FAULTS = 3  # messages that may fail for the same one, told by its text


class Exchanging(Strategy):
    """Sends requests to institutions and takes their answers.

    Parameters
    ----------
    config : Any
        The strategy's own options, its `<Name>Config`; None means the defaults.
    settings : Settings | None
        What every strategy needs; None means the defaults.
    recorder : Recorder | None
        Keeps metrics, ledger and checkpoints; None logs through Flower only.
    """

    name: ClassVar[str]
    config_type: ClassVar[type[Any]]
    min_nodes: ClassVar[int] = 1
    stages: tuple[str, ...] = ("train", "evaluate")  # what every institution is asked for
    timeout: float  # seconds to wait for answers
    one_form: ClassVar[bool] = False  # no institution takes part whose model has other names or shapes
    extra: frozenset[str]  # keys that a user's own ServerApp adds to requests

    def __init__(self, config: Any = None, settings: Settings | None = None, recorder: Recorder | None = None) -> None:
        self.config = self.config_type() if config is None else config
        self.settings = settings or Settings()
        self.recorder = recorder or Recorder()
        known = self.one_form and self.settings.model is not None
        self.form = form_of(to_arrays(self.settings.model(0))) if known else ""  # type: ignore[misc]
        self.members = Members()
        self.trained: set[str] = set()  # who has answered a training request, and may have state to go on with
        self.good: list[tuple[str, Message]] = []  # the good answers of the last exchange, by name
        self.faults: Counter[str] = Counter()  # of the machine, by what Flower says of each
        self.label_scale: tuple[float, float] | None = None  # regression: mean and standard deviation of all labels

    def scale_labels(self, scale: tuple[float, float] | None) -> None:
        """Have labels standardised by this mean and standard deviation from now on, here and at the institutions."""
        self.label_scale = scale
        if scale is not None:
            self.settings = replace(self.settings, task=self.settings.task.scaled(*scale))

    def addressed(self, member: Member, request: Request) -> Request:
        """Add to a request what depends on the institution, or on all institutions' labels."""
        if "continues" in request.declared():
            request = replace(request, continues=member.name in self.trained)  # type: ignore[call-arg]
        if "stated" in request.declared() and (released := self.recorder.released.get(member.name)):
            request = replace(request, stated=released["epsilon"] or 0.0)  # type: ignore[call-arg]
        if isinstance(request, LabelScale) and self.label_scale is not None:
            mean, scale = self.label_scale
            request = replace(request, label_mean=mean, label_scale=scale)  # type: ignore[call-arg]
        return request

    def message(self, member: Member, request: Request, extra: ConfigRecord | None = None) -> Message:
        """Encode a request to one institution; every message has records of its own."""
        content = self.addressed(member, request).encode()
        if extra:
            content.config_records["config"].update(extra)
        group = str(request.server_round)
        return Message(content, member.node_id, request.message_type, group_id=group, ttl=self.timeout)

    def all_stages(self) -> list[str]:
        """Return what every institution is asked for in the whole run."""
        return list(self.stages)

    def roll_call(self, server_round: int = 0) -> RollCall:
        """Return what a node that is new is asked."""
        run, stages = self.settings.run, self.all_stages()
        return RollCall(strategy=self.name, run=run, stages=stages, form=self.form, server_round=server_round)

    def call_roll(self, grid: Grid, server_round: int) -> None:
        """Ask nodes that are new for their names; one that refuses is reported and left out."""
        request = self.roll_call(server_round)
        newcomers = self.members.newcomers(grid.get_node_ids())
        if not newcomers:
            return
        asked = [self.message(Member(str(node_id), node_id), request) for node_id in newcomers]
        replies = ask(grid, asked, self.timeout)
        for message in asked:
            node_id, reply = message.metadata.dst_node_id, replies.get(message.metadata.message_id)
            refusal = failure_of(reply) if reply is not None else None
            if reply is None or (reply.has_error() and reply.error.code != CLIENT_APP_RAISED):
                lost = f"no answer to the roll call ({reason_of(message, reply)}); it is asked again"
                refusal = Failure(failure=lost, error="RunError")
                self.members.ask_again(node_id)
            if refusal is None:
                try:
                    self.members.admit(node_id, reply)
                except (RunError, WireError) as error:
                    if server_round == 0:
                        raise
                    refusal = Failure(failure=str(error), error="RunError")  # a late one must not end the others' run
            # One that refuses is no member; its messages travelled all the same.
            told = refusal.name if refusal else ""
            member = self.members.by_node(node_id) or Member(told or str(node_id), node_id)
            found = list(rows(message.content, RollCall))
            self.recorder.travelled(server_round, member, "down", found, "roll-call")
            if reply is not None and reply.has_content():
                declared = Failure if failure_of(reply) else Present if member.ours else None
                found = list(rows(reply.content, declared))
                if self.settings.privacy:
                    found = self.settings.privacy.protected(found, declared, {})
                self.recorder.travelled(server_round, member, "up", found, "roll-call")
            if refusal:
                self.recorder.failed(server_round, member.name, refusal.failure)
        self.recorder.flush()

    def exchange(
        self, grid: Grid, server_round: int, messages: Iterable[Message], needed: bool = True
    ) -> list[Message]:
        """Send messages, write the ledger, report who failed; return the good replies by institution's name.

        Raises
        ------
        RunError
            If messages were sent and no institution answered any of them.
        DivergedError
            If an institution's loss is not finite.
        """
        asked = list(messages)
        self.sending(server_round, asked)
        replies = ask(grid, asked, self.timeout)
        good: list[tuple[str, Message]] = []
        diverged: list[str] = []
        for message in asked:
            member = self.members.by_node(message.metadata.dst_node_id)
            assert member is not None
            request = request_of(message)
            stage = request.stage_name if request else ""
            reply = replies.get(message.metadata.message_id)
            if reply is None or reply.has_error():
                self.recorder.failed(server_round, member.name, reason_of(message, reply))
                if reply is not None and reply.error.code == NO_APPS_FAULT:
                    self.faults[reply.error.reason or ""] += 1
                continue
            refusal = failure_of(reply)
            declared: type[Payload] | None = Failure if refusal else None
            if request and not refusal and (member.ours or stage not in OPEN_STAGES):
                declared = request.answer
            try:
                found = check_answer(reply.content, declared, request, message.content)
            except WireError as error:
                self.recorder.failed(server_round, member.name, f"sent what it may not: {error}")
                continue
            told = metrics_in(reply.content)
            if self.settings.privacy and "delta" in told:
                epsilon, mechanism = told.get("epsilon"), self.settings.privacy.mechanism
                self.recorder.spent(server_round, member.name, epsilon, told["delta"], mechanism)
            if self.settings.privacy:
                found = self.settings.privacy.protected(found, declared, told)
            raw_bytes = told.get("raw-bytes")
            self.recorder.travelled(server_round, member, "up", found, stage, raw_bytes)
            if refusal:
                self.recorder.failed(server_round, member.name, refusal.failure)
                diverged += [f"{member.name}: {refusal.failure}"] if refusal.error == DivergedError.__name__ else []
                continue
            good.append((member.name, reply))
            if request is not None and "continues" in request.declared():
                self.trained.add(member.name)
        self.recorder.flush()
        if diverged:  # what the others have released is in the ledger
            raise DivergedError(diverged[0])
        if max(self.faults.values(), default=0) >= SAME_FAULTS:  # a simulation goes on sending to a worker that is dead
            raise RunError(
                f"no worker of a simulation may be gone; {SAME_FAULTS} messages to one have failed: "
                f"{self.recorder.failures_line()}: free memory, or have fewer workers by a larger threads, and resume "
                "the run"
            )
        self.good = good
        if needed and not good and self.stops_without_answers():
            raise RunError(f"no institution answered in exchange {server_round}; {self.recorder.failures_line()}")
        return [reply for _, reply in sorted(good, key=lambda pair: pair[0])]

    def sending(self, server_round: int, messages: Iterable[Message]) -> None:
        """Write down what is about to be sent: who is killed before the answers are here knows whom it asked."""
        for message in messages:
            member, request = self.members.by_node(message.metadata.dst_node_id), request_of(message)
            assert member is not None
            found, stage = list(rows(message.content, request, self.extra)), request.stage_name if request else ""
            self.recorder.travelled(server_round, member, "down", found, stage)
        self.recorder.flush()

    def finite(self, arrays: ArrayRecord) -> ArrayRecord:
        """Refuse weights that are not finite, so that no checkpoint ever holds them."""
        for name, array in opened(arrays).items():
            if not np.isfinite(array).all():
                whose = ", ".join(not_finite(self.good)) or "the server"
                raise DivergedError(f"the weights must stay finite; {name!r} is not, from {whose}: lower training.lr")
        return arrays

    def stops_without_answers(self) -> bool:
        """Say whether an exchange that nobody answers ends the run."""
        return True

    def answers(self, replies: Iterable[Message]) -> Iterable[tuple[Member, Message]]:
        """Pair replies with their institutions, by name, whatever the order of arrival."""
        good = [reply for reply in replies if not reply.has_error() and failure_of(reply) is None]
        pairs = [(self.members.by_node(reply.metadata.src_node_id), reply) for reply in good]
        return sorted(((m, reply) for m, reply in pairs if m is not None), key=lambda pair: pair[0].name)
