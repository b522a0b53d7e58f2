"""Grids whose nodes are served by several workers: processes of this machine, or of a Ray cluster (`cluster/grid.py`).

A node stays with its worker, so what a worker holds in memory stays warm: data, models, an institution's last state. A
worker gets one message at a time. The results have the same bits as in one process. Only an exchange with several
institutions is faster: a serial method asks one at a time.

With `--workers N`, messages go through pipes to N processes of this machine. Where one is killed, another takes its
place and is asked the same again: a repeated message gives the same bits, but for secret noise. No worker outlives the
process that started it.
"""

import logging
import multiprocessing
import pickle
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, ClassVar, Self
from uuid import uuid4

from flwr.app import Error, Message

from flwr_replay.client_app import app
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.errors import RunError
from flwr_replay.processes import end_with_parent
from flwr_replay.report.progress import without_colours

__all__ = ["TRIES", "LocalGrid", "Worker", "WorkerGrid", "died"]

PROCESS_DIED = 8  # Flower's code for a ClientApp whose process has ended
LOOK = 1.0  # seconds that a look for replies lasts if there are none
GRACE = 5  # seconds that an idle worker has to end
STARTS = 120  # seconds that a worker may take to start
HANG = "no worker has begun or answered a message for %g s: some hang, and the run goes on without their answers"
BY_ITSELF = "see what it wrote above; a script must call run under `if __name__ == '__main__':`"
KILLED = "it was killed, as each that was to take its place: free memory, or have fewer workers, and resume the run"
TRIES = 2  # processes that may die with the same message before it is an error


class WorkerGrid(InlineGrid):
    """K nodes, served by this package's ClientApp in several workers; a context, with `InlineGrid`'s parameters."""

    at_once = None  # all workers have messages

    def __init__(self, run_config: Mapping[str, Any], node_configs: list[Mapping[str, Any]]) -> None:
        super().__init__(app, run_config, node_configs)
        self.workers: Sequence[Worker] = ()
        self.serving: dict[int, Worker] = {}  # by node
        self._changed = threading.Condition()
        self._unbegun = set[str]()  # messages that no worker has begun
        self._fault = ""  # why the run cannot go on

    def __enter__(self) -> Self:
        for worker in self.workers:
            worker.begin()
        return self

    def __exit__(self, *raised: object) -> None:
        for worker in self.workers:
            worker.end(at_once=raised[0] is not None)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to the workers; return when the last one is begun, so that no waiting counts as answering.

        Where no worker begins or answers one for as long as a start and an answer may take, those at work hang: then
        the rest is left to them.
        """
        ids, longest = list[str](), 0.0
        for message in messages:
            message.metadata.__dict__["_message_id"] = uuid4().hex  # as Flower's grids do when they push
            ids.append(message.metadata.message_id)
            longest = max(longest, STARTS + message.metadata.ttl)
            with self._changed:
                self._unbegun.add(message.metadata.message_id)
                self.serving[message.metadata.dst_node_id].queue.put(message)
        with self._changed:
            while not (self._fault or self._unbegun.isdisjoint(ids)):
                if not self._changed.wait(longest):
                    logging.getLogger("flwr").warning(HANG, longest)
                    break
            self._check()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages that have come; if there are none at all, wait a little."""
        with self._changed:
            self._changed.wait_for(lambda: self._fault or self._replies, LOOK)
            self._check()
            return super().pull_messages(message_ids)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Send messages; return the replies that have come by the timeout, in seconds from the last one's beginning."""
        missing, replies = list(self.push_messages(messages)), list[Message]()
        begun = time.monotonic()
        while missing and (timeout is None or time.monotonic() < begun + timeout):
            replies += (came := list(self.pull_messages(missing)))
            answered = {reply.metadata.reply_to_message_id for reply in came}
            missing = [message_id for message_id in missing if message_id not in answered]
        return replies

    def begun(self, message: Message) -> None:
        """Note that a worker has taken a message."""
        with self._changed:
            self._unbegun.discard(message.metadata.message_id)
            self._changed.notify_all()

    def replied(self, reply: Message) -> None:
        """Keep a reply until it is pulled."""
        with self._changed:
            self._replies[reply.metadata.reply_to_message_id] = reply
            self._changed.notify_all()

    def broken(self, reason: str) -> None:
        """Note why the run cannot go on, which ends it."""
        with self._changed:
            self._fault = self._fault or reason
            self._changed.notify_all()

    def _check(self) -> None:
        if self._fault:
            raise RunError(self._fault)


