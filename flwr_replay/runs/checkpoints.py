"""What a run keeps to go on: its last two checkpoints, each written while the next exchange runs, and its best model.

Some files of a run only grow, and some of these in segments. Each checkpoint records the lengths and checksums of all
segments, so that a resumed run notices damage. They are on the disk before the checkpoint is.

One is `members.jsonl`, with a line whenever something about an institution changes. So a checkpoint after each of many
visits does not write all institutions again; it records how much of the file belongs to it.

The folder `best/` has the global weights of the best evaluated round. Each file is better than those before it, and
named after its exchange. While a run lasts there may be three, so that it can resume from either of its last two
checkpoints; in the end one is left. Runs that resume end with the same one.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from math import inf
from pathlib import Path
from typing import IO, Any, NamedTuple

from flwr_replay.errors import DamagedError, RunError
from flwr_replay.files.atomic import fits, private_folder, read_bytes, tally, write_atomic
from flwr_replay.files.disk import entries, reading, remove, writing
from flwr_replay.files.lines import Lines, check_begin, read_lines, segments
from flwr_replay.files.tensors import OF_RUN, read_own, read_texts, write_tensors
from flwr_replay.report.run_files import FORMS, MEMBERS, mark_of, tensors_of
from flwr_replay.server.recorder import Snapshot
from flwr_replay.wire.records import StateDict

__all__ = ["BestModel", "Checkpoints", "TakingPart", "best_of"]

CONFUSED = "confusion"  # a text beside the best weights
FORM = {
    "server-round": int,
    "examples-seen": int,
    "seconds": int | float,
    "state": dict,
    "label-scale": list | None,
    "encoder": str,
    "files": {...: [int]},
}


class Checkpoints:
    """Named arrays and plain values, as they were after each of the last two exchanges.

    Parameters
    ----------
    folder : Path
        The run directory.
    growing : Sequence[str]
        Names of its files that only grow, line by line; some may not exist, some be divided into segments.
    """

    def __init__(self, folder: Path, growing: Sequence[str]) -> None:
        self.folder = private_folder(folder / "checkpoints")
        self._mark = mark_of(folder)
        self._growing = [folder / name for name in growing]
        self._tallies: dict[Path, tuple[int, int]] = {}  # of each segment
        self._writer = ThreadPoolExecutor(max_workers=1)  # so that the next round need not wait for the disk
        self._writing: Future[None] = self._writer.submit(lambda: None)

    def write(
        self,
        exchange: int,
        arrays: StateDict,
        values: Mapping[str, Any],
        first: Sequence[Callable[[], None]] = (),
    ) -> None:
        """Wait for the previous checkpoint, then begin to write this one. Its arrays must not change any more.

        `first` are called before, in the background: they write what a run that resumes from this checkpoint needs.

        Raises
        ------
        RunError
            If the previous checkpoint or a growing file could not be written.
        """
        self.wait()
        growing = [segment for path in self._growing for segment in self._segments(path)]
        grown = {segment: tally(segment, self._tallies.get(segment, (0, 0))) for segment in growing}
        changed = [_opened(segment) for segment, counted in grown.items() if counted != self._tallies.get(segment)]
        self._tallies = grown
        values = {**values, "files": {segment.name: counted for segment, counted in grown.items()}}
        file = self.folder / f"{exchange:06d}.safetensors"
        texts = {"values": json.dumps(values), OF_RUN: self._mark}
        self._writing = self._writer.submit(_write, file, arrays, texts, changed, first)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        self._writing.result()

    def close(self) -> None:
        """Finish writing."""
        self._writer.shutdown()

    def read(self, log: Callable[[str], None]) -> tuple[StateDict, dict[str, Any]] | None:
        """Return the last complete checkpoint; None if there is no checkpoint file. Keep it and the one before.

        Raises
        ------
        RunError
            If there are checkpoints but none is complete, one could not be read, or a growing file no longer begins as
            it did then.
        """
        files = entries(self.folder, "*.safetensors")[::-1]
        for i, path in enumerate(files):
            try:
                arrays, texts = tensors_of(self.folder.parent, path)
                values = json.loads(texts.get("values", ""))
            except (DamagedError, ValueError) as error:
                log(f"{error}; the run continues from the previous checkpoint")
                continue
            if fits(values, FORM):
                check_begin(self.folder.parent, values["files"])
                for old in files[i + 2 :]:  # that a killed process had no time to remove
                    remove(old)
                return arrays, values
            log(f"{path} is not a checkpoint; the run continues from the previous one")
        if files:
            raise RunError(f"a run resumes from a checkpoint; {self.folder} has no complete one: begin a new run")
        return None

    def _segments(self, path: Path) -> list[Path]:
        """Return a growing file's segments that exist; if it was closed since, its tally becomes the next segment's."""
        all_segments = segments(path)
        if new := [segment for segment in all_segments[:-1] if segment not in self._tallies]:
            self._tallies[new[0]] = self._tallies.pop(path, (0, 0))
        return [segment for segment in all_segments if segment.exists()]


def _opened(path: Path) -> IO[bytes]:
    """Open a growing file at once, since its path may be the next segment's when it is flushed."""
    with reading(path):
        return open(path, "rb")


