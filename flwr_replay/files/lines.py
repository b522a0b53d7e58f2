"""Files of JSON lines: what a crash leaves of them is whole, and one that only grows can be divided into segments.

    ledger.jsonl         the current segment, to which lines are added
    ledger-0001.jsonl    a closed segment, the oldest; it is not written again

A file is closed to a segment by its new name, under its lock. So a kill at any moment leaves each line in one of them.
"""

import glob
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from math import inf
from pathlib import Path
from typing import IO, Any

from flwr_replay.errors import DamagedError, RunError
from flwr_replay.files.atomic import Form, fits, parsed, read_bytes, sync, tally
from flwr_replay.files.disk import entries, lock, locked, looked, opener, reading, shut, there, unlocking, writing

__all__ = [
    "LEDGER",
    "Lines",
    "add_line",
    "check_begin",
    "each_line",
    "lines_of",
    "moved",
    "opened",
    "read_lines",
    "segments",
    "sound_lines",
]

LEDGER = "ledger.jsonl"  # of a run, and of an institution


def each_line(path: Path, form: Form | None = None) -> Iterator[dict[str, Any]]:
    """Read JSON lines one by one, without an incomplete last line, which a crash leaves; `Lines` removes it.

    Raises
    ------
    RunError
        If any other line is damaged or does not have the form; no crash of a run does that.
    """
    if file := opened(path):
        with file:
            yield from lines_of(file, path, form)


def opened(path: Path) -> IO[bytes] | None:
    """Open a file of JSON lines for reading; None if there is none."""
    with reading(path):
        try:
            return open(path, "rb")
        except FileNotFoundError:
            return None


def lines_of(file: IO[bytes], path: Path, form: Form | None = None) -> Iterator[dict[str, Any]]:
    """Read the lines of an open file, which may have another path by now; as `each_line`."""
    with reading(path):
        for number, line in enumerate(file, 1):
            text = line.removesuffix(b"\n")
            record = parsed(text) if text else None
            if isinstance(record, dict) and fits(record, form or {}):
                yield record
            elif text and (record is not None or text != line):
                keys = f" with {', '.join(form)}" if form else ""
                raise DamagedError(
                    f"every line of {path} must be JSON{keys}; line {number} is not: repair or remove it"
                )


def read_lines(path: Path, form: Form | None = None) -> list[dict[str, Any]]:
    """Read JSON lines; as `each_line`."""
    return list(each_line(path, form))


def sound_lines(path: Path, form: Form) -> tuple[list[dict[str, Any]], str]:
    """Read the JSON lines that have the form, for a page that must be written all the same.

    Parameters
    ----------
    path : Path
        The file.
    form : Form
        What a line must have.

    Returns
    -------
    lines : list of dict
        Those that can be read.
    fault : str
        What is missing, as a clause; empty if nothing is.
    """
    if not there(path):
        return [], f"{path.name} is missing"
    lines = [parsed(line) for line in read_bytes(path).split(b"\n") if line]
    sound = [line for line in lines if fits(line, form)]
    lost = len(lines) - len(sound)
    many = "lines" if lost > 1 else "line"
    return sound, f"{path.name} is damaged: {lost:,} {many} of {len(lines):,} cannot be read" if lost else ""


def segments(path: Path) -> list[Path]:
    """Return the segments of a file that is divided: the closed ones, the oldest first, then the file itself."""
    like = f"{glob.escape(path.stem)}-*{glob.escape(path.suffix)}"
    form = re.compile(rf"{re.escape(path.stem)}-([0-9]{{4,}}){re.escape(path.suffix)}")
    closed = [(int(match[1]), file) for file in entries(path.parent, like) if (match := form.fullmatch(file.name))]
    return [*(file for _, file in sorted(closed)), path]


def moved(path: Path) -> RunError:
    """Return the error of a file that only grows, and that has been taken away."""
    return RunError(
        f"{path} must stay where it is; another program has renamed, removed or cut it, as logrotate does: put it back "
        "and go on"
    )


def check_begin(folder: Path, grown: Mapping[str, Sequence[int]]) -> None:
    """Refuse files of a folder that no longer begin as they did at a checkpoint.

    Parameters
    ----------
    folder : Path
        The folder.
    grown : Mapping
        By name: length and checksum of a file or segment as `tally` returned them then. It may have been closed since.

    Raises
    ------
    DamagedError
        If one begins in another way.
    """
    for name, (size, checksum) in grown.items():
        path = next(segment for segment in segments(folder / name) if segment.name == name or segment.name not in grown)
        if size and (not there(path) or tally(path, end=size) != (size, checksum)):
            raise DamagedError(
                f"{path} must begin with the {size} bytes that it had at the checkpoint; it is damaged: restore it "
                "from a backup, or begin a new run"
            )


