"""What an institution keeps between messages: named arrays in its state directory, by run and exchange.

Nothing that must last lives in memory: a deployed ClientApp's process ends with every message, and a Ray actor serves
several institutions. Each save is atomic, and the last three are kept. The server writes its checkpoint while the next
exchange runs, so a crash may lose two exchanges. They are then repeated from the state before them, with the same bits.

A process also holds in memory the arrays that it saved last under each key, up to `HELD` bytes in all. It reads them
from there as long as the file is the one that it has written.

An institution that returns as another node proves that it took part before. A key of 32 random bytes is made once and
kept in the state directory. Only its owner can read it, and it is never sent. The proof for a run is HMAC-SHA256 of the
key over the run's id: it cannot be used in other runs.
"""

import hmac
import json
import logging
import os
import re
import secrets
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from flwr_replay.config.binding import differing, digest_of
from flwr_replay.config.sections import NODES
from flwr_replay.data import Dataset
from flwr_replay.errors import PrivacyError, RefusedError, WireError
from flwr_replay.files.atomic import NAME, private_folder, read_json, read_text, stamp, write_atomic, write_once
from flwr_replay.files.disk import entries, locked, opener, reading, remove, there, writing
from flwr_replay.files.tensors import OF_RUN, read_with_texts, write_tensors
from flwr_replay.memory import on_forget, remembered
from flwr_replay.wire.records import StateDict

__all__ = ["DATA", "KEY", "OPTIONS", "ORIGIN", "REMOVED", "RUNS", "StateStore", "proof_of"]

RUNS = "runs"  # the folder of all runs: the server names them, so they must not meet the institution's own files
DATA = "data.sha256"  # a run's file: digests of the training examples, a line each
ENCODER = "encoder.sha256"  # a run's file: that of what does not train
FINGERPRINTS = "fingerprints.json"  # a run's file: by split, that of its examples and labels
OPTIONS = "options.json"  # a run's file: those to which it is bound
REMOVED = "removed"  # a run's file: the institution has removed what it kept of the run
LONGEST = 200  # bytes of a run's id: files are named after it, with a process's number while they are written
SUFFIX = ".safetensors"
ORIGIN = "made-under"  # a file's note: the digest of the options under which it was made
HELD = 256 * 2**20  # bytes of arrays in memory


class Owner(Protocol):
    """Whose state it is: what `flwr_replay.institution.owner.Institution` has of it."""

    name: str
    durable: bool  # whether what is kept reaches the disk at once
    read_pooled: Callable[[], Dataset] | None  # in a simulation, what reads the examples of all

    @property
    def state(self) -> Path:
        """Its state directory."""

    @property
    def data(self) -> Dataset:
        """Its examples."""


