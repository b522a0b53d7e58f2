"""File permissions and locks, and system errors as one line with file, reason and remedy."""

import errno
import fnmatch
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import IO, Any, NoReturn

from flwr_replay.errors import DamagedError, RunError

__all__ = [
    "claimed",
    "entries",
    "files_below",
    "folder_locked",
    "lock",
    "locked",
    "looked",
    "looked_below",
    "make",
    "opener",
    "reading",
    "remove",
    "shut",
    "there",
    "unlocking",
    "writing",
]

REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "make room on its disk"),
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "give this user the right to it"),
    **dict.fromkeys((errno.EEXIST, errno.EISDIR, errno.ENOTDIR), "move away what is in its place"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n), and try again"),
}


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of writing into one line with file, reason and remedy; the system's own may not name the file.

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
    """Turn an error of reading into one line, as `writing` does.

    Raises
    ------
    DamagedError
        If it is missing, or no file.
    RunError
        If it could not be read, which says nothing about what it holds.
    """
    try:
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise DamagedError(
            f"{path} must be a file; {error.strerror}: restore it from a backup, or begin a new run"
        ) from None
    except OSError as error:
        if error.errno is None:  # a library's, of what it has read
            raise
        remedy = REMEDIES.get(error.errno, "try again")
        raise RunError(f"{path} could not be read; {error.strerror or error}: {remedy}") from None


def there(path: Path) -> bool:
    """Say whether there is a file or folder; whoever cannot look is not told that there is none, as by `Path.exists`.

    Raises
    ------
    RunError
        If that cannot be seen.
    """
    with reading(path):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def entries(folder: Path, pattern: str = "*") -> list[Path]:
    """Return what a folder has by names of a pattern, sorted; nothing if there is no folder.

    `Path.glob` also finds nothing where it may not look or, from Python 3.12 on, where files are short. Whoever acts on
    that begins anew, or overwrites what it has not seen.

    Raises
    ------
    RunError
        If the folder cannot be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        _refuse(error)
    return sorted(folder / name for name in fnmatch.filter(names, pattern))


def files_below(folder: Path, at_work: bool = False) -> list[Path]:
    """Return the files in a folder and below it, without those of linked folders; errors as of `entries`.

    Where processes are `at_work`, a folder below it that is removed meanwhile has none.
    """

    def refuse(error: OSError) -> None:
        if not (at_work and isinstance(error, FileNotFoundError) and Path(error.filename) != folder):
            _refuse(error)

    return [Path(place, name) for place, _, names in os.walk(folder, onerror=refuse) for name in names]


def looked(files: Iterable[Path]) -> dict[Path, os.stat_result]:
    """Look at files, without those that a process at work has removed or renamed meanwhile."""
    statuses = {}
    for file in files:
        with suppress(FileNotFoundError):
            statuses[file] = file.stat()
    return statuses


def looked_below(folder: Path) -> dict[Path, os.stat_result]:
    """Look at the files in a folder and below it, as `looked`; at none in a folder that cannot be read."""
    return looked(Path(place, name) for place, _, names in os.walk(folder) for name in names)


def _refuse(error: OSError) -> NoReturn:
    raise RunError(
        f"{error.filename} must be a readable folder; {error.strerror or error}: mend that, and try again"
    ) from None


def remove(path: Path) -> None:
    """Remove a file, unless another process was faster, with the errors of `writing`."""
    with writing(path):
        path.unlink(missing_ok=True)


def make(folder: Path) -> None:
    """Create a folder and its missing parents, for their owner only, whatever the umask."""
    missing = list(takewhile(lambda place: not place.is_dir(), [folder, *folder.parents]))
    for place in reversed(missing):
        place.mkdir(0o700, exist_ok=True)


def shut(place: Path | int) -> None:
    """Remove the permissions of others from a file or folder, or an open file, unless it belongs to another user."""
    mode = os.stat(place).st_mode
    if mode & 0o077 and os.name == "posix" and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        with suppress(PermissionError):
            os.chmod(place, stat.S_IMODE(mode) & 0o700)


def opener(mode: int = 0o600) -> Callable[[str, int], int]:
    """Return an opener for `open` that creates files with at most these permissions and truncates none."""
    return lambda name, flags: os.open(name, flags & ~os.O_TRUNC, mode)


def lock(file: IO[Any] | int, wait: bool, shared: bool = False) -> bool:
    """Lock a file until it is closed, perhaps `shared` with others; return False if the file system has no locks.

    Raises
    ------
    BlockingIOError
        Without `wait`, if another process holds the lock.
    """
    try:
        import fcntl

        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError) as error:  # Windows, or a file system without locks
        if isinstance(error, BlockingIOError) and not wait:
            raise
        return False
    return True


@contextmanager
def unlocking(file: IO[Any] | int) -> Iterator[None]:
    """Give up a file's lock after a `with` block; closing it leaves the lock to a process forked meanwhile."""
    try:
        yield
    finally:
        with suppress(ImportError, OSError):  # Windows, or a file system without locks
            import fcntl

            fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def locked(file: IO[Any]) -> Iterator[None]:
    """Hold a file's lock within a `with` block."""
    lock(file, wait=True)
    with unlocking(file):
        yield


@contextmanager
def folder_locked(folder: Path) -> Iterator[bool]:
    """Hold a folder's own lock within a `with` block, where the system has one, as NFS has not; say whether it has."""
    if os.name != "posix":
        yield False
        return
    with writing(folder):
        entries = os.open(folder, os.O_RDONLY)
    try:
        with unlocking(entries):
            yield lock(entries, wait=True)
    finally:
        os.close(entries)


def claimed(path: Path, mode: int) -> IO[bytes]:
    """Open a file for writing and lock it, so that no `sweep` removes it."""
    while True:
        file = open(path, "wb", opener=opener(mode))  # noqa: SIM115 - its lock ends with it
        lock(file, wait=True)
        status = os.fstat(file.fileno())
        with suppress(FileNotFoundError):
            if os.path.samestat(status, path.stat()):
                if os.name == "posix" and status.st_mode & 0o777 & ~mode:
                    os.fchmod(file.fileno(), mode)
                return file
        file.close()  # `sweep` removed it before it was locked
