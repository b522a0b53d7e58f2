"""Writing files so that nothing a user has is ever half-written, and reading them so that no damage goes unnoticed.

Whatever is made here only its owner may read: models, examples and latents lie in these files.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from zlib import crc32

from flwr_replay.errors import RunError
from flwr_replay.files.disk import claimed, lock, locked, make, opener, reading, shut, writing

NAME = re.compile(r"\w[\w .-]{0,159}")  # of an institution or a run, which name folders
LEFT = re.compile(r"\..+\.tmp|\.write-.+")  # what a process that is killed leaves of a file that it was making
DAY = 86_400  # seconds
BLOCK = 2**20  # bytes that are read at a time
CHECKSUM = "crc32"  # the key of a JSON file's own checksum
Form = Mapping[str, Any]  # of a JSON object: key to the type that its value has, or to the values that it may have

__all__ = [
    "NAME",
    "Form",
    "Lines",
    "alone",
    "fits",
    "home",
    "make_folder",
    "private_folder",
    "read_bytes",
    "read_json",
    "read_lines",
    "read_text",
    "stamp",
    "sweep",
    "sync",
    "tally",
    "tighten",
    "write_atomic",
    "write_json",
    "write_once",
]


def home() -> Path:
    """Return `$FLWR_REPLAY_HOME`, else `~/.flwr-replay`."""
    return Path(os.environ.get("FLWR_REPLAY_HOME") or Path.home() / ".flwr-replay").expanduser().absolute()


# --- folders ----------------------------------------------------------------------------------------------------------


def make_folder(folder: Path, what: str) -> Path:
    """Create a folder that can be written, or say in one line why it cannot be; one that exists stays as it is.

    Raises
    ------
    RunError
        If it cannot be made or written.
    """
    try:
        make(folder)
        with TemporaryFile(prefix=".write-", dir=folder):
            pass
    except OSError as error:
        raise RunError(f"{what} must be a folder that can be written; got {folder}: {error.strerror}") from None
    return folder


def private_folder(folder: Path) -> Path:
    """Create a folder that only its owner may enter, and shut others out of one that exists.

    Raises
    ------
    RunError
        If it cannot be made.
    """
    with writing(folder):
        make(folder)
        shut(folder)
    return folder


def tighten(folder: Path) -> None:
    """Shut others out of a folder and all that lies in it, as older versions have left it."""
    for place, _, names in os.walk(folder):
        for path in (Path(place), *(Path(place, name) for name in names)):
            if not path.is_symlink():
                shut(path)


def sweep(folder: Path) -> None:
    """Remove, in a folder and below it, what killed processes have left of files that they were making.

    Who makes a file holds its lock until it has its name. Where there are no locks, what is a day old is removed.
    """
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names if LEFT.fullmatch(name)):
            with suppress(OSError), open(path, "rb") as file:  # another process makes it, or has removed it
                if lock(file, wait=False) or time.time() - path.stat().st_mtime > DAY:
                    path.unlink()


@contextmanager
def alone(folder: Path, wait: bool = False) -> Iterator[None]:
    """Hold the folder's lock, so that no two processes write the same run; the lock ends with the process.

    Raises
    ------
    RunError
        If another holds it, and this process is not to wait; or if it is, and there are no locks here.
    """
    with writing(folder / ".lock"):
        file = open(folder / ".lock", "a", opener=opener())  # noqa: SIM115 - closed below
    with file:
        try:
            held = lock(file, wait)
        except BlockingIOError:
            raise RunError(f"only one process may work in {folder}; another does: wait until it ends") from None
        if wait and not held:  # an account that two write at once would allow both what one of them may have
            raise RunError(
                f"accounts and keys of privacy need a lock, and {folder} has none: put the state directory on a file "
                "system with locks"
            )
        yield


# --- whole files ------------------------------------------------------------------------------------------------------


def write_atomic(
    path: Path,
    data: bytes | str | Sequence[bytes | memoryview],
    to_disk: bool = True,
    mode: int = 0o600,
    over: Path | None = None,
) -> None:
    """Write a file, given whole or in parts, whole or not at all: temporary file, flushed, renamed, its folder flushed.

    Without `to_disk` that holds as long as the machine does not lose power; nothing then waits for the disk. The file
    has at most the permissions `mode` from its first byte on. `over` names a file that is no longer needed: it is
    written over, which is ten times as fast as a new one, unless it has other names, such as a backup's.

    Raises
    ------
    RunError
        If it cannot be written; nothing is left of it then.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    parts = [data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data
    with writing(path):
        if over and over.stat().st_nlink > 1:
            over.unlink()
            over = None
        if over:
            os.replace(over, temporary)
        try:
            with claimed(temporary, mode) as file:
                file.writelines(parts)
                file.truncate()
                file.flush()
                if to_disk:
                    os.fsync(file.fileno())
                if os.name != "posix":
                    file.close()  # Windows renames no open file
                os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
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
    return read_text(path)


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
    with reading(path):
        try:
            with open(path, "rb", 0) as file:
                found = os.fstat(file.fileno())
        except FileNotFoundError:
            return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def tally(path: Path, before: tuple[int, int] = (0, 0), end: int | None = None) -> tuple[int, int]:
    """Count a file's bytes, up to `end` of them, and compute their CRC-32, going on from what was counted before."""
    size, found = before
    with reading(path), open(path, "rb") as file:
        file.seek(size)
        while block := file.read(BLOCK if end is None else min(BLOCK, end - size)):
            size, found = size + len(block), crc32(block, found)
    return size, found


def read_bytes(path: Path) -> bytes:
    """Read a file.

    Raises
    ------
    RunError
        If it cannot be read.
    """
    with reading(path):
        return path.read_bytes()


def read_text(path: Path) -> str:
    """Read a text; as `read_bytes`."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError:
        raise RunError(f"{path} must be text; it is damaged: put it back as it was, or begin a new run") from None


# --- JSON -------------------------------------------------------------------------------------------------------------


def fits(values: object, form: Form) -> bool:
    """Say whether a value is a JSON object with these keys, and values of these types.

    >>> fits({"round": 1, "direction": "up"}, {"round": int, "direction": ("up", "down")})
    True
    """
    return isinstance(values, dict) and all(
        values.get(key) in kind if isinstance(kind, tuple) else isinstance(values.get(key), kind)
        for key, kind in form.items()
    )


def _parsed(text: bytes) -> Any:
    """Return what JSON says; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def read_lines(path: Path, form: Form | None = None) -> list[dict[str, Any]]:
    """Read JSON lines, but for a last one that a crash tore; who goes on writing cuts that off.

    Raises
    ------
    RunError
        If another line is damaged, or has not the form: no crash of a run does that.
    """
    if not path.exists():
        return []
    lines = read_bytes(path).split(b"\n")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        record = _parsed(line) if line else None
        if isinstance(record, dict) and fits(record, form or {}):
            records.append(record)
        elif line and (record is not None or number < len(lines)):
            told = f" with {', '.join(form)}" if form else ""
            raise RunError(f"every line of {path} must be JSON{told}; line {number} is not: mend or remove it")
    return records


def write_json(path: Path, values: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a JSON file whole, with its own checksum."""
    write_atomic(path, json.dumps({**values, CHECKSUM: _checksum(values)}, indent=indent) + "\n")


def read_json(path: Path, form: Form | None = None) -> dict[str, Any]:
    """Read one of the files that a run writes whole; those of older versions have no checksum.

    Raises
    ------
    RunError
        If it is damaged, or has not the form.
    """
    values = _parsed(read_bytes(path))
    told = values.pop(CHECKSUM, None) if isinstance(values, dict) else None
    if not fits(values, form or {}) or told not in (None, _checksum(values)):
        raise RunError(f"{path} must be whole; it is damaged: remove it to have it made anew")
    return dict(values)


def _checksum(values: Mapping[str, Any]) -> int:
    return crc32(json.dumps(values).encode())


class Lines:
    """A file of JSON lines, open while it grows; what is added reaches the file with the next `flush`.

    A flush writes all or nothing, and several processes may write. What a crash tore is cut off at opening.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._added: list[str] = []
        with writing(path):
            self._file = open(path, "a+b", 0, opener=opener())  # noqa: SIM115 - open while it grows
            shut(path)
            with locked(self._file):
                self._mend()

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Add records."""
        self.write("".join(json.dumps(record) + "\n" for record in records))

    def write(self, text: str) -> None:
        """Add lines."""
        self._added.append(text)

    def flush(self, to_disk: bool = False) -> None:
        """Hand the lines to the system, so that they outlive this process, or wait until they are on the disk.

        Raises
        ------
        RunError
            If they cannot be written. None of them is, and they are forgotten: what they tell of must not happen.
        """
        data = memoryview("".join(self._added).encode())
        self._added.clear()
        if not data and not to_disk:
            return
        with writing(self.path), locked(self._file):
            size = os.fstat(self._file.fileno()).st_size
            try:
                while data:
                    data = data[self._file.write(data) :]
                if to_disk:
                    os.fsync(self._file.fileno())
            except OSError:
                with suppress(OSError):  # then it is cut off at the next opening
                    self._file.truncate(size)
                raise

    def close(self) -> None:
        """Write what was added, and close the file."""
        try:
            self.flush()
        finally:
            self._file.close()

    def _mend(self) -> None:
        """Cut off what a crash left of a last line; one that lacks its end only is given it."""
        size = self._file.seek(0, os.SEEK_END)
        if not size:
            return
        self._file.seek(size - 1)
        if self._file.read(1) == b"\n":
            return
        self._file.seek(0)
        torn = self._file.read().rpartition(b"\n")[2]
        if _parsed(torn) is None:
            self._file.truncate(size - len(torn))
        else:
            self._file.write(b"\n")