def _write(
    file: Path,
    arrays: StateDict,
    texts: dict[str, str],
    changed: Sequence[IO[bytes]],
    first: Sequence[Callable[[], None]],
) -> None:
    with ExitStack() as opened:
        for grown in changed:
            opened.enter_context(grown)
        for write in first:
            write()
        for grown in changed:
            with writing(Path(grown.name)):
                os.fsync(grown.fileno())
    write_tensors(file, arrays, texts)
    for old in entries(file.parent, "*.safetensors")[:-2]:
        remove(old)


class Entry(NamedTuple):
    """What a checkpoint knows of an institution."""

    examples: int  # for training
    node: int  # Flower's node id
    proof: str  # SHA-256 of its first proof of identity
    trained: int  # the last exchange in which it has trained; 0: none


class TakingPart:
    """The institutions of a run directory, with what a resumed run must know of each."""

    def __init__(self, folder: Path) -> None:
        self._lines = Lines(folder / MEMBERS)
        self._entries: dict[str, Entry] = {}

    @property
    def names(self) -> set[str]:
        """Names of all that ever took part."""
        return {*self._entries}

    def note(self, snapshot: Snapshot) -> None:
        """Write what has changed since the last snapshot."""
        changed = list[dict[str, Any]]()
        for name, examples in snapshot.examples.items():
            entry = Entry(examples, *snapshot.bindings.get(name, (0, "")), snapshot.trained.get(name, 0))
            if self._entries.get(name) != entry:
                self._entries[name] = entry
                changed.append({"institution": name, **entry._asdict()})
        self._lines.append(changed)
        self._lines.flush()

    def restore(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint with these values knows, as a `Snapshot` names it; drop what was noted later."""
        path, size = self._lines.path, values["files"].get(MEMBERS, (0, 0))[0]
        self._lines.close()
        write_atomic(path, read_bytes(path)[:size])
        self._lines = Lines(path)
        self._entries = {row.pop("institution"): Entry(**row) for row in read_lines(path, FORMS[MEMBERS])}
        return {
            "examples": {name: entry.examples for name, entry in self._entries.items()},
            "trained": {name: entry.trained for name, entry in self._entries.items() if entry.trained},
            "bindings": {name: (entry.node, entry.proof) for name, entry in self._entries.items()},
        }

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


Evaluated = tuple[int, dict[str, float], dict[str, dict[str, float]]]  # the exchange, pooled metrics, each one's own


def best_of(history: Sequence[Evaluated], metric: str, higher_is_better: bool) -> Evaluated:
    """Return the first of the evaluations with the best metric, among those at the most institutions."""
    sign = 1 if higher_is_better else -1

    def judged(evaluated: Evaluated) -> tuple[int, float]:
        return sum(metric in own for own in evaluated[2].values()), sign * evaluated[1].get(metric, -sign * inf)

    return max(history, key=judged)


class BestModel:
    """The best global weights of a run, by its directory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._mark = folder / "best", mark_of(folder)

    def files(self) -> dict[int, Path]:
        """Return the files by exchange, in order."""
        return {int(path.stem): path for path in entries(self.folder, "[0-9]*.safetensors")}

    @property
    def exchange(self) -> int:
        """The exchange after which the best weights were tested; a RunError if there are none."""
        if not (files := self.files()):
            raise RunError(
                f"{self.folder.parent} has no best model: methods whose institutions keep models of their own have "
                "none, nor have runs of older versions: take the last one"
            )
        return max(files)

    def file(self) -> Path:
        """Return the file with the best weights."""
        return self.files()[self.exchange]

    @property
    def confusion(self) -> dict[str, list[int]]:
        """Each institution's test examples by label and prediction, row by row; nothing where validation judged."""
        return dict(json.loads(read_texts(self.file()).get(CONFUSED, "{}")))

    def write(self, exchange: int, arrays: StateDict, confusion: Mapping[str, list[int]] | None = None) -> None:
        """Keep the weights of a round that is better than all before, and how its tests came out."""
        file = private_folder(self.folder) / f"{exchange:06d}.safetensors"
        write_tensors(file, arrays, {OF_RUN: self._mark, CONFUSED: json.dumps(confusion or {})})

    def settle(self, exchange: int) -> None:
        """Delete what is not the best at this exchange, and was before it."""
        self._delete([at for at in self.files() if at <= exchange][:-1])

    def end(self, exchange: int, last: StateDict | None) -> Path | None:
        """Delete all but the best; return its file, or None if that is lost.

        Parameters
        ----------
        exchange : int
            Of the best.
        last : StateDict | None
            The weights of the last exchange if they are the best: if their file is lost, it is written again.
        """
        if last is not None and exchange not in self.files():
            self.write(exchange, last)
        self._delete([at for at in self.files() if at != exchange])
        return self.files().get(exchange)

    def rewind(self, exchange: int, log: Callable[[str], None]) -> None:
        """Delete what was best only after this exchange, and what is damaged or another run's; `log` is told why.

        Raises
        ------
        RunError
            If a file could not be read. Nothing is deleted then.
        """
        damaged = []
        for at, path in self.files().items():
            try:
                read_own(path, self._mark)
            except DamagedError as error:
                damaged.append(at)
                if at <= exchange:
                    log(f"{error}; the run goes on without the best round's model")
        self._delete([at for at in self.files() if at > exchange or at in damaged])

    def _delete(self, exchanges: list[int]) -> None:
        for path in (self.files()[at] for at in exchanges):
            remove(path)
