"""Processes that end when the process that started them ends, for whatever reason.

Flower and Ray start their processes in new sessions, and a process that outlives its parent has no link to it. So the
members of a family carry a mark in their environment, which every child inherits. A watchdog process reads from a pipe.
The pipe closes when the process that opened the family ends, even by SIGKILL; the watchdog then ends every member.
"""

import multiprocessing
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

__all__ = [
    "MARK",
    "end",
    "end_those_left",
    "end_with_parent",
    "family",
    "left_clientapps",
    "members",
    "superlinks",
    "using",
    "wake_with_parent",
]

MARK = "FLWR_REPLAY_FAMILY"
GRACE = 5  # seconds between SIGTERM and SIGKILL
LOOKS = 1  # seconds between two looks at the parent
LEFT = 60  # seconds that a ClientApp which waits must have begun before another, to be left
IDLE = 15  # seconds of a processor that a ClientApp has used at most if it only waits
WAVES = 5  # a process started while others end is found in the next wave


@contextmanager
def family() -> Iterator[str]:
    """Open a family; yield its mark, the value of the variable `MARK`, and end all its members afterwards."""
    mark = secrets.token_hex(8)
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    watchdog = subprocess.Popen(
        [sys.executable, "-m", "flwr_replay.processes", mark],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the process that it watches
    )
    try:
        yield mark
    finally:
        end(mark)
        watchdog.communicate()  # closes the pipe


def members(mark: str) -> list[psutil.Process]:
    """Return the living processes of a family, with all their children."""
    by_pid: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                by_pid |= {member.pid: member for member in (process, *process.children(recursive=True))}
    return [member for member in by_pid.values() if _lives(member)]


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):  # it may end at any moment
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def using(folder: Path) -> list[int]:
    """Return the processes of this user that have a folder's lock open."""
    pids, file = [], str((folder / ".lock").resolve())
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if file in {opened.path for opened in process.open_files()}:
                pids.append(process.pid)
    return pids


def superlinks(folder: Path) -> list[int]:
    """Return the processes of this user that a SuperLink has in a folder, reachable or not."""
    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if _runs(process, "flower-superlink") and folder.samefile(process.cwd()):
                pids.append(process.pid)
    return pids


def end(mark: str) -> None:
    """End a family: SIGTERM to its members, then SIGKILL to those that remain."""
    for _ in range(WAVES):
        if not (living := members(mark)):
            return
        for process in living:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        for process in psutil.wait_procs(living, timeout=GRACE)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def left_clientapps(parent: int, before: float) -> list[psutil.Process]:
    """Return the ClientApps below a process that began before a time and have hardly worked since.

    Flower leaves one if a ServerApp is killed while it sends: it waits for the rest of the message, for 83 minutes.
    None is returned where a system hides the processes of others.
    """
    idle: list[psutil.Process] = []
    with suppress(psutil.Error, OSError):
        for process in psutil.Process(parent).children(recursive=True):
            with suppress(psutil.Error, OSError):
                waits = process.create_time() < before and sum(process.cpu_times()[:2]) < IDLE
                idle += [process] if waits and _runs(process, "flwr-clientapp") else []
    return idle


def end_those_left() -> None:
    """End the ClientApps that Flower has left beside this one, which answers a message.

    A SuperNode has its messages answered one by one, so an earlier ClientApp that waits is left. A later one may wait
    for a large message, if this one is slow to begin. SIGTERM lets it report its end. After any other death Flower
    makes an answer for it, which makes every later one of this SuperNode late.
    """
    with suppress(psutil.Error, OSError):  # an answer must not fail by this
        if _runs(psutil.Process(os.getppid()), "flower-superexec"):
            for process in left_clientapps(os.getppid(), psutil.Process().create_time() - LEFT):
                process.terminate()


def _runs(process: psutil.Process, command: str) -> bool:
    return any(command in word for word in process.cmdline()[:3])


def end_with_parent() -> None:
    """End this process, which `multiprocessing` started, as soon as its parent has ended."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)  # whatever the main thread does

    threading.Thread(target=wait, daemon=True).start()


def wake_with_parent() -> None:
    """Wake the main thread, of which this is called, when the parent ends: signals that wait for it are handled then.

    Flower ends a ServerApp whose parent has ended by a signal that its own thread raises. That does not wake a main
    thread that waits for a lock: with a few connections that wait to be tried again, for more than a minute. Systems
    without POSIX's signals are left alone.
    """
    if os.name != "posix":
        return
    parent, main = os.getppid(), threading.main_thread().ident
    signal.signal(signal.SIGUSR1, lambda *_: None)

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(LOOKS)
        while main:  # the signal that Flower raises may come later
            signal.pthread_kill(main, signal.SIGUSR1)
            time.sleep(LOOKS)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end(sys.argv[1])
