"""Faults that strike a process at a step on the disk: SIGKILL, a full disk, a read-only one; a clock that jumps.

A step is one of `STEPS`: before a file is opened, renamed, removed, locked or flushed, after it was flushed, or in the
middle of a write. Memory that all processes share counts the steps, and the noisy steps that institutions have taken.
"""

import errno
import io
import itertools
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import Random

from flwr.app.message import message as flower_message

from flwr_replay.files import atomic, disk, lines
from flwr_replay.institution.budget import DPTraining, PrivacyBudget
from flwr_replay.learning import latents
from flwr_replay.state import store as institution_state

STEPS = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "fcntl.flock", "fsync", "write")
OF_DISKS = {  # the error of a fault, and the steps that fail once it has struck
    "full": (errno.ENOSPC, {"os.mkdir", "fsync", "write"}),
    "no more files": (errno.ENOSPC, {"open", "os.link", "os.mkdir"}),  # its inodes are used up
    "read-only": (errno.EROFS, {*STEPS} - {"fcntl.flock"}),
    "forbidden": (errno.EACCES, {*STEPS} - {"fcntl.flock", "fsync", "write"}),  # its owner changed; reading fails, too
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
PATCHED = (atomic, disk, lines, institution_state, latents)  # all modules that open files for writing


@dataclass(frozen=True)
class Fault:
    """What strikes, and when.

    Attributes
    ----------
    kind : str
        "" | kill | full | no more files | read-only | forbidden.
    at : int
        The step of a kill; a disk fails at the first step from here on that its fault concerns, and at all later ones.
    share : float
        Of a write's bytes that reach the disk at that step.
    after : float
        Seconds after which a kill strikes, in place of a step.
    under : str
        The folder, relative to the place, whose disk fails: "" | runs | state.
    clock : int | None
        The seed of the clock's jumps by up to five hours; None: it does not jump.
    """

    kind: str = ""
    at: int = 0
    share: float = 0.5
    after: float = 0.0
    under: str = ""
    clock: int | None = None

    @classmethod
    def drawn(cls, rng: Random, kinds: tuple[str, ...], steps: int, seconds: float) -> "Fault":
        """Draw one of these kinds for a run of so many steps and seconds."""
        kind = rng.choice(kinds)
        if kind == "kill" and rng.random() < 0.25:
            return cls(kind, after=rng.uniform(0.001, seconds))
        return cls(kind, rng.randint(1, steps), rng.random(), under=rng.choice(("", "", "runs", "state")))


class Shared:
    """Numbers that outlive a killed process: steps on the disk, what it died of, noisy steps by institution."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * 64)

    def __getitem__(self, slot: int) -> int:
        return struct.unpack_from("q", self._memory, 8 * slot)[0]

    def __setitem__(self, slot: int, number: int) -> None:
        struct.pack_into("q", self._memory, 8 * slot, number)

    def copy(self) -> "Shared":
        other = Shared()
        other._memory[:] = self._memory[:]
        return other


TAKEN, STRUCK, INSTITUTIONS = 0, 1, 2  # slots: steps; 1 + the kind of step that was struck; noisy steps


def slot(name: str) -> int:
    return INSTITUTIONS + int(name.rpartition("-")[2], 36)  # institution-1, clinic-a


def watch(shared: Shared, fault: Fault, place: Path) -> None:
    """Count this process's steps on the disk and its noisy steps, and let the fault strike."""
    counted, fsync, beginning, step = itertools.count(1), os.fsync, PrivacyBudget.beginning, DPTraining.step
    code, failing = OF_DISKS.get(fault.kind, (0, frozenset()))
    shared[STRUCK], sys.dont_write_bytecode = 0, True  # a first import's cache would be steps that no later run takes

    def reached(kind: str, path: Callable[[], str]) -> bool:
        """Count a step; say whether the fault strikes it."""
        shared[TAKEN] = number = next(counted)
        if fault.kind == "kill":
            strikes = number == fault.at
        else:
            strikes = number >= fault.at and kind in failing and Path(path()).is_relative_to(place / fault.under)
        if strikes and not shared[STRUCK]:
            shared[STRUCK] = 1 + STEPS.index(kind)
        return strikes

    def strike() -> None:
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(code, os.strerror(code))

    def concerned(event: str, arguments: tuple) -> bool:
        if event != "open":
            return event in STEPS
        writes = bool(arguments[2] & WRITING)
        if fault.kind == "forbidden":
            return writes or named(event, arguments).startswith(str(place))
        return writes and (fault.kind != "no more files" or not os.path.exists(arguments[0]))

    def hook(event: str, arguments: tuple) -> None:
        if concerned(event, arguments) and reached(event, lambda: named(event, arguments)):
            strike()

    class Torn(io.FileIO):
        def write(self, data: bytes) -> int:
            view = memoryview(data).cast("B")
            first = not shared[STRUCK]
            if not reached("write", lambda: os.path.abspath(self.name)):
                return super().write(view)
            written = super().write(view[: int(fault.share * len(view))]) if first else 0
            return written if written and fault.kind != "kill" else strike()

    def opened(path, mode="r", buffering=-1, opener=None, **more):
        if "b" not in mode or mode == "rb":
            return open(path, mode, buffering, opener=opener, **more)
        raw = Torn(path, mode.replace("b", ""), opener=opener)
        return raw if buffering == 0 else io.BufferedWriter(raw)

    def flushed(descriptor: int) -> None:
        for before in (True, False):
            if reached("fsync", lambda: os.readlink(f"/proc/self/fd/{descriptor}")):
                strike()
            if before:
                fsync(descriptor)

    def begun(budget, *arguments):
        training = beginning(budget, *arguments)
        training.taken_at = slot(budget.institution.name)
        return training

    def stepped(training, *arguments, **more):
        shared[training.taken_at] += 1
        return step(training, *arguments, **more)

    for module in PATCHED:
        module.open = opened
    os.fsync, PrivacyBudget.beginning, DPTraining.step = flushed, begun, stepped
    if fault.clock is not None:
        jump(fault.clock)
    sys.addaudithook(hook)


def named(event: str, arguments: tuple) -> str:
    """Return the absolute path that a step concerns; of two names, the first."""
    first = arguments[0]
    if isinstance(first, int):
        return os.readlink(f"/proc/self/fd/{first}")
    at = {"os.rename": 2, "os.link": 2, "os.mkdir": 2, "os.remove": 1, "os.rmdir": 1}.get(event)
    folder = arguments[at] if at else -1
    return os.path.join(os.getcwd() if folder == -1 else os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(first))


def jump(seed: int) -> None:
    """Let the clock jump at every look at it; the monotonic one goes on."""
    rng, clock, now = Random(seed), time.time, flower_message.now

    def hours() -> float:
        return rng.uniform(-5, 5)

    time.time = lambda: clock() + 3600 * hours()
    flower_message.now = lambda: now() + timedelta(hours=hours())
