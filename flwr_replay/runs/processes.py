"""Processes that end with the one that started them, however that ends.

Flower and Ray put what they start into sessions of its own, and what outlives its parent belongs to nobody. So a family
is told by a mark in its environment, which every child inherits. A watchdog process holds the end of a pipe: it closes
with the process that opened the family, after a SIGKILL too, and what still has the mark is then ended.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

__all__ = ["MARK", "end", "end_with_parent", "family", "members"]

MARK = "FLWR_REPLAY_FAMILY"
GRACE = 5  # seconds between asking and killing
WAVES = 5  # who is being started while the others end is found by the next look


@contextmanager
def family() -> Iterator[str]:
    """Open a family; yield the value that its members' environment has under `MARK`, and end them all afterwards."""
    mark = secrets.token_hex(8)
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    watchdog = subprocess.Popen(
        [sys.executable, "-m", "flwr_replay.runs.processes", mark],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the one that it watches
    )
    try:
        yield mark
    finally:
        end(mark)
        watchdog.communicate()  # closes the pipe


def members(mark: str) -> list[psutil.Process]:
    """Return the processes of a family that live, with all that they have started."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found |= {one.pid: one for one in (process, *process.children(recursive=True))}
    return [one for one in found.values() if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def end(mark: str) -> None:
    """End a family: ask its members first, kill who stays."""
    for _ in range(WAVES):
        if not (living := members(mark)):
            return
        for process in living:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        for process in psutil.wait_procs(living, timeout=GRACE)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def end_with_parent() -> None:
    """Have this process, which `multiprocessing` started, end as soon as its parent has."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)  # whatever the main thread does

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end(sys.argv[1])