class Worker(ABC):
    """What serves nodes in another process, and the thread that hands it one message after another."""

    faults: ClassVar[tuple[type[Exception], ...]]  # what `ask` raises if the process has died

    def __init__(self, grid: WorkerGrid) -> None:
        self.grid = grid
        self.queue: SimpleQueue[Message | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.ending = False

    def begin(self) -> None:
        """Start the process and the thread."""
        self.start()
        self.thread.start()

    def end(self, at_once: bool) -> None:
        """End the process: when it is idle, or in the middle of a message."""
        if not self.thread.ident:
            return  # not started
        self.ending = True
        self.queue.put(None)
        if at_once:
            self.kill()  # state is whole whenever a process dies
        self.thread.join(GRACE)
        self.kill()

    def _serve(self) -> None:
        try:
            self._hand_on()
        except Exception as fault:  # or the run would wait for ever
            if not self.ending:
                reason = " ".join(str(fault).split())[:300]
                self.grid.broken(f"a worker must get its messages; it could not: {type(fault).__name__}: {reason}")

    def _hand_on(self) -> None:
        while (message := self.queue.get()) is not None:
            self.grid.begun(message)
            try:
                reply = self.ask(message)
            except self.faults as fault:
                answer = None if self.ending else self.lost(message, fault)
                if answer is None:
                    return
                reply = answer
            self.grid.replied(reply)
        self.leave()

    @abstractmethod
    def start(self) -> None:
        """Start the process, without waiting for it."""

    @abstractmethod
    def ask(self, message: Message) -> Message:
        """Wait until the process has started; return its reply to a message."""

    @abstractmethod
    def lost(self, message: Message, fault: Exception) -> Message | None:
        """Return the reply to a message with which the process has died; None: this worker serves no more."""

    def leave(self) -> None:  # noqa: B027 - some have nothing to finish
        """Let the idle process end by itself."""

    @abstractmethod
    def kill(self) -> None:
        """End the process at once, if it is still there."""


def died(message: Message, how: str) -> Message:
    """Return the reply to a message with which a process has died, as Flower's."""
    return Message(Error(PROCESS_DIED, f"the worker process has ended ({how})"), reply_to=message)


class LocalGrid(WorkerGrid):
    """K nodes, served by so many workers, processes of this machine; no more are started than there are nodes."""

    def __init__(self, run_config: Mapping[str, Any], node_configs: list[Mapping[str, Any]], workers: int) -> None:
        super().__init__(run_config, node_configs)
        served = (run_config, node_configs)
        self.workers = [_Process(self, served) for _ in range(min(workers, len(node_configs)))]
        self.serving = {node_id: self.workers[node_id % len(self.workers)] for node_id in self.contexts}


class _Process(Worker):
    """A process of this machine, at the other end of a pipe."""

    faults = (EOFError, OSError, pickle.PickleError, MemoryError)

    def __init__(self, grid: LocalGrid, served: tuple[Mapping[str, Any], list[Mapping[str, Any]]]) -> None:
        super().__init__(grid)
        self.served = served

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process with PyTorch's threads may hang
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, *self.served))
        self.process.start()
        theirs.close()  # so that its end is seen here
        self.ready = False

    def ask(self, message: Message) -> Message:
        if not self.ready:
            self.pipe.recv()
            self.ready = True
        self.pipe.send(message)
        reply: Message = self.pipe.recv()
        return reply

    def lost(self, message: Message, fault: Exception) -> Message | None:
        for deaths in range(1, TRIES + 2):
            self.process.kill()
            self.process.join()
            code = self.process.exitcode
            by_itself = code is not None and code >= 0
            if not self.ready and (by_itself or deaths > TRIES):
                self.grid.broken(
                    f"every worker must start; one ended while it started (exit code {code}): "
                    f"{BY_ITSELF if by_itself else KILLED}"
                )
                return None
            self.start()
            if deaths > TRIES:
                break
            try:
                return self.ask(message)
            except self.faults:
                if self.ending:
                    return None
        return died(message, f"exit code {code}")

    def leave(self) -> None:
        self.pipe.close()

    def kill(self) -> None:
        if not self.thread.is_alive():
            self.process.join(GRACE)
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection, run_config: Mapping[str, Any], node_configs: list[Mapping[str, Any]]) -> None:
    """Be a worker: answer messages until the other end of the pipe is closed."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    without_colours()
    nodes = InlineGrid(app, run_config, node_configs)
    pipe.send("ready")
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        pipe.send(nodes.answer(message))
