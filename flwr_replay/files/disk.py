"""What the system does with files, with errors that name them: permissions, locks, reasons and remedies."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from flwr_replay.errors import RunError

__all__ = ["claimed", "lock", "locked", "make", "opener", "reading", "shut", "writing"]

REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room on its disk"),
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "give this user the right to write there"),
    **dict.fromkeys((errno.EEXIST, errno.EISDIR, errno.ENOTDIR), "move away what is in its place"),
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in one line what cannot be written, why, and what to do: the system's error of a full disk names no file.

    Raises
    ------
    RunError
        In place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, "choose another place")
        raise RunError(f"{path} must be written; {error.strerror or error}: {remedy}") from None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Say in one line what cannot be read; as `writing`."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path} must be a file that can be read; {error.strerror or error}: put it back as it was, or begin a new "
            "run"
        ) from None


def make(folder: Path) -> None:
    """Create a folder and those above it, whatever the umask for their owner only."""
    missing = list(takewhile(lambda place: not place.is_dir(), [folder, *folder.parents]))
    for place in reversed(missing):
        place.mkdir(0o700, exist_ok=True)


def shut(path: Path) -> None:
    """Take from others what they may do with a file or folder, unless it has another owner, who has arranged that."""
    mode = path.stat().st_mode
    if mode & 0o077 and os.name == "posix" and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        with suppress(PermissionError):
            path.chmod(stat.S_IMODE(mode) & 0o700)


def opener(mode: int = 0o600) -> Callable[[str, int], int]:
    """Return how `open` makes a file of these permissions at most; one that exists is not emptied."""
    return lambda name, flags: os.open(name, flags & ~os.O_TRUNC, mode)


def lock(file: IO[Any], wait: bool) -> bool:
    """Lock a file until it is closed; say whether there are locks here.

    Raises
    ------
    BlockingIOError
        If another holds it, and this process is not to wait.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        raise
    except (ImportError, OSError):  # Windows, or a file system without locks
        return False
    return True


@contextmanager
def locked(file: IO[Any]) -> Iterator[None]:
    """Hold a file's lock for a while."""
    held = lock(file, wait=True)
    try:
        yield
    finally:
        if held:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_UN)


def claimed(path: Path, mode: int) -> IO[bytes]:
    """Open a file to be written and lock it: then it is no leftover, and nobody's `sweep` removes it."""
    while True:
        file = open(path, "wb", opener=opener(mode))  # noqa: SIM115 - its lock ends with it
        lock(file, wait=True)
        found = os.fstat(file.fileno())
        with suppress(FileNotFoundError):
            if os.path.samestat(found, path.stat()):
                if os.name == "posix" and found.st_mode & 0o777 & ~mode:
                    os.fchmod(file.fileno(), mode)
                return file
        file.close()  # it was swept away before it was locked
