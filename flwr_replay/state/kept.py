"""What an institution keeps in its state directory, with bytes; and how it removes what runs that are over have left.

Models, optimizer states, codes, latents and pictures of a run can go. What shows what has left, and what it has cost,
stays: the ledger with all its segments, each run's account, its options, its counted tests and the parcels that came.
Decoded images and features can go, too, as if they were a run's; those of simulations lie in the home folder.

An institution that leaves for good removes all of it, keys too; a receipt keeps what shows what has left.
"""

import hashlib
import shutil
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr_replay.data.decoded import FOLDER as DECODED
from flwr_replay.errors import RunError, nearest
from flwr_replay.files.atomic import new_folder, private_folder, read_bytes, sweep, write_atomic, write_json
from flwr_replay.files.disk import entries, files_below, looked, looked_below, writing
from flwr_replay.files.disk import remove as unlink
from flwr_replay.files.lines import segments
from flwr_replay.state.spent import FOLDER as SPENT
from flwr_replay.state.store import REMOVED, RUNS
from flwr_replay.wire.ledger import LEDGER
from flwr_replay.wire.recording import FOLDER

__all__ = ["DECODED", "KeptOfRun", "bytes_of", "kept", "ledger_bytes", "remove", "retire"]

GOES = (".safetensors", ".npy", ".png")
EVIDENCE = "evidence.*"  # as `flwr_replay.report.evidence_page` names it
RECEIPT = "receipt.json"  # of a state directory that was removed: what is kept beside it, and what is gone


@dataclass(frozen=True)
class KeptOfRun:
    """What an institution keeps of a run."""

    run: str  # its id
    bytes: int  # of all its files
    spare: list[Path]  # files that can go
    seconds: float  # since the last file was written
    removed: bool  # whether they were removed before; no message of the run is answered any more


def kept(state: Path) -> list[KeptOfRun]:
    """Look at the runs in an institution's state directory, the oldest first; another folder is a RunError."""
    if not (state / RUNS).is_dir() or not ((state / LEDGER).exists() or segments(state / LEDGER)[:-1]):
        if (state / DECODED).is_dir():  # the home folder
            return []
        advice = "give another"
        if (state / LEDGER).exists():
            advice = "it is of an older version: keep its ledger and every privacy.jsonl, and delete the rest by hand"
        raise RunError(
            f"an institution's state directory, as state/NAME, has {RUNS}/ and {LEDGER}; {state} has not: {advice}"
        )
    runs = []
    for folder in (folder for folder in (state / RUNS).iterdir() if folder.is_dir()):
        below = looked(files_below(folder, at_work=True))
        files = {file: status for file, status in below.items() if stat.S_ISREG(status.st_mode)}
        last = max(status.st_mtime for status in (folder.stat(), *files.values()))
        spare = [file for file in files if file.suffix in GOES]
        since, size = max(0.0, time.time() - last), sum(status.st_size for status in files.values())
        runs.append(KeptOfRun(folder.name, size, spare, since, (folder / REMOVED).exists()))
    return sorted(runs, key=lambda run: -run.seconds)


def bytes_of(files: Sequence[Path]) -> int:
    """Return the bytes of some files, of those that are still there."""
    return sum(status.st_size for status in looked(files).values())


def ledger_bytes(state: Path) -> tuple[int, int, int]:
    """Return the number of the ledger's segments and their bytes, and the bytes of recorded messages."""
    ledger = [segment for segment in segments(state / LEDGER) if segment.exists()]
    return len(ledger), bytes_of(ledger), bytes_of(list((state / FOLDER).glob("*")))


def remove(state: Path, runs: Sequence[str]) -> None:
    """Remove what runs have left that can go; from then on the institution answers no message of these runs.

    A run that is not there is an error before anything is removed.
    """
    names = [DECODED, *(of_run.run for of_run in kept(state))]
    for run in runs:
        if run not in names:
            raise RunError(f"--remove must be a run that {state} has; got {run!r}: {nearest(run, names)}")
    if DECODED in runs:
        sweep(state / DECODED)
        for file in (file for kind in ("*.json", "*.images") for file in entries(state / DECODED, kind)):
            unlink(file)
    for run in (run for run in runs if run != DECODED):
        write_atomic(state / RUNS / run / REMOVED, "")  # first: a run must not go on with half of its files
        sweep(state / RUNS / run)
        for file in files_below(state / RUNS / run, at_work=True):  # now: a message may have been answered meanwhile
            if file.suffix in GOES:
                unlink(file)


def retire(state: Path, receipt: Path) -> None:
    """Remove a state directory; a new folder keeps the ledger, evidence, and each run's account, options and counts.

    `receipt.json` in it has the SHA-256 of every file that is kept, and names every file that was removed, with its
    bytes. The receipt is whole before anything is removed. No process may work there meanwhile. Whoever joins again has
    new keys and an empty account.

    Raises
    ------
    RunError
        If `state` is no institution's state directory, or the receipt is there already, or in it.
    """
    runs = kept(state)
    if receipt.exists() or receipt.is_relative_to(state):
        raise RunError(f"a receipt is a new folder outside {state}; got {receipt}: give another")
    spare = {file for of_run in runs for file in of_run.spare}
    below = [file for file in files_below(state / RUNS, at_work=True) if file not in spare]
    below += entries(state / SPENT, "*.json")
    with new_folder(receipt) as new:
        sums = {}
        ledger = (segment for segment in segments(state / LEDGER) if segment.exists())
        for file in [*ledger, *sorted(state.glob(EVIDENCE)), *below]:
            name, content = file.relative_to(state), read_bytes(file)
            private_folder((new / name).parent)
            write_atomic(new / name, content)
            sums[name.as_posix()] = hashlib.sha256(content).hexdigest()
        gone = {file.relative_to(state).as_posix(): status.st_size for file, status in looked_below(state).items()}
        gone = {name: size for name, size in gone.items() if name not in sums}
        at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        write_json(new / RECEIPT, {"institution": state.name, "at": at, "kept": sums, "removed": gone}, indent=1)
    with writing(state):
        shutil.rmtree(state)