class StateStore:
    """Arrays under a key, as they stood after an exchange of a run."""

    def __init__(self, institution: Owner, bound: str = "") -> None:
        self.institution, self.origin = institution, digest_of(bound)

    def of_run(self, run: str) -> Path:
        """Return a run's folder, which may not exist yet."""
        if not NAME.fullmatch(run) or len(run.encode()) > LONGEST:  # the server's: it must not lead out of the state
            raise WireError(
                "a run's id has letters, digits, spaces, dots, hyphens and underscores, at most "
                f"{LONGEST} bytes; got {run!r}"
            )
        return self.institution.state.joinpath(RUNS, run)

    def runs(self) -> list[Path]:
        """Return the folders of all runs."""
        return [folder for folder in (self.institution.state / RUNS).iterdir() if folder.is_dir()]

    def bind(self, run: str, bound: str) -> None:
        """Bind a run to its options: its first message writes them down, from `binding`; later ones must have the same.

        A run that began under other options is refused, since its state here may depend on data without noise. So is
        one whose state the institution has removed: it would go on from another one.
        """
        folder = self.of_run(run)
        if there(folder / REMOVED):
            raise RefusedError(
                f"this institution has removed what it kept of run {run!r}, which cannot go on: begin a new run"
            )
        _bind(folder, bound, self.institution.durable)

    def check_encoder(self, run: str, encoder: str) -> None:
        """Bind a run to what does not train of its model, by its SHA-256; empty if all of it trains."""
        if encoder and (before := write_once(self.of_run(run) / ENCODER, encoder, self.institution.durable)) != encoder:
            raise RefusedError(
                f"a run keeps its encoder; that of run {run!r} was {before}, and this institution's is now {encoder}: "
                "put the file of then back"
            )

    def check_data(self, run: str, dp: bool, pooled: bool = False) -> None:
        """Look whether the examples and labels are those that a run began with here; the first time, note them.

        What is noted is an HMAC under the institution's own key: without the key it tells nobody whether an image is
        the institution's. It never leaves.

        With `dp` the run has an account here; otherwise it goes on with the new data, which the log says once. With
        `pooled` the institution trains, in a simulation, on the examples of all.

        Raises
        ------
        PrivacyError
            Under DP, if training or validation examples are others: an account is about one data set.
        """
        owner, file = self.institution, self.of_run(run) / FINGERPRINTS
        splits = {"training": owner.data.train, "validation": owner.data.val, "test": owner.data.test}
        if pooled and owner.read_pooled:
            splits["pooled"] = owner.read_pooled().train
        now = {  # a line break is in no run's id: the server cannot ask for it as a proof
            split: proof_of(owner.state, f"{run}\n{split}\n{examples.digest}", owner.durable)
            for split, examples in splits.items()
            if examples is not None
        }
        before = read_json(file, {...: str}) if there(file) else {}
        changed = [split for split in now if before.get(split, now[split]) != now[split]]
        if dp and set(changed) - {"test"}:
            raise PrivacyError(
                f"a privacy account is about one data set; the {' and '.join(changed)} examples or labels are others "
                f"than when run {run!r} began here: restore them, or begin a new run"
            )
        if changed:
            logging.getLogger("flwr").warning(
                "%s: the %s examples or labels are others than when run %r began here; it goes on with them",
                owner.name,
                " and ".join(changed),
                run,
            )
        if before != (kept := {**before, **now}):
            private_folder(file.parent)
            write_atomic(file, json.dumps(kept), to_disk=owner.durable)

    def note_data(self, run: str) -> None:
        """Write down which training examples the institution has in a run: a digest, and another if they change.

        A digest tells whoever has an image whether it is the institution's. So it is written only where messages are
        recorded, which tell more, and never leaves.
        """
        file = private_folder(self.of_run(run)) / DATA
        before = read_text(file) if there(file) else ""
        if (digest := self.institution.data.train.digest) not in before:
            write_atomic(file, f"{before}{digest}\n", to_disk=self.institution.durable)

    def count_test(self, run: str) -> int:
        """Count a test in a run; return how many there were before."""
        if not there(folder := self.of_run(run)):
            private_folder(folder)
        path = folder / "tests"
        with writing(path), open(path, "ab", 0, opener=opener()) as file, locked(file):  # over NFS none appends alone
            file.write(b".")  # at once: where it stands is then known, whoever else has opened the file
            return file.tell() - 1

    def save(
        self, key: str, run: str, exchange: int, arrays: StateDict, to_disk: bool = True, give: bool = False
    ) -> None:
        """Keep arrays as they are after an exchange; of a key, the last three are kept.

        Without `to_disk` they outlive this process, but perhaps not a power failure. With `give` they are also held in
        memory; the caller must not write to them any more.
        """
        file = self._file(key, run, exchange)
        others = [self._file(key, run, saved) for saved in self._exchanges(key, run) if saved != exchange]
        if not others:
            private_folder(file.parent)
        spare = others[:-2]
        origin = {ORIGIN: self.origin, OF_RUN: run}
        write_tensors(file, arrays, origin, to_disk=to_disk, over=spare.pop() if spare else None)
        for old in spare:
            remove(old)
        if give:
            _recent.hold(file, arrays)

    def load(self, key: str, run: str, before: int) -> StateDict | None:
        """Return the arrays as they were when exchange `before` began; None if there are none yet.

        The caller must not write to them.
        """
        file = self._latest(key, run, before)
        return _recent.read(file, self.origin) if file else None

    def take(self, key: str, run: str, before: int) -> StateDict | None:
        """Return the same arrays, which the caller may write to; from then on only the disk has them."""
        file = self._latest(key, run, before)
        arrays = _recent.read(file, self.origin) if file else None
        if file:
            _recent.drop(file)
        return arrays

    def at(self, key: str, run: str, exchange: int) -> StateDict | None:
        """Return the arrays saved after one exchange, for reading only; None if there are none."""
        file = self._file(key, run, exchange)
        return _recent.read(file, self.origin) if there(file) else None

    def has(self, key: str, run: str, exchange: int) -> bool:
        """Return whether arrays were saved after one exchange."""
        return there(self._file(key, run, exchange))

    def newest(self, key: str, run: str, before: int) -> int:
        """Return the last exchange before this one after which arrays were saved under a key; 0: none."""
        file = self._latest(key, run, before)
        return int(file.stem.rpartition("-")[2]) if file else 0

    def forget_after(self, key: str, run: str, exchange: int) -> None:
        """Remove what later exchanges saved; these exchanges are repeated."""
        for saved in self._exchanges(key, run):
            if saved > exchange:
                remove(self._file(key, run, saved))

    def forget(self, key: str, run: str) -> None:
        """Remove everything saved under a key, or under longer keys `key-…`."""
        for file in entries(self.of_run(run), f"{key}-*{SUFFIX}"):
            remove(file)

    def _latest(self, key: str, run: str, before: int) -> Path | None:
        """Return a key's last file from before an exchange."""
        file = self._file(key, run, before - 1)
        if there(file):  # the usual case, without listing the folder
            return file
        earlier = [exchange for exchange in self._exchanges(key, run) if exchange < before]
        return self._file(key, run, earlier[-1]) if earlier else None

    def _exchanges(self, key: str, run: str) -> list[int]:
        """Return the exchanges that a key's files belong to, in order."""
        with reading(folder := self.of_run(run)):
            try:
                names = os.listdir(folder)
            except FileNotFoundError:
                return []
        begin, number = f"{key}-", slice(len(key) + 1, -len(SUFFIX))
        ours = [name[number] for name in names if name.startswith(begin) and name.endswith(SUFFIX)]
        return sorted(int(exchange) for exchange in ours if exchange.isdigit())

    def _file(self, key: str, run: str, exchange: int) -> Path:
        return self.of_run(run) / f"{key}-{exchange:06d}{SUFFIX}"


