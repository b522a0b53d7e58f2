"""What every movement exchanges by: the roll call, requests and answers, the ledger, failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from numpy.typing import NDArray

from flwr_replay.config.strategy import StrategyConfig
from flwr_replay.errors import ConfigError, DivergedError, FlwrReplayError, RefusedError, RunError, WireError
from flwr_replay.files.atomic import NAME
from flwr_replay.learning.tasks import Task
from flwr_replay.payloads.common import MOST, OPEN_STAGES, Failure, LabelScale, Present, RollCall
from flwr_replay.payloads.replay import Kept
from flwr_replay.server.answers import check_answer, check_foreign, legible, read_answer
from flwr_replay.server.asking import ask, failure_of, reason_of, split_of, stopped, with_advice
from flwr_replay.server.members import Member, Members, present
from flwr_replay.server.recorder import Recorder
from flwr_replay.server.settings import Settings
from flwr_replay.wire.payload import CLIENT_APP_RAISED, Payload, Request, Row, request_of, rows
from flwr_replay.wire.records import config_in, opened
from flwr_replay.wire.weights import form_of, to_arrays

__all__ = ["Exchanging"]

Take = Callable[[Member, Message], None]

NO_APPS_FAULT = 0  # Flower's code for a fault that no app has caused
MOST_NAMED = 8  # institutions in a line of the log
SAME_FAULTS = 3  # messages that may fail with the same text of this code


class Exchanging(Strategy):
    """Sends requests to institutions and takes their answers.

    Parameters
    ----------
    config : StrategyConfig | None
        The strategy's own options, its `<Name>Config`; None means the defaults.
    settings : Settings | None
        What every strategy needs; None means the defaults.
    recorder : Recorder | None
        Writes metrics, ledger and checkpoints; None only logs through Flower.
    """

    name: ClassVar[str]
    config_type: ClassVar[type[StrategyConfig]]
    config: StrategyConfig
    min_nodes: ClassVar[int] = 1
    stages: tuple[str, ...] = ("train", "evaluate")  # all stages that a run requests
    timeout: float  # seconds to wait for an answer
    needs_roll_call: ClassVar[bool] = False  # whether every institution must run this package's client, for all stages
    ours_only: bool  # whether this run needs that, for its options
    one_form: ClassVar[bool] = False  # whether all institutions' models must have the same names, shapes and dtypes
    extra: frozenset[str]  # keys that a user's own ServerApp adds to requests

    def __init__(
        self,
        config: StrategyConfig | None = None,
        settings: Settings | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.config = self.config_type() if config is None else config
        self.settings = settings or Settings()
        self.recorder = recorder or Recorder()
        known = self.one_form and self.settings.model is not None
        self.form = form_of(to_arrays(self.settings.model(0))) if known else ""  # type: ignore[misc]
        self.members = Members()
        self.unfit = False  # whether an institution was refused for its answer to the roll call
        self.trained: set[str] = set()  # names of those that have answered a training request and may have state
        self.answered: list[str] = []  # names of those that gave a valid answer in the last exchange
        self.diverged: list[str] = []  # failures in the last exchange by weights or losses that are not finite
        self.faults: Counter[str] = Counter()  # of the machine: how often, by Flower's text
        self.label_scale: tuple[float, float] | None = None  # regression: mean and standard deviation of all labels

    @property
    def task(self) -> Task:
        """The task.

        Raises
        ------
        ConfigError
            If the settings have none.
        """
        if self.settings.task is None:
            raise ConfigError(f"{type(self).__name__} needs the task: give Settings(task=...)")
        return self.settings.task

    def blank_labels(self, n: int) -> NDArray[Any]:
        """Return n blank labels of the task, as large as real ones."""
        return self.task.blank_labels(n, self.settings.input_shape or ())

    def scale_labels(self, scale: tuple[float, float] | None) -> None:
        """Use this mean and standard deviation for all labels from now on, here and at the institutions."""
        self.label_scale = scale
        if scale is not None:
            self.settings = replace(self.settings, task=self.task.scaled(*scale))

    def addressed(self, member: Member, request: Request) -> Request:
        """Add to a request the fields that depend on the institution, or on all institutions' labels."""
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

    @property
    def needs(self) -> str:
        """What a method needs of a user's own app if a ClientApp that trains and evaluates is not enough."""
        name = type(self).__name__
        return (
            f"{name} needs {name}Client at every institution, app = serve(make_client), and "
            "Settings(roll_call=True) at the server: docs/flower.md shows both"
        )

    def all_stages(self) -> list[str]:
        """Return all stages that the whole run requests."""
        return list(self.stages)

    # --- the roll call ------------------------------------------------------------------------------------------------

    def roll_call(self, server_round: int = 0) -> RollCall:
        """Return the request to a node that joins or returns."""
        return RollCall(
            strategy=self.name,
            run=self.settings.run,
            stages=self.all_stages(),
            form=self.form,
            record=self.settings.record,
            server_round=server_round,
        )

    def call_roll(self, grid: Grid, server_round: int) -> None:
        """Call the roll for nodes that join or return; report and leave out those that refuse or answer invalidly.

        In a user's own app nobody is asked, since a ClientApp that lacks the query would log an error.
        """
        if not self.settings.roll_call:
            for member in self.members.unasked(grid.get_node_ids()):
                self.recorder.log(f"{member.name} is Flower's node {member.node_id}")
            return
        request = self.roll_call(server_round)
        newcomers = self.members.newcomers(grid.get_node_ids())
        asked = [self.message(Member(str(node_id), node_id), request) for node_id in newcomers]
        calls = {message.metadata.dst_node_id: message for message in asked}
        pairs = ask(grid, asked, self.timeout, silent=self.silent)
        replies = {message.metadata.dst_node_id: reply for message, reply in pairs}
        arrived: list[Member] = []
        faults: dict[int, str] = {}
        names: dict[int, str] = {}  # by node id, the names of those that refuse
        for node_id, reply in replies.items():
            try:
                with legible():
                    refusal = failure_of(reply) if reply is not None else None
                    if refusal:
                        faults[node_id], names[node_id] = refusal.failure, refusal.name
                    elif reply is None or (reply.has_error() and reply.error.code != CLIENT_APP_RAISED):
                        faults[node_id] = (
                            f"no answer to the roll call ({reason_of(calls[node_id], reply)}); it is asked again"
                        )
                        self.members.ask_again(node_id)
                    else:
                        member = present(node_id, reply)
                        if self.ours_only and not member.ours:
                            raise WireError(f"runs a ClientApp of its own, and {self.needs}")
                        arrived.append(member)
            except WireError as error:
                faults[node_id], self.unfit = str(error), True
        refused = self.members.admit(sorted(arrived, key=lambda member: member.node_id))
        self.unfit |= bool(refused)
        faults |= refused
        taken = {member.name for member in self.members.known}
        for message in asked:
            node_id = message.metadata.dst_node_id
            claimed = names.get(node_id, "")  # the name in a refusal, which is not proven
            name = claimed if NAME.fullmatch(claimed) and claimed not in taken else str(node_id)
            member = self.members.by_node(node_id) or Member(name, node_id)
            reply = replies[node_id]
            asking, answer = list(rows(message.content, RollCall)), self.roll_answer(reply)
            came = reply.content if answer and reply is not None else None
            self.recorder.travelled(server_round, member, "down", asking, "roll-call", content=message.content)
            self.recorder.travelled(server_round, member, "up", answer, "roll-call", content=came)
            if node_id in faults:
                self.recorder.failed(server_round, member.name, faults[node_id])
        self.recorder.flush()

    def roll_answer(self, reply: Message | None) -> list[Row]:
        """Return the fields of any answer to the roll call, as the ledger counts them."""
        for declared in (Failure, Present, None) if reply is not None and reply.has_content() else ():
            try:
                with legible():
                    found = list(rows(reply.content, declared))  # type: ignore[union-attr]
                    return self.settings.privacy.protected(found, declared, {}) if self.settings.privacy else found
            except WireError:
                continue
        return []

    # --- requests and answers -----------------------------------------------------------------------------------------

    def exchange(
        self,
        grid: Grid,
        server_round: int,
        messages: Iterable[Message],
        needed: bool = True,
        take: Take | None = None,
        at_once: int | None = None,
        missed: Callable[[Member], None] | None = None,
    ) -> list[Message]:
        """Send messages, write the ledger, report failures; return the valid replies, ordered by institutions' names.

        Parameters
        ----------
        grid : Grid
            Flower's, or `flwr_replay.runs.engine.InlineGrid`.
        server_round : int
            The number of the exchange.
        messages : iterable of Message
            Drawn one by one, each just before it is sent.
        needed : bool
            Whether the run ends if nobody answers.
        take : Callable[[Member, Message], None] | None
            Receives each valid reply when it arrives, so that replies need not stay in memory; the returned list is
            then empty. It may refuse a reply by a `WireError`.
        at_once : int | None
            How many messages may wait for a reply at a time, and so how many replies are in memory; None: all.
        missed : Callable[[Member], None] | None
            Called for each message without a valid reply.

        Raises
        ------
        RunError
            If messages were sent and no institution answered any of them.
        DivergedError
            If all of them failed by weights or losses that are not finite.
        """
        good: list[tuple[str, Message]] = []
        answered, diverged, failed = list[str](), list[str](), 0
        take = take or (lambda member, reply: good.append((member.name, reply)))
        noted = map(partial(self.noted, server_round), messages)
        for message, reply in ask(grid, noted, self.timeout, at_once, self.silent):
            member = self.members.by_node(message.metadata.dst_node_id)
            assert member is not None
            fault = self.fault_of(server_round, member, message, reply)
            self.recorder.flush()  # the ledger is written before the answer is used
            if fault is None and reply is not None:
                try:
                    take(member, reply)
                except WireError as error:
                    fault = error
            del reply  # free its memory before the next one is read
            if fault is not None:
                fault = fault if member.ours else with_advice(fault, message, type(self).__name__)
                failed += 1
                self.recorder.failed(server_round, member.name, str(fault))
                diverged += [f"{member.name}: {fault}"] if isinstance(fault, DivergedError) else []
                if missed:
                    missed(member)
                continue
            answered.append(member.name)
            request = request_of(message)
            if request is not None and "continues" in request.declared():
                self.trained.add(member.name)
        self.answered, self.diverged = sorted(answered), diverged
        if max(self.faults.values(), default=0) >= SAME_FAULTS:  # a simulation continues to send to a dead worker
            raise RunError(
                f"all workers of a simulation must be alive; {SAME_FAULTS} messages to one have failed: "
                f"{self.recorder.failures_line()}: free memory, or have fewer workers by a larger value of threads, "
                "and resume the run"
            )
        if needed and not answered and self.stops_without_answers():
            why = f"no institution answered in exchange {server_round}; {self.recorder.failures_line()}"
            raise stopped(why, failed, diverged)
        return [reply for _, reply in sorted(good, key=lambda pair: pair[0])]

    def silent(self, nodes: list[int], seconds: float) -> None:
        """Say in the log for whose answers the run waits."""
        names = sorted(getattr(self.members.by_node(node), "name", f"node {node}") for node in nodes)
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        self.recorder.log(f"waiting for {', '.join(names[:MOST_NAMED])}{more}, {seconds / 60:.0f} min")

    def noted(self, server_round: int, message: Message) -> Message:
        """Write a request to the ledger before it is sent, so that it has it even if the process is killed."""
        member, request = self.members.by_node(message.metadata.dst_node_id), request_of(message)
        assert member is not None
        found, stage = list(rows(message.content, request, self.extra)), request.stage_name if request else ""
        self.recorder.travelled(
            server_round, member, "down", found, stage, split=split_of(message), content=message.content
        )
        self.recorder.flush()
        return message

    def fault_of(
        self, server_round: int, member: Member, message: Message, reply: Message | None
    ) -> FlwrReplayError | None:
        """Write an answer to the ledger; return why it is invalid, or None."""
        if reply is None or reply.has_error():
            if reply is not None and reply.error.code == NO_APPS_FAULT:
                self.faults[reply.error.reason or ""] += 1
            return RunError(reason_of(message, reply))
        request = request_of(message)
        stage = request.stage_name if request else ""
        try:
            with legible():
                if reply.metadata.src_node_id != member.node_id:
                    raise WireError(
                        "an answer must come from the institution that was asked; this one comes from another"
                    )
                refusal = failure_of(reply)
                declared: type[Payload] | None = Failure if refusal else None
                if request and not refusal and (member.ours or stage not in OPEN_STAGES):
                    declared = request.answer
                found, metrics = read_answer(reply.content, declared)
                if self.settings.privacy:
                    found = self.settings.privacy.protected(found, declared, metrics)
        except FlwrReplayError as error:
            return WireError(f"sent an invalid answer: {error}")
        if (plan := self.settings.privacy) and "delta" in metrics:
            epsilon, delta = metrics.get("epsilon"), metrics["delta"]
            proven = epsilon is not None and not plan.unproven
            self.recorder.spent(server_round, member.name, epsilon, delta, plan.mechanism, proven=proven)
        raw_bytes, split = metrics.get("raw-bytes"), split_of(message)
        self.recorder.travelled(server_round, member, "up", found, stage, raw_bytes, split, reply.content)
        if refusal:
            diverged = refusal.error == DivergedError.__name__
            return (DivergedError if diverged else RefusedError)(refusal.failure)
        try:
            with legible():
                if declared is None:
                    check_foreign(reply.content, message.content, message.metadata.message_type == "train")
                elif request is not None:
                    examples = self.examples_of(member, request, config_in(message.content))
                    check_answer(reply.content, declared, request, message.content, examples)
                    if self.settings.privacy:
                        self.settings.privacy.check_stated(declared, [row.field for row in found], metrics)
        except WireError as error:
            return WireError(f"sent an invalid answer: {error}")
        except DivergedError as error:
            return error
        return None

    def examples_of(self, member: Member, request: type[Request], instructions: dict[str, Any]) -> range:
        """Return the numbers of examples that an answer may report.

        Parameters
        ----------
        member : Member
            The institution that answers.
        request : type[Request]
            The request's class.
        instructions : dict[str, Any]
            The request's instructions.

        Returns
        -------
        range
            In the base class the number of the roll call. Any number if there is none, for test examples, and where the
            answer counts others' examples.
        """
        tested = request.message_type == "evaluate" and instructions.get("split") != "train"
        if tested or not member.ours or request.answer is Kept:
            return range(0 if request.answer is Kept else 1, MOST + 1)
        return range(member.num_examples, member.num_examples + 1)

    def finite(self, arrays: ArrayRecord) -> ArrayRecord:
        """Refuse weights that are not finite after the server's step, so that no checkpoint has them."""
        for name, array in opened(arrays).items():
            if not np.isfinite(array).all():
                raise DivergedError(
                    f"the weights must stay finite; {name!r} is not, after the server's step: lower training.lr"
                )
        return arrays

    def stops_without_answers(self) -> bool:
        """Return whether an exchange without answers ends the run."""
        return True

    def answers(self, replies: Iterable[Message]) -> Iterable[tuple[Member, Message]]:
        """Pair replies with their institutions, ordered by name, whatever the order of arrival."""
        pairs = [(self.members.by_node(reply.metadata.src_node_id), reply) for reply in replies]
        return sorted(((m, reply) for m, reply in pairs if m is not None), key=lambda pair: pair[0].name)
