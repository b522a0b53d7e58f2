"""The grid of `--workers N`: N processes of this machine serve the nodes, see `workers.py`.

Messages go through pipes. Where a worker is killed, another takes its place and is asked the same again: a repeated
message gives the same bits, but for secret noise. No worker outlives the process that started it.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from flwr.app import Message

from flwr_replay.client_app import app
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.engines.workers import GRACE, TRIES, Worker, WorkerGrid, died
from flwr_replay.processes import end_with_parent
from flwr_replay.report.progress import without_colours

__all__ = ["LocalGrid"]

BY_ITSELF = "see what it wrote above; a script must call run under `if __name__ == '__main__':`"
KILLED = "it was killed, as each that was to take its place: free memory, or have fewer workers, and resume the run"


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