class RecentArrays:
    """The arrays that this process saved last under each key, held in memory."""

    def __init__(self) -> None:
        self.held: OrderedDict[str, Held] = OrderedDict()  # by folder and key, the latest last
        self.bytes = 0

    def hold(self, file: Path, arrays: StateDict) -> None:
        """Hold a file's arrays in place of those of its key's earlier file."""
        self.drop(file)
        size = sum(array.nbytes for array in arrays.values())
        if size <= HELD:
            self.held[_slot(file)] = Held(file, stamp(file), size, arrays)
            self.bytes += size
        while self.bytes > HELD:
            self.drop(next(iter(self.held.values())).file)

    def drop(self, file: Path) -> None:
        """Forget the arrays of a file's key."""
        if held := self.held.pop(_slot(file), None):
            self.bytes -= held.size

    def clear(self) -> None:
        """Forget all arrays."""
        self.held.clear()
        self.bytes = 0

    def read(self, file: Path, origin: str) -> StateDict:
        """Return a file's arrays.

        If the file was written under other options, they may depend on data without noise: a PrivacyError.
        """
        held = self.held.get(_slot(file))
        if held and held[:2] == (file, stamp(file)):
            return dict(held.arrays)
        arrays, texts = read_with_texts(file)
        if texts.get(ORIGIN) != origin or texts.get(OF_RUN, file.parent.name) != file.parent.name:
            raise PrivacyError(
                f"a run's files are made by it, under its own options; {file.name} of run {file.parent.name!r} was "
                "made under others: begin a new run"
            )
        return arrays


class Held(NamedTuple):
    """The arrays of a file, and what the file was when they were written."""

    file: Path
    written: tuple[int, ...]
    size: int
    arrays: StateDict


def _slot(file: Path) -> str:
    return str(file).rpartition("-")[0]


_recent = RecentArrays()
on_forget(_recent.clear)


@remembered(maxsize=NODES)  # a process looks once
def _bind(folder: Path, bound: str, durable: bool) -> None:
    path = folder / OPTIONS
    if not there(path):
        private_folder(folder)
    before = write_once(path, bound, durable)
    if before != bound:
        raise PrivacyError(
            "a run keeps its options, since its files here may depend on data without noise; run "
            f"{folder.name!r} was begun with others ({differing(before, bound)}): begin a new run"
        )


KEY = "identity.key"


def proof_of(folder: Path, run: str, durable: bool = True) -> str:
    """Return an institution's proof for one run; of any other text, one that only this institution can make.

    Its key is made at first use in its state directory, `folder`; with `durable` it must outlive a loss of power. A
    proof has 64 hexadecimal digits. A damaged key, or one that others may read, is a PrivacyError.
    """
    path = folder / KEY
    key = write_once(path, secrets.token_hex(32), durable)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise PrivacyError(f"only its owner may read {KEY} in the state directory; others can: chmod 600 it")
    if not re.fullmatch("[0-9a-f]{64}", key):
        raise PrivacyError(f"{KEY} in the state directory must hold 64 hexadecimal digits; it does not: remove it")
    return hmac.digest(bytes.fromhex(key), run.encode(), "sha256").hex()
