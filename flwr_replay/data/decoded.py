"""Images that were decoded once: an institution keeps them on its disk, and reads them as a memory map.

So it does with the features that a frozen encoder computes (`flwr_replay.institution.features`).

    <folder>/<form>.images      all examples one after the other, in the order of the splits
    <folder>/<form>.json        what they were made of, how they are divided, and the file that was written

A deployment starts a process for every message, and decoding takes longer than most messages. A map's pages are read
when they are used, and the system takes them back when memory is short. So an institution may have more images than
memory.

An entry is used only if all that its images depend on is as it was: the task's form, the rows of the list, path, size,
inode and times of change of every file, and the versions of the packages that decode. It must also be the file that was
written, with its size, inode and times of change. So truncation, any write, and a copy put in its place are noticed,
and the images are decoded again. A disk that returns other bytes by itself is not noticed.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import DTypeLike, NDArray

from flwr_replay.config.sections import TaskConfig
from flwr_replay.errors import DamagedError
from flwr_replay.files.atomic import private_folder, read_json, sweep, sync, write_json
from flwr_replay.files.disk import claimed, folder_locked, looked, reading, writing

__all__ = [
    "FOLDER",
    "DecodedImages",
    "ImageSource",
    "Source",
    "decoded",
    "digest_of",
    "each",
    "form_of",
    "mapped",
    "versions",
]

FOLDER = "decoded"  # in a state directory
FORMAT = 3  # a higher one where an image's bits, or the form of an entry, change
PACKAGES = ("flwr-replay", "numpy", "pillow", "pydicom", "scipy")  # whose version may change an image's bits
READ = {"key": str, "splits": dict, "written": list, "shape": list, "dtype": str}
TOGETHER, BYTES = 256, 2**26  # images that are decoded before they are written: so many, or of so many bytes

Indices = NDArray[np.int64]
Item = TypeVar("Item")
Result = TypeVar("Result")
_maps: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()  # of entries: where it begins, and its file then


class Source(Protocol):
    """Examples that are made once."""

    what: ClassVar[str]

    @property
    def needs(self) -> int:
        """The bytes of other entries, without which it cannot be made."""

    @property
    def dtype(self) -> DTypeLike:
        """Of an example's numbers."""

    @property
    def total(self) -> int:
        """How many examples there are."""

    @property
    def form(self) -> str:
        """What an entry is named by."""

    @property
    def key(self) -> str:
        """All that the examples and their division depend on, as a digest."""

    def shape(self, n: int) -> tuple[int, int, int, int]:
        """Return the shape of n examples."""

    def divide(self) -> Mapping[str, Indices]:
        """Return the indices of the examples in each split; together they are all."""

    def examples(self, members: Mapping[str, Indices]) -> Iterator[NDArray[Any]]:
        """Make them split by split; yield some at a time, (n, C, H, W)."""


