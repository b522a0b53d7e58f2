"""An exchange: requests to institutions, their answers, the ledger, failures."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_replay.errors import ConfigError, DivergedError, FlwrReplayError, RefusedError, RunError, WireError
from flwr_replay.learning.tasks import Regression, Task
from flwr_replay.payloads.common import MOST, OPEN_STAGES, Failure, LabelScale, Summed
from flwr_replay.payloads.replay import Kept
from flwr_replay.report.progress import shown_time
from flwr_replay.server.answers import check_answer, check_foreign, legible, read_answer
from flwr_replay.server.asking import LOST, ask, failure_of, reason_of, split_of, stopped, with_advice, worker_failed
from flwr_replay.server.members import Member, Members
from flwr_replay.server.recorder import Recorder, Snapshot
from flwr_replay.server.settings import Settings
from flwr_replay.wire.bounds import cut_back
from flwr_replay.wire.payload import Payload, Request, request_of, rows
from flwr_replay.wire.records import StateDict, array_record, config_in, opened

__all__ = ["Exchange", "Exchanger"]

Exchange = tuple[Member, Request, Payload, int]  # of a forecast: request, answer, how often
Take = Callable[[Member, Message], None]

SAME_FAULTS = 3  # messages to a simulation's workers that may fail with the same text
MOST_NAMED = 8  # institutions in a line of the log


class Exchanger:
    """Sends requests to institutions and takes their answers; calling it makes one exchange.

    `method` is the `Movement` whose exchanges these are; its methods `addressed`, `examples_of` and
    `stops_without_answers` decide about them.
    """

    def __init__(self, method: Any, settings: Settings, recorder: Recorder) -> None:
        self.method, self.settings, self.recorder = method, settings, recorder
        self.members = Members()
        self.timeout = settings.timeout  # seconds to wait for an answer
        self.extra: frozenset[str] = frozenset()  # keys that a user's own ServerApp adds to requests
        self.label_scale: tuple[float, float] | None = None  # regression: mean and standard deviation of all labels
        self.longest = Counter[str]()  # by stage, the whole seconds of the longest valid answer
        self.trained: dict[str, int] = {}  # by name, the last exchange in which a request to train was answered
        self.answered: list[str] = []  # names of those that gave a valid answer in the last exchange
        self.failed: list[str] = []  # names of those that gave none
        self.diverged: list[str] = []  # failures in the last exchange by weights or losses that are not finite
        self.lost: list[str] = []  # names of those that gave no answer: too late, or their node or its app has ended
        self.faults: Counter[str] = Counter()  # of a simulation's workers: how often, by Flower's text

    @property
    def task(self) -> Task:
        """The task."""
        if self.settings.task is None:
            raise ConfigError(f"{type(self.method).__name__} needs the task: give Settings(task=...)")
        return self.settings.task

    def scale_labels(self, scale: tuple[float, float] | None) -> None:
        """Use this mean and standard deviation for all labels from now on, here and at the institutions.

        A regression's known range is used in their place.
        """
        if isinstance(task := self.settings.task, Regression) and task.bounded:
            scale = task.mean, task.scale
        self.label_scale = scale
        if scale is not None:
            self.settings = replace(self.settings, task=self.task.scaled(*scale))

    def snapshot(
        self, exchange: int, arrays: StateDict, state_arrays: StateDict, state_values: dict[str, Any]
    ) -> Snapshot:
        """Return the snapshot of a run after an exchange."""
        examples = {member.name: member.num_examples for member in self.members.known}
        bindings = {member.name: (member.node_id, member.proof) for member in self.members.known}
        trained, scale = dict(self.trained), self.label_scale
        return Snapshot(exchange, arrays, state_arrays, state_values, trained, examples, scale, bindings)

    def restore(self, snapshot: Snapshot) -> None:
        """Restore what a snapshot has of members and trainings; labels are scaled once the task is known."""
        self.members.remember(snapshot.examples, snapshot.bindings)
        self.trained = dict(snapshot.trained)

    def addressed(self, member: Member, request: Request) -> Request:
        """Add to a request the fields that depend on the institution, or on all institutions' labels."""
        if "continues" in request.declared():
            request = replace(request, continues=self.trained.get(member.name, 0))  # type: ignore[call-arg]
        if "stated" in request.declared() and (released := self.recorder.released.get(member.name)):
            request = replace(request, stated=released["epsilon"] or 0.0)  # type: ignore[call-arg]
        if isinstance(request, LabelScale) and self.label_scale is not None:
            mean, scale = self.label_scale
            request = replace(request, label_mean=mean, label_scale=scale)  # type: ignore[call-arg]
        if isinstance(request, Summed) and self.settings.hiding.sums_only:
            request = replace(request, total=sum(m.num_examples for m in self.members.known))  # type: ignore[call-arg]
        return request

    def message(self, member: Member, request: Request, extra: ConfigRecord | None = None) -> Message:
        """Encode a request to one institution; every message has records of its own."""
        content = self.method.addressed(member, request).encode()
        if extra:
            content["config"].update(extra)
        group = str(request.exchange)
        return Message(content, member.node_id, request.message_type, group_id=group, ttl=self.timeout)

    def __call__(
        self,
        grid: Grid,
        exchange: int,
        messages: Iterable[Message],
        needed: bool = True,
        take: Take | None = None,
        at_once: int | None = None,
        missed: Callable[[Member], None] | None = None,
    ) -> list[Message]:
        """Send messages, write the ledger, report failures; return the valid replies, ordered by institutions' names.

        Messages are drawn one by one, each just before it is sent. If the replies are `needed`, the run ends if nobody
        answers. `take` receives each valid reply when it arrives, so that replies need not stay in memory; the returned
        list is then empty. It may refuse a reply by a `WireError`. `at_once` messages may wait for a reply at a time,
        and so many replies are in memory; None: all. `missed` is called for each message without a valid reply.

        Raises
        ------
        RunError
            If replies are needed and nobody gives one, and `stops_without_answers` of the method says so.
        DivergedError
            If all of them failed by weights or losses that are not finite.
        """
        good: list[tuple[str, Message]] = []
        answered, trained, failed = list[str](), list[str](), list[str]()
        diverged, lost = list[str](), list[str]()
        take = take or (lambda member, reply: good.append((member.name, reply)))
        noted = map(partial(self.noted, exchange), messages)
        for message, reply in ask(grid, noted, self.timeout, at_once, self.silent):
            member = self.members.by_node(message.metadata.dst_node_id)
            assert member is not None
            request = request_of(message)
            fault = self.fault_of(exchange, member, message, reply, request)
            if reply is None or (reply.has_error() and reply.error.code in LOST):
                lost.append(member.name)
            elif worker_failed(grid, reply):
                self.faults[reply.error.reason or ""] += 1
            self.recorder.flush()  # the ledger is written before the answer is used
            if fault is None and reply is not None:
                try:
                    take(member, reply)
                except WireError as error:
                    fault = error
            del reply  # free its memory before the next one is read
            if fault is not None:
                fault = fault if member.ours else with_advice(fault, message, type(self.method).__name__)
                failed.append(member.name)
                self.recorder.failed(exchange, member.name, str(fault))
                diverged += [f"{member.name}: {fault}"] if isinstance(fault, DivergedError) else []
                if missed:
                    missed(member)
                continue
            answered.append(member.name)
            if request is not None:
                took = int(time.time() - message.metadata.created_at)
                self.longest[request.stage_name] = max(took, self.longest[request.stage_name])
            if request is not None and "continues" in request.declared():
                trained.append(member.name)
        self.recorder.tell_alike()
        self.trained |= dict.fromkeys(trained, exchange)  # only now: in an exchange some train several times
        self.answered, self.failed, self.diverged, self.lost = sorted(answered), failed, diverged, lost
        if max(self.faults.values(), default=0) >= SAME_FAULTS:  # a simulation continues to send to a dead worker
            raise RunError(
                f"all workers of a simulation must be alive; {SAME_FAULTS} messages to one have failed: "
                f"{self.recorder.failures_line()}: free memory, or have fewer workers by a larger value of threads, "
                "and resume the run"
            )
        if needed and not answered and self.method.stops_without_answers():
            why = f"no institution answered in exchange {exchange}; {self.recorder.failures_line()}"
            raise stopped(why, len(failed), diverged)
        return [reply for _, reply in sorted(good, key=lambda pair: pair[0])]

    def noted(self, exchange: int, message: Message) -> Message:
        """Write a request to the ledger before it is sent, so that it has it even if the process is killed."""
        member, request = self.members.by_node(message.metadata.dst_node_id), request_of(message)
        assert member is not None
        fields, stage = list(rows(message.content, request, self.extra)), request.stage_name if request else ""
        self.recorder.travelled(
            exchange, member, "down", fields, stage, split=split_of(message), content=message.content
        )
        self.recorder.flush()
        return message

    def fault_of(
        self, exchange: int, member: Member, message: Message, reply: Message | None, request: type[Request] | None
    ) -> FlwrReplayError | None:
        """Write an answer to the ledger; return why it is invalid, or None."""
        if reply is None or reply.has_error():
            return RunError(reason_of(message, reply))
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
                fields, metrics = read_answer(reply.content, declared)
                if self.settings.privacy:
                    fields = self.settings.privacy.protected(fields, declared, metrics)
        except FlwrReplayError as error:
            return WireError(f"sent an invalid answer: {error}")
        if (plan := self.settings.privacy) and "delta" in metrics:
            epsilon, delta = metrics.get("epsilon"), metrics["delta"]
            proven = epsilon is not None and not plan.unproven
            self.recorder.spent(exchange, member.name, epsilon, delta, plan, proven=proven)
        raw_bytes, split = metrics.get("raw-bytes"), split_of(message)
        self.recorder.travelled(exchange, member, "up", fields, stage, raw_bytes, split, reply.content)
        if refusal:
            diverged = refusal.error == DivergedError.__name__
            return (DivergedError if diverged else RefusedError)(refusal.failure)
        try:
            with legible():
                if declared is None:
                    check_foreign(reply.content, message.content, message.metadata.message_type == "train")
                elif request is not None:
                    examples = self.method.examples_of(member, request, config_in(message.content))
                    hidden = self.settings.hiding, member.name
                    check_answer(reply.content, declared, request, message.content, examples, *hidden)
                    if self.settings.privacy:
                        self.settings.privacy.check_stated(declared, [row.field for row in fields], metrics)
        except WireError as error:
            return WireError(f"sent an invalid answer: {error}")
        except DivergedError as error:
            return error
        return None

    def examples_of(self, member: Member, request: type[Request], instructions: dict[str, Any]) -> range:
        """Return the numbers of examples that an answer may report.

        It is the number of the roll call. Any number if there is none, for test examples, and where the answer counts
        others' examples. Only of validation examples there may be none.
        """
        split = instructions.get("split", "test") if request.message_type == "evaluate" else "train"
        if split != "train" or not member.ours or request.answer is Kept:
            return range(0 if request.answer is Kept or split == "validation" else 1, MOST + 1)
        return range(member.num_examples, member.num_examples + 1)

    def finite(self, arrays: ArrayRecord) -> ArrayRecord:
        """Refuse weights that are not finite after the server's step; cut others back, so that all can train them."""
        weights = opened(arrays)
        for name, array in weights.items():
            if not np.isfinite(array).all():
                raise DivergedError(
                    f"the weights must stay finite; {name!r} is not, after the server's step: lower training.lr"
                )
        if not (cut := cut_back(weights)):
            return arrays
        self.recorder.log(
            f"numbers of {next(iter(cut))!r} left what institutions accept at the server's step: cut back"
        )
        return array_record({**weights, **cut})

    def answers(self, replies: Iterable[Message]) -> Iterable[tuple[Member, Message]]:
        """Pair replies with their institutions, ordered by name, whatever the order of arrival."""
        pairs = [(self.members.by_node(reply.metadata.src_node_id), reply) for reply in replies]
        return sorted(((m, reply) for m, reply in pairs if m is not None), key=lambda pair: pair[0].name)

    def silent(self, messages: list[Message], seconds: float, hint: str = "") -> None:
        """Say in the log for whose answers the run waits, and how long such an answer has taken before."""
        nodes = [message.metadata.dst_node_id for message in messages]
        names = sorted(self.members.called(node) or f"node {node}" for node in nodes)
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        request = request_of(messages[0])
        stage = request.stage_name if request else ""
        known = f"; {stage} took up to {shown_time(self.longest[stage])} before" if self.longest[stage] else hint
        self.recorder.log(f"waiting for {', '.join(names[:MOST_NAMED])}{more}, {seconds / 60:.0f} min{known}")
