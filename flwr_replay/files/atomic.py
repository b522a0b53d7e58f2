"""Write files completely or not at all, and read them so that no damage goes unnoticed.

Files made here are readable by their owner only, since they hold models, examples and latents.
"""

import errno
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from types import UnionType
from typing import IO, Any
from zlib import crc32

from flwr_replay.errors import DamagedError, RunError
from flwr_replay.files.disk import claimed, lock, make, opener, reading, shut, there, unlocking, writing

NAME = re.compile(r"\w[\w .-]{0,159}")  # of an institution or a run; folders are named after them
SURROGATE = re.compile("[\ud800-\udfff]")
LEFT = re.compile(r"\..+\.tmp|\.write-.+")  # a temporary file that a killed process has left
DAY = 86_400  # seconds
MOMENT = 0.1  # seconds
BYTES_AT_ONCE = 2**20  # bytes per read
CHECKSUM = "crc32"  # the key of a JSON file's own checksum
LARGEST = 2**64  # Flower's node ids are below
Form = Mapping[Any, Any]  # of a JSON object, as for `fits`

__all__ = [
    "CHECKSUM",
    "DAY",
    "NAME",
    "Form",
    "alone",
    "checksum",
    "fits",
    "home",
    "in_use",
    "make_folder",
    "new_folder",
    "parsed",
    "private_folder",
    "read_bytes",
    "read_json",
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
    """Create a writable folder; an existing one stays as it is. `what` names the folder in an error.

    Raises
    ------
    RunError
        If it cannot be created or is not writable.
    """
    try:
        make(folder)
        with suppress(FileNotFoundError), TemporaryFile(prefix=".write-", dir=folder):  # or `sweep` removes it first
            pass
    except OSError as error:
        raise RunError(f"{what} must be a folder that can be written; got {folder}: {error.strerror}") from None
    return folder


def private_folder(folder: Path) -> Path:
    """Create a folder for its owner only; from an existing one, remove the permissions of others.

    Raises
    ------
    RunError
        If it cannot be created.
    """
    with writing(folder):
        make(folder)
        shut(folder)
    return folder


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """Yield where to write a folder that appears as `place` at the end of a `with` block; an error leaves nothing."""
    new = place.with_name(f".{place.name}.{os.getpid()}.tmp")
    try:
        yield new
        os.rename(new, place)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def tighten(folder: Path) -> None:
    """Remove the permissions of others from a folder and everything below it; older versions granted them."""
    for place, _, names in os.walk(folder):
        for path in (Path(place), *(Path(place, name) for name in names)):
            if not path.is_symlink():
                shut(path)


def sweep(folder: Path) -> None:
    """Remove the temporary files of killed processes from a folder and everything below it.

    A process that writes a file holds its lock until the file has its final name; one that it begins after that is
    another. On a file system without locks, only files older than a day are removed.
    """
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names if LEFT.fullmatch(name)):
            with suppress(OSError), open(path, "rb") as file:  # another process is writing it, or has removed it
                held, status = lock(file, wait=False), path.stat()
                if os.path.samestat(status, os.fstat(file.fileno())) and (held or time.time() - status.st_mtime > DAY):
                    path.unlink()


@contextmanager
def alone(folder: Path, wait: bool = False) -> Iterator[None]:
    """Hold the folder's lock, so that no two processes write the same run; the lock ends with the process.

    Raises
    ------
    RunError
        Without `wait`: if another process holds the lock. With `wait`: if the file system has no locks.
    """
    with writing(folder / ".lock"):
        file = open(folder / ".lock", "a", opener=opener())  # noqa: SIM115 - closed below
    with file, unlocking(file):
        try:
            held = _patiently(file, wait)
        except BlockingIOError:
            raise RunError(f"only one process may work in {folder}; another does: wait until it ends") from None
        if wait and not held:  # without a lock, two processes could each spend what is left of one budget
            raise RunError(
                f"accounts, keys and generators need file locks; {folder} has none: put the state directory on a file "
                "system with locks"
            )
        yield


def _patiently(file: IO[Any], wait: bool) -> bool:
    """Lock a file as `lock` does; who only looks, as `in_use`, holds it for a moment."""
    with suppress(BlockingIOError):
        return lock(file, wait)
    time.sleep(MOMENT)
    return lock(file, wait)


def in_use(folder: Path) -> bool:
    """Say whether a process holds the folder's lock; never on a file system without locks."""
    try:
        with open(folder / ".lock", "rb") as file, unlocking(file):
            lock(file, wait=False, shared=True)  # several may look at once
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


# --- writing and reading files ----------------------------------------------------------------------------------------


