"""What every movement exchanges by: requests and answers, the ledger, failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from flwr_replay.errors import DivergedError, FlwrReplayError, RefusedError, RunError, WireError
from flwr_replay.payloads.common import MOST, OPEN_STAGES, Failure
from flwr_replay.payloads.replay import Kept
from flwr_replay.server.answers import check_answer, check_foreign, legible, read_answer
from flwr_replay.server.asking import LOST, ask, failure_of, reason_of, split_of, stopped, with_advice, worker_failed
from flwr_replay.server.calling import Calling
from flwr_replay.server.members import Member
from flwr_replay.wire.bounds import cut_back
from flwr_replay.wire.payload import Payload, Request, request_of, rows
from flwr_replay.wire.records import array_record, config_in, opened

__all__ = ["Exchanging"]

Take = Callable[[Member, Message], None]

SAME_FAULTS = 3  # messages to a simulation's workers that may fail with the same text


class Exchanging(Calling):
    """Sends requests to institutions and takes their answers."""

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
            Flower's, or `flwr_replay.engines.inline.InlineGrid`.
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
        answered, trained, failed = list[str](), list[str](), list[str]()
        diverged, lost = list[str](), list[str]()
        take = take or (lambda member, reply: good.append((member.name, reply)))
        noted = map(partial(self.noted, server_round), messages)
        for message, reply in ask(grid, noted, self.timeout, at_once, self.silent):
            member = self.members.by_node(message.metadata.dst_node_id)
            assert member is not None
            fault = self.fault_of(server_round, member, message, reply)
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
                fault = fault if member.ours else with_advice(fault, message, type(self).__name__)
                failed.append(member.name)
                self.recorder.failed(server_round, member.name, str(fault))
                diverged += [f"{member.name}: {fault}"] if isinstance(fault, DivergedError) else []
                if missed:
                    missed(member)
                continue
            answered.append(member.name)
            request = request_of(message)
            if request is not None:
                took = int(time.time() - message.metadata.created_at)
                self.longest[request.stage_name] = max(took, self.longest[request.stage_name])
            if request is not None and "continues" in request.declared():
                trained.append(member.name)
        self.trained |= dict.fromkeys(trained, server_round)  # only now: in an exchange some train several times
        self.answered, self.failed, self.diverged, self.lost = sorted(answered), failed, diverged, lost
        if max(self.faults.values(), default=0) >= SAME_FAULTS:  # a simulation continues to send to a dead worker
            raise RunError(
                f"all workers of a simulation must be alive; {SAME_FAULTS} messages to one have failed: "
                f"{self.recorder.failures_line()}: free memory, or have fewer workers by a larger value of threads, "
                "and resume the run"
            )
        if needed and not answered and self.stops_without_answers():
            why = f"no institution answered in exchange {server_round}; {self.recorder.failures_line()}"
            raise stopped(why, len(failed), diverged)
        return [reply for _, reply in sorted(good, key=lambda pair: pair[0])]

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
                    by = member.name if self.settings.sealed else ""
                    check_answer(reply.content, declared, request, message.content, examples, by, self.settings.masked)
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
            answer counts others' examples. Only of validation examples there may be none.
        """
        split = instructions.get("split", "test") if request.message_type == "evaluate" else "train"
        if split != "train" or not member.ours or request.answer is Kept:
            return range(0 if request.answer is Kept or split == "validation" else 1, MOST + 1)
        return range(member.num_examples, member.num_examples + 1)

    def finite(self, arrays: ArrayRecord) -> ArrayRecord:
        """Refuse weights that are not finite after the server's step; cut others back, so that all can train them."""
        found = opened(arrays)
        for name, array in found.items():
            if not np.isfinite(array).all():
                raise DivergedError(
                    f"the weights must stay finite; {name!r} is not, after the server's step: lower training.lr"
                )
        if not (cut := cut_back(found)):
            return arrays
        self.recorder.log(
            f"numbers of {next(iter(cut))!r} left what institutions accept at the server's step: cut back"
        )
        return array_record({**found, **cut})

    def stops_without_answers(self) -> bool:
        """Return whether an exchange without answers ends the run."""
        return True

    def answers(self, replies: Iterable[Message]) -> Iterable[tuple[Member, Message]]:
        """Pair replies with their institutions, ordered by name, whatever the order of arrival."""
        pairs = [(self.members.by_node(reply.metadata.src_node_id), reply) for reply in replies]
        return sorted(((m, reply) for m, reply in pairs if m is not None), key=lambda pair: pair[0].name)
