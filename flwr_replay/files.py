"""Writing files so that nothing a user has is ever half-written."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from flwr_replay.errors import RunError

NAME = re.compile(r"\w[\w .-]{0,159}")  # of an institution or a run, which name folders

__all__ = [
    "NAME",
    "Lines",
    "alone",
    "home",
    "make_folder",
    "private_folder",
    "read_json",
    "read_lines",
    "stamp",
    "sync",
    "write_atomic",
    "write_once",
]


def home() -> Path:
    """Return `$FLWR_REPLAY_HOME`, else `~/.flwr-replay`."""
    return Path(os.environ.get("FLWR_REPLAY_HOME") or Path.home() / ".flwr-replay").expanduser().absolute()


def make_folder(folder: Path, what: str) -> Path:
    """Create a folder that can be written, or say in one line why it cannot be.

    Raises
    ------
    RunError
        If it cannot be made or written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RunError(f"{what} must be a folder that can be written; got {folder}: {error.strerror}") from None
    return folder


def private_folder(folder: Path) -> None:
    """Create a folder that only its owner may enter."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def alone(folder: Path, wait: bool = False) -> Iterator[None]:
    """Hold the folder's lock, so that no two processes write the same run; the lock ends with the process.

    Raises
    ------
    RunError
        If another holds it, and this process is not to wait; or if it is, and there are no locks here.
    """
    with open(folder / ".lock", "a") as lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise RunError(f"only one process may work in {folder}; another does: wait until it ends") from None
        except (ImportError, OSError):  # Windows, or a file system without locks
            if wait:  # an account that two write at once would allow both what one of them may have
                raise RunError(
                    f"accounts and keys of privacy need a lock, and {folder} has none: put the state directory on a "
                    "file system with locks"
                ) from None
        yield


def write_atomic(
    path: Path,
    data: bytes | str | Sequence[bytes | memoryview],
    to_disk: bool = True,
    mode: int = 0o666,
    over: Path | None = None,
) -> None:
    """Write a file, given whole or in parts, whole or not at all: temporary file, flushed, renamed, its folder flushed.

    Without `to_disk` that holds as long as the machine does not lose power; nothing then waits for the disk. The file
    has the permissions `mode`, less the process's umask, from its first byte on. `over` names a file that is no longer
    needed: it is written over, which is ten times as fast as a new one, unless it has other names, such as a backup's.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    if over and over.stat().st_nlink > 1:
        over.unlink()
        over = None
    if over:
        os.replace(over, temporary)
    parts = [data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data
    with open(temporary, "wb", opener=lambda name, flags: os.open(name, flags & ~os.O_TRUNC, mode)) as file:
        file.writelines(parts)
        file.truncate()
        if to_disk:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)
    if to_disk:
        sync(path.parent)


def write_once(path: Path, text: str) -> str:
    """Write a file unless there is one, and return what it holds; of several that write at once, one is the first."""
    mine = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    while not path.exists():
        write_atomic(mine, text)
        with suppress(FileExistsError, FileNotFoundError):  # another was first; a sweep took it for left behind
            os.link(mine, path)
        mine.unlink(missing_ok=True)
        sync(path.parent)
    return path.read_text(encoding="utf-8")


def sync(folder: Path) -> None:
    """Put a folder's entries on the disk, which its files' own flushes do not."""
    if os.name == "posix":
        entries = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(entries)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that does not know this for folders
                raise
        finally:
            os.close(entries)


def stamp(path: Path) -> tuple[int, ...]:
    """Return what changes when a file is written, by whomever; nothing if there is none.

    The file is opened for it: a network's file system may answer `stat` from what it knew some seconds ago.
    """
    try:
        with open(path, "rb", 0) as file:
            found = os.fstat(file.fileno())
    except FileNotFoundError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines, and mend what a crash left at the end of the file: a torn last line is dropped.

    Raises
    ------
    RunError
        If another line is damaged: no crash of a run does that.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    lines, records = data.split(b"\n"), []
    for number, line in enumerate(lines, 1):
        try:
            records += [dict(json.loads(line))] if line else []
        except (ValueError, TypeError):
            if number < len(lines):
                raise RunError(f"every line of {path} must be JSON; line {number} is not: mend or remove it") from None
    if data and not data.endswith(b"\n"):
        write_atomic(path, "".join(json.dumps(record) + "\n" for record in records))
    return records


def read_json(path: Path) -> dict[str, Any]:
    """Read one of the files that a run writes whole.

    Raises
    ------
    RunError
        If it is damaged.
    """
    try:
        return dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError):
        raise RunError(f"{path} must be whole; it is damaged: remove it to have it made anew") from None


class Lines:
    """A file of JSON lines, open while it grows; what is added reaches the file with the next `flush`."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open while it grows

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Add records."""
        self.write("".join(json.dumps(record) + "\n" for record in records))

    def write(self, text: str) -> None:
        """Add lines."""
        self._file.write(text)

    def flush(self, to_disk: bool = False) -> None:
        """Hand the lines to the system, so that they outlive this process, or wait until they are on the disk."""
        self._file.flush()
        if to_disk:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