@dataclass(frozen=True)
class ImageSource:
    """Files to decode, one example each."""

    what: ClassVar[str] = "decoded images"
    needs: ClassVar[int] = 0
    task: TaskConfig  # with the form of an example, (task.channels, task.size, task.size)
    files: Sequence[Path]
    about: object  # what else the division depends on, as JSON has it
    divide: Callable[[], Mapping[str, Indices]]  # returns the indices of the files in each split
    read: Callable[[int], NDArray[Any]]  # decodes the n-th file
    dtype: DTypeLike = np.uint8  # of an example

    @property
    def total(self) -> int:
        """How many examples there are."""
        return len(self.files)

    @property
    def form(self) -> str:
        """What an entry is named by: the data folder, and the task without what changes no example."""
        return form_of(self.task)

    @property
    def key(self) -> str:
        """All that the examples and their division depend on, as a digest."""
        files = [(str(file), *_stamp(file)) for file in self.files]
        return digest_of([FORMAT, self.form, np.dtype(self.dtype).str, versions(PACKAGES), self.about, files])

    def examples(self, members: Mapping[str, Indices]) -> Iterator[NDArray[Any]]:
        """Decode split by split; yield some at a time, (n, C, H, W)."""
        order = np.concatenate(list(members.values()))
        size = prod(self.shape(1)) * np.dtype(self.dtype).itemsize
        together = max(1, min(TOGETHER, BYTES // size))
        for first in range(0, len(order), together):
            yield np.stack(each(self.read, order[first : first + together].tolist())).astype(self.dtype, copy=False)

    def shape(self, n: int) -> tuple[int, int, int, int]:
        """Return the shape of n examples."""
        return n, self.task.channels, self.task.size, self.task.size


class DecodedImages:
    """An institution's decoded images on its disk, an entry for every data folder and form of images.

    Parameters
    ----------
    folder : Path
        The folder, for its owner only.
    limit : float
        The most bytes of all entries together; for a new one the oldest go. What is larger alone is not kept. With 0
        nothing is kept, and what is there goes.
    """

    def __init__(self, folder: Path, limit: float) -> None:
        self.folder, self.limit = folder, limit if os.name == "posix" else 0  # elsewhere no open file is renamed

    def decoded(self, source: Source) -> tuple[Mapping[str, Indices], NDArray[Any]]:
        """Return the indices of the files in each split, and all examples in the order of the splits.

        Raises
        ------
        DataError
            If a file cannot be decoded; then nothing is kept.
        RunError
            If an entry cannot be written.
        """
        size = prod(source.shape(source.total)) * np.dtype(source.dtype).itemsize
        if size + source.needs > self.limit:  # entries must not drive out what they are made of, message by message
            self._make_room(0)
            if self.limit:
                logging.getLogger("flwr").warning(
                    "%s take %.3g GB, and cache-gb=%g: they are made for every message, and all are in memory; set "
                    "cache-gb in --node-config to more",
                    source.what,
                    (size + source.needs) / 1e9,
                    self.limit / 1e9,
                )
            return _in_memory(source)
        form, key = source.form, source.key
        if kept := self._find(form, key):
            return kept
        with folder_locked(private_folder(self.folder)):
            if not (kept := self._find(form, key)):  # another process may have been faster
                sweep(self.folder)
                self._remove(form)
                self._make_room(size)
                self._write(form, key, source)
                kept = self._find(form, key)
        return kept or _in_memory(source)  # not found: somebody has changed it since

    def _find(self, form: str, key: str) -> tuple[Mapping[str, Indices], NDArray[Any]] | None:
        """Return an entry if it is valid."""
        try:
            about = read_json(self._about(form), READ)
            with reading(path := self._images(form)), open(path, "rb") as file:
                if about["key"] != key or about["written"] != list(_times(os.fstat(file.fileno()))):
                    return None
                x = np.memmap(file, about["dtype"], "r", shape=tuple(about["shape"]))
                _maps[x._mmap] = x.ctypes.data, *about["written"]  # type: ignore[attr-defined]
        except (DamagedError, ValueError, TypeError):  # missing or damaged
            return None
        return {split: np.asarray(rows, np.int64) for split, rows in about["splits"].items()}, x

    def _write(self, form: str, key: str, source: Source) -> None:
        """Decode all files and write them; nothing of a file is left if one cannot be decoded."""
        members, path = source.divide(), self._images(form)
        shape = source.shape(sum(map(len, members.values())))
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with writing(path):
            try:
                with claimed(temporary, 0o600) as file:
                    for x in source.examples(members):
                        file.write(np.ascontiguousarray(x).data)
                    file.flush()
                    os.fsync(file.fileno())
                    os.replace(temporary, path)
                    written = _times(os.fstat(file.fileno()))  # after its renaming, which may change a time
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        sync(self.folder)
        splits = {split: rows.tolist() for split, rows in members.items()}
        about = {"key": key, "splits": splits, "written": written, "shape": shape}
        write_json(self._about(form), {**about, "dtype": np.dtype(source.dtype).str})

    def _make_room(self, size: float) -> None:
        """Remove the oldest entries until one of this size fits."""
        stats = looked(self.folder.glob("*.images"))  # another process may make room at the same time
        entries = sorted((stat.st_mtime_ns, file, stat.st_size) for file, stat in stats.items())
        while entries and size + sum(taken for _, _, taken in entries) > self.limit:
            self._remove(entries.pop(0)[1].stem)

    def _remove(self, form: str) -> None:
        for path in (self._about(form), self._images(form)):
            with writing(path):
                path.unlink(missing_ok=True)

    def _images(self, form: str) -> Path:
        return self.folder / f"{form}.images"

    def _about(self, form: str) -> Path:
        return self.folder / f"{form}.json"


def decoded(source: Source, kept: DecodedImages | None) -> dict[str, tuple[Indices, NDArray[Any]]]:
    """Decode files, or find them decoded.

    Returns for each split the indices of its files, and their examples, (n, C, H, W): a slice of one array, which must
    not be written to. Without `kept` it is in memory only.
    """
    members, x = kept.decoded(source) if kept else _in_memory(source)
    ends = np.cumsum([len(rows) for rows in members.values()])
    return {
        split: (members[split], x[end - len(members[split]) : end]) for split, end in zip(members, ends, strict=True)
    }


def mapped(x: NDArray[Any]) -> tuple[int, ...]:
    """Return which numbers of which file an array maps, if it is an entry's; it then changes with them."""
    held = getattr(x, "_mmap", None)  # the map itself, which slices share
    begin, *written = _maps.get(held, (0,)) if held else (0,)
    return (x.ctypes.data - begin, *x.shape, *x.strides, *written) if written else ()


def each(read: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Read items in as many threads as there are cores; results are in the items' order, and so is the first error."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(read, items))


def _in_memory(source: Source) -> tuple[Mapping[str, Indices], NDArray[Any]]:
    members = source.divide()
    x, first = np.empty(source.shape(sum(map(len, members.values()))), source.dtype), 0
    for batch in source.examples(members):
        x[first : first + len(batch)] = batch
        first += len(batch)
    return members, x


def _stamp(file: Path) -> tuple[int, ...]:
    """Return what changes with a file; nothing if there is none, which decoding it will say."""
    with suppress(OSError):
        return _times(file.stat())
    return ()


def _times(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def versions(packages: Sequence[str]) -> list[str]:
    """Return the packages' versions; empty for one that is not there."""
    versions = []
    for package in packages:
        try:
            versions.append(version(package))
        except PackageNotFoundError:
            versions.append("")
    return versions


def digest_of(values: object) -> str:
    """Return a digest of what JSON can hold."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def form_of(task: TaskConfig) -> str:
    """Return a digest of the data folder, and of the task without what changes no example."""
    return digest_of(asdict(replace(task, name="", mean=(), std=(), unit="", class_names=(), class_groups=())))
