"""Recorded messages: what really travelled, kept so that attacks can be tried on it.

Each message is a file in `messages/`, complete or not there: its arrays bit for bit in safetensors' format, and in the
file's metadata what the message says of itself and all its scalars. Every ledger line of a recorded message names its
file under `message`. A file without such a line is of a message that a kill kept from the ledger.

Recorded messages are as sensitive as what travelled: they may hold patients' images. Only the files' owner may read
them.
"""

import json
import logging
import os
import secrets
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from flwr_replay.errors import RunError, WireError
from flwr_replay.files.atomic import private_folder
from flwr_replay.files.disk import entries, folder_locked, looked
from flwr_replay.files.tensors import CODES, METADATA, StateDict, read_with_texts, write_tensors
from flwr_replay.wire.records import decoded

__all__ = ["DIRECTIONS", "FOLDER", "Recorded", "Recording", "read_message"]

FOLDER = "messages"
DIRECTIONS: Mapping[str, tuple[str, ...]] = {"none": (), "up": ("up",), "all": ("up", "down")}  # by option `record`
MB = 1e6
ENTRY = 200  # the most bytes of a file's header for each array, without its name and shape
LONGEST = 10**8  # bytes of a header that safetensors reads


@dataclass(frozen=True)
class Recorded:
    """A message as it travelled."""

    about: dict[str, Any]  # the beginning of its ledger lines: exchange, institution, direction, stage, perhaps split
    arrays: StateDict  # by key; of weights, by their names in the state dict
    scalars: dict[str, Any]  # metrics, instructions and notices by key


class Recording:
    """Keeps messages in a folder, as long as they fit.

    The folder is made with the first message. All files together, whoever wrote them, have `most_mb` at most, in 10^6
    bytes; a message that does not fit is left out, and the log says so once.
    """

    def __init__(self, folder: Path, directions: Collection[str], most_mb: float) -> None:
        self.folder, self.directions, self.most = folder, directions, most_mb * MB
        self.left_out = 0  # messages, since this process began
        self.messages = self.bytes = self._last = 0
        self._counted = 0  # when the folder had changed last as its files were counted
        if directions and folder.is_dir():
            self._count()

    def summary(self) -> dict[str, int]:
        """Return how many messages and bytes the folder has, and how many did not fit since this process began."""
        return {"messages": self.messages, "bytes": self.bytes, "left-out": self.left_out}

    def keep(self, about: Mapping[str, Any], content: RecordDict) -> str:
        """Write a message to its file; return the file's name, empty if the message is not kept.

        `about` is the beginning of its ledger lines.
        """
        if about["direction"] not in self.directions:
            return ""
        arrays, scalars = _contents(content)
        texts = {"about": json.dumps(dict(about)), "scalars": json.dumps(scalars, default=bytes.hex)}
        header = len(json.dumps(texts)) + ENTRY
        header += sum(len(json.dumps(name)) + len(str(array.shape)) + ENTRY for name, array in arrays.items())
        size = header + sum(array.nbytes for array in arrays.values())
        with folder_locked(private_folder(self.folder)):  # other processes may record here, too
            self._count()
            if header > LONGEST or self.bytes + size > self.most:
                if not self.left_out:
                    logging.getLogger("flwr").warning(
                        f"{self.folder} holds {self.bytes / MB:.4g} MB; record-mb={self.most / MB:g}: messages that do "
                        "not fit are not recorded from here on"
                    )
                self.left_out += 1
                return ""
            name = f"{self._last + 1:08d}-{secrets.token_hex(4)}.safetensors"
            write_tensors(path := self.folder / name, arrays, texts, to_disk=False)
            size = sum(status.st_size for status in looked([path]).values())  # 0 of one removed meanwhile
            self._last, self.messages, self.bytes = self._last + 1, self.messages + 1, self.bytes + size
            with suppress(OSError):  # the system's own time may be as coarse as 4 ms, in which another may write, too
                os.utime(self.folder, ns=(time.time_ns(),) * 2)
            self._counted = self.folder.stat().st_mtime_ns
        return name

    def _count(self) -> None:
        """Count the files, unless nobody else has added or removed any since they were counted."""
        if (changed := self.folder.stat().st_mtime_ns) != self._counted:
            files = looked(entries(self.folder, f"{'[0-9]' * 8}-*.safetensors"))
            self.messages, self.bytes = len(files), sum(status.st_size for status in files.values())
            self._last = max((self._last, *(int(file.name.partition("-")[0]) for file in files)))
            self._counted = changed


def read_message(path: Path) -> Recorded:
    """Read a recorded message; a damaged or another file is a RunError."""
    arrays, texts = read_with_texts(path)
    try:
        return Recorded(json.loads(texts["about"]), arrays, json.loads(texts["scalars"]))
    except (KeyError, ValueError):
        raise RunError(f"{path} must be a recorded message; it is another file: leave it out") from None


def _contents(content: RecordDict) -> tuple[StateDict, dict[str, Any]]:
    """Return the arrays and scalars of all records of a message."""
    arrays: StateDict = {}
    scalars: dict[str, Any] = {}
    for record in content.values():
        if isinstance(record, ArrayRecord):
            arrays |= {_writable(name): _numbers(array) for name, array in record.items()}
        elif isinstance(record, MetricRecord | ConfigRecord):
            scalars |= record
    return arrays, scalars


def _writable(name: str) -> str:
    """Return an array's name; of one that no file can have, how it is written in Python."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return repr(name)
    return repr(name) if name == METADATA else name


def _numbers(array: Array) -> NDArray[Any]:
    """Decode an array; of one that cannot be decoded or stored, return its bytes as they came."""
    with suppress(WireError):
        numbers = decoded(array)
        if numbers.dtype.name in CODES:
            return numbers
    return np.frombuffer(array.data, np.uint8)