def write_atomic(
    path: Path,
    data: bytes | str | Sequence[bytes | memoryview],
    to_disk: bool = True,
    mode: int = 0o600,
    over: Path | None = None,
) -> None:
    """Write a file completely or not at all: write a temporary file, flush it, rename it, flush its folder.

    Parameters
    ----------
    path : Path
        The file.
    data : bytes, str, or sequence of bytes and memoryviews
        Its content; those of a sequence are joined.
    to_disk : bool
        Wait for the disk. Without it, a loss of power may damage the file.
    mode : int
        The most permissions that the file has from its first byte on.
    over : Path | None
        An unneeded file to overwrite, ten times as fast as a new one; not if it has further hard links, as of a backup.

    Raises
    ------
    RunError
        If it cannot be written; no part of it is left.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    chunks = [data.encode()] if isinstance(data, str) else [data] if isinstance(data, bytes) else data
    with writing(path):
        with suppress(FileNotFoundError):  # another process has taken it
            if over and over.stat().st_nlink > 1:
                over.unlink()
            elif over:
                os.replace(over, temporary)
        try:
            with claimed(temporary, mode) as file, unlocking(file):
                file.writelines(chunks)
                file.truncate()
                file.flush()
                if to_disk:
                    os.fsync(file.fileno())
                if os.name != "posix":
                    file.close()  # Windows cannot rename an open file
                os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if to_disk:
            sync(path.parent)


def sync(folder: Path) -> None:
    """Flush a folder's entries to the disk; flushing its files does not."""
    if os.name != "posix":
        return
    with writing(folder):
        entries = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(entries)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that cannot flush folders
                raise
        finally:
            os.close(entries)


def stamp(path: Path) -> tuple[int, ...]:
    """Return a file's inode, size and time of change, which differ after any write; empty if there is no file.

    The file is opened, since a network file system may answer `stat` from a cache that is seconds old.
    """
    with reading(path):
        try:
            with open(path, "rb", 0) as file:
                status = os.fstat(file.fileno())
        except FileNotFoundError:
            return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def tally(path: Path, before: tuple[int, int] = (0, 0), end: int | None = None) -> tuple[int, int]:
    """Count a file's bytes, up to `end` of them, and compute their CRC-32; continue from the tally `before`."""
    size, crc = before
    with reading(path), open(path, "rb") as file:
        file.seek(size)
        while data := file.read(BYTES_AT_ONCE if end is None else min(BYTES_AT_ONCE, end - size)):
            size, crc = size + len(data), crc32(data, crc)
    return size, crc


def read_bytes(path: Path) -> bytes:
    """Read a file; a RunError if it cannot be read."""
    with reading(path):
        return path.read_bytes()


def read_text(path: Path) -> str:
    """Read a text; as `read_bytes`."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError:
        raise DamagedError(
            f"{path} must be text; it is damaged: restore it from a backup, or begin a new run"
        ) from None


def write_once(path: Path, text: str, to_disk: bool = True) -> str:
    """Write a file unless it exists, and return its content; of several concurrent writers, the first wins.

    Without `to_disk` a loss of power may lose or damage it.
    """
    mine = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    while not there(path):
        with writing(path):
            write_atomic(mine, text, to_disk)
            with suppress(FileExistsError, FileNotFoundError):  # another process was first, or `sweep` removed `mine`
                os.link(mine, path)
            mine.unlink(missing_ok=True)
            if to_disk:
                sync(path.parent)
    return read_text(path)


# --- JSON -------------------------------------------------------------------------------------------------------------


def fits(value: object, form: Any) -> bool:
    """Say whether a value of a JSON file has a form.

    Parameters
    ----------
    value : object
        The value; whole numbers of more than 64 bits, and texts that are not Unicode, have no form.
    form : type, tuple, list, Mapping or function
        Its type, or all allowed values, or the form of each item of a list; of an object the form of each key, and
        under `...` that of all others; or a function that says whether it fits.

    Examples
    --------
    >>> fits({"round": 1, "direction": "up"}, {"round": int, "direction": ("up", "down")})
    True
    >>> fits({"sizes": {"a": [1, 2], "b": [1, "2"]}}, {"sizes": {...: [int]}})
    False
    """
    if isinstance(form, Mapping):
        if not isinstance(value, dict) or not all(fits(value.get(key), form[key]) for key in form if key is not ...):
            return False
        return ... not in form or all(fits(key, str) and fits(value[key], form[...]) for key in value.keys() - form)
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(item, form[0]) for item in value)
    if isinstance(form, tuple):
        return value in form
    if not isinstance(form, type | UnionType):
        return bool(form(value))
    if isinstance(value, str):
        return isinstance(value, form) and not SURROGATE.search(value)
    return isinstance(value, form) and not (isinstance(value, int) and abs(value) >= LARGEST)


def parsed(text: bytes) -> Any:
    """Parse JSON; return None if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def write_json(path: Path, values: Mapping[str, Any], indent: int | None = None) -> None:
    """Write a JSON file completely or not at all, with a checksum among its keys."""
    write_atomic(path, json.dumps({**values, CHECKSUM: checksum(values)}, indent=indent) + "\n")


def read_json(path: Path, form: Form | None = None) -> dict[str, Any]:
    """Read a file of `write_json`; files of older versions have no checksum.

    Raises
    ------
    DamagedError
        If it is missing, damaged or of another form.
    RunError
        If it could not be read.
    """
    values = parsed(read_bytes(path))
    stored = values.pop(CHECKSUM, None) if isinstance(values, dict) else None
    if not fits(values, form or {}) or stored not in (None, checksum(values)):
        raise DamagedError(f"{path} must be as it was written; it is damaged: remove it, and it is written again")
    return dict(values)


def checksum(values: Mapping[str, Any]) -> int:
    """Return the CRC-32 of values as JSON, to be written under the key `CHECKSUM` beside them."""
    return crc32(json.dumps(values).encode())