def add_line(path: Path, record: dict[str, Any], to_disk: bool = False) -> None:
    """Add a record to a file of JSON lines that is not kept open; with `to_disk`, wait for the disk."""
    with closing(Lines(path)) as lines:
        lines.append([record])
        lines.flush(to_disk)


class Lines:
    """A file of JSON lines, open for appending; added lines reach the file with the next `flush`.

    A flush writes all lines or none, and several processes may append. Opening removes an incomplete last line. A file
    that another program renames, removes or cuts meanwhile gets no more lines, nor does a new one in its place.

    Parameters
    ----------
    path : Path
        The file.
    most : float
        Bytes from which on the file is closed to the next segment; not on a file system without locks.
    """

    def __init__(self, path: Path, most: float = inf) -> None:
        self.path, self.most = path, most
        self._added: list[str] = []
        self._open()

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Add records."""
        self.write("".join(json.dumps(record) + "\n" for record in records))

    def write(self, text: str) -> None:
        """Add lines."""
        self._added.append(text)

    def flush(self, to_disk: bool = False) -> None:
        """Write the added lines to the file, so that they outlive this process; with `to_disk`, wait for the disk.

        Raises
        ------
        RunError
            If they cannot be written, or the file is not where it was. Then all are dropped, and the caller must not do
            what they record.
        """
        data = memoryview("".join(self._added).encode())
        self._added.clear()
        if not data and not to_disk:
            return
        with writing(self.path), self._current() as size:
            whole = size + len(data)
            try:
                while data:
                    data = data[self._file.write(data) :]
                if to_disk:
                    os.fsync(self._file.fileno())
            except OSError:
                with suppress(OSError):  # if this fails, the next opening removes the incomplete line
                    self._file.truncate(size)
                raise
            self._least = whole

    def close(self) -> None:
        """Write what was added, and close the file."""
        try:
            self.flush()
        finally:
            self._file.close()

    def _open(self) -> None:
        with writing(self.path):
            self._file = open(self.path, "a+b", 0, opener=opener())  # noqa: SIM115 - open while it grows
            shut(self._file.fileno())  # not by its path: another process may have closed it to a segment
            with locked(self._file):
                self._mend()
            self._opened = os.fstat(self._file.fileno())
            self._least = self._opened.st_size

    @contextmanager
    def _current(self) -> Iterator[int]:
        """Hold the lock of the file that has the path and room, yield its size; the open one may be closed by now."""
        while True:
            with unlocking(self._file):
                held, size = lock(self._file, wait=True), self._size()
                if not self._closed() if size is None else size < self._least:
                    raise moved(self.path)
                if size is not None and not (held and size >= self.most):
                    yield size
                    return
                if size is not None:
                    self._divide()
            before = self._file
            try:
                self._open()
            finally:  # if it fails, the next flush tries again
                if self._file is not before:
                    before.close()
            sync(self.path.parent)

    def _size(self) -> int | None:
        """Return the bytes of the open file; None if the path is another file's by now, or nobody's."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return None
        return status.st_size if os.path.samestat(status, self._opened) else None

    def _closed(self) -> bool:
        """Say whether the open file is a closed segment by now."""
        return any(os.path.samestat(self._opened, segment) for segment in looked(segments(self.path)[:-1]).values())

    def _divide(self) -> None:
        """Close the file to the next segment."""
        closed = segments(self.path)[:-1]
        number = int(closed[-1].stem.rpartition("-")[2]) + 1 if closed else 1
        os.rename(self.path, self.path.with_stem(f"{self.path.stem}-{number:04d}"))

    def _mend(self) -> None:
        """Remove an incomplete last line; if only its line end is missing, add that."""
        size = self._file.seek(0, os.SEEK_END)
        if not size:
            return
        self._file.seek(size - 1)
        if self._file.read(1) == b"\n":
            return
        self._file.seek(0)
        torn = self._file.read().rpartition(b"\n")[2]
        if parsed(torn) is None:
            self._file.truncate(size - len(torn))
        else:
            self._file.write(b"\n")
