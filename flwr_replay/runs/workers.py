"""The grid of `--workers N`: as in `engine.py`, but N processes of this machine serve the nodes.

A node stays with its worker, so what a process holds in memory stays warm: data, models, an institution's last state.
Messages go through pipes, one at a time to each worker. The results have the same bits as in one process. Only an
exchange with several institutions is faster: a serial method asks one at a time.

A worker that is killed costs the message that it had, which becomes that node's error; another worker takes its place.
No worker outlives the process that started it.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, Self
from uuid import uuid4

from flwr.app import Error, Message

from flwr_replay.client_app import app
from flwr_replay.errors import RunError
from flwr_replay.runs.engine import InlineGrid
from flwr_replay.runs.processes import end_with_parent

__all__ = ["WorkerGrid"]

PROCESS_DIED = 8  # Flower's code for a ClientApp whose process has ended
LOOK = 1.0  # seconds that a look for replies lasts if there are none
GRACE = 5  # seconds that an idle worker has to end


class WorkerGrid(InlineGrid):
    """K nodes, served by this package's ClientApp in several processes; use it as a context.

    Parameters
    ----------
    run_config : Mapping[str, Any]
        Flower's run config, which every node gets.
    node_configs : list[Mapping[str, Any]]
        One for each node.
    workers : int
        How many processes; no more are started than there are nodes.
    """

    at_once = None  # all workers have messages

    def __init__(self, run_config: Mapping[str, Any], node_configs: list[Mapping[str, Any]], workers: int) -> None:
        super().__init__(app, run_config, node_configs)
        self._changed = threading.Condition()
        self._unbegun = 0  # messages that no worker has begun
        self._fault = ""  # why no worker can be started
        served = (run_config, node_configs)
        self._workers = [_Worker(self, served) for _ in range(min(workers, len(node_configs)))]

    def __enter__(self) -> Self:
        for worker in self._workers:
            worker.start()
        return self

    def __exit__(self, *raised: object) -> None:
        for worker in self._workers:
            worker.end(at_once=raised[0] is not None)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to the workers; return when the last one is begun, so that no waiting counts as answering."""
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = uuid4().hex  # as Flower's grids do when they push
            ids.append(message.metadata.message_id)
            with self._changed:
                self._unbegun += 1
            self._workers[message.metadata.dst_node_id % len(self._workers)].queue.put(message)
        with self._changed:
            self._changed.wait_for(lambda: self._fault or not self._unbegun)
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

    def begun(self) -> None:
        """Note that a worker has taken a message."""
        with self._changed:
            self._unbegun -= 1
            self._changed.notify_all()

    def replied(self, reply: Message) -> None:
        """Keep a reply until it is pulled."""
        with self._changed:
            self._replies[reply.metadata.reply_to_message_id] = reply
            self._changed.notify_all()

    def broken(self, reason: str) -> None:
        """Note that no worker can be started, which ends the run."""
        with self._changed:
            self._fault = reason
            self._changed.notify_all()

    def _check(self) -> None:
        if self._fault:
            raise RunError(self._fault)


class _Worker:
    """A process that serves nodes, and the thread that hands it one message after another."""

    def __init__(self, grid: WorkerGrid, served: tuple[Mapping[str, Any], list[Mapping[str, Any]]]) -> None:
        self.grid, self.served = grid, served
        self.queue: SimpleQueue[Message | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._hand_on, daemon=True)
        self.ending = False

    def start(self) -> None:
        self._start_process()
        self.thread.start()

    def end(self, at_once: bool) -> None:
        """End the process: when it is idle, or in the middle of a message."""
        if not self.thread.ident:
            return  # not started
        self.ending = True
        self.queue.put(None)
        if at_once:
            self.process.kill()  # state is whole whenever a process dies
        self.thread.join(GRACE)
        self.process.join(GRACE)
        self.process.kill()
        self.process.join()

    def _start_process(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork of a process with PyTorch's threads may hang
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, *self.served))
        self.process.start()
        theirs.close()  # so that its end is seen here
        self.ready = False

    def _hand_on(self) -> None:
        while (message := self.queue.get()) is not None:
            self.grid.begun()
            try:
                reply = self._ask(message)
            except (EOFError, OSError, pickle.PickleError, MemoryError):
                if self.ending:
                    return
                self.process.kill()
                self.process.join()
                if not self.ready:
                    self.grid.broken(
                        f"every worker must start; one ended while it started (exit code {self.process.exitcode}): see "
                        "what it wrote above; a script must call run under `if __name__ == '__main__':`"
                    )
                    return
                died = Error(PROCESS_DIED, f"the worker process has ended (exit code {self.process.exitcode})")
                reply = Message(died, reply_to=message)
                self._start_process()
            self.grid.replied(reply)
        self.pipe.close()  # the process ends

    def _ask(self, message: Message) -> Message:
        if not self.ready:
            self.pipe.recv()
            self.ready = True
        self.pipe.send(message)
        reply: Message = self.pipe.recv()
        return reply


class _Nodes(InlineGrid):
    """The nodes in a worker."""

    def serve(self, pipe: Connection) -> None:
        """Answer messages until the other end of the pipe is closed."""
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                return
            pipe.send(self._answer(message))


def _serve(pipe: Connection, run_config: Mapping[str, Any], node_configs: list[Mapping[str, Any]]) -> None:
    """Be a worker."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    nodes = _Nodes(app, run_config, node_configs)
    pipe.send("ready")
    nodes.serve(pipe)
