"""What an institution keeps in its state directory, with bytes; and how it removes what runs that are over have left.

Models, optimizer states, codes, latents and pictures of a run can go. What shows what has left, and what it has cost,
stays: the ledger with all its segments, each run's account, its options, its counted tests and the parcels that came.
Decoded images and features can go, too, as if they were a run's; those of simulations lie in the home folder.

An institution that leaves for good removes all of it, keys too; a receipt keeps what shows what has left. So it does
with a clinic's folder, and with the home folder, where simulations keep their institutions. A coordinator's folder goes
the same way (`flwr_replay/deploy/coordinator.py`).
"""

import hashlib
import os
import shutil
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr_replay.data.decoded import FOLDER as DECODED
from flwr_replay.errors import RunError, nearest
from flwr_replay.files.atomic import home, new_folder, private_folder, read_bytes, sweep, write_atomic, write_json
from flwr_replay.files.disk import entries, files_below, looked, looked_below, writing
from flwr_replay.files.disk import remove as unlink
from flwr_replay.files.lines import segments
from flwr_replay.state.spent import FOLDER as SPENT
from flwr_replay.state.store import KEY, OPTIONS, REMOVED, RUNS
from flwr_replay.wire.ledger import BEGUN, LEDGER
from flwr_replay.wire.recording import FOLDER

__all__ = ["DECODED", "KeptOfRun", "bytes_of", "kept", "leaving", "ledger_bytes", "remove", "retire"]

GOES = (".safetensors", ".npy", ".png")
EVIDENCE = "evidence.*"  # as `flwr_replay.report.evidence_page` names it
RECEIPT = "receipt.json"  # of what was removed: what is kept beside it, and what is gone
OLDER = ("flower", "supernode.pid")  # in a clinic's folder of an older version, what is now in its state
OF_CLINIC = ("state", "key", "seal.key", *OLDER)  # what goes of a clinic's folder
BARE = {LEDGER, BEGUN, KEY, "privacy.key", "seal.key", ".lock"}  # what a state has at most if it has refused all
OF_HOME = ("state", DECODED)
OF_DECODED = (".json", ".images", ".tmp")


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
        if state.resolve() == home().resolve():
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


def leaving(place: Path) -> tuple[list[Path], list[Path]]:
    """Return what of a folder `retire` removes, and the files in that which it keeps: ledgers, evidence and accounts.

    The folder is a state directory, a clinic's folder, the home folder, or its `state` or `state/simulation`.

    Raises
    ------
    RunError
        If it is none of these; if a state, or what lies in it, is a link; if files are there that are none of ours.
    """
    root, here, env = home().resolve(), place.resolve(), place / "clinic.env"
    clinic = env.is_file() and all(key in read_bytes(env) for key in (b"NAME=", b"ADDRESS=", b"VERSIONS="))
    alone = not clinic and here not in (root, root / "state", root / "state" / "simulation")
    names = OF_CLINIC if clinic else OF_HOME if here == root else ("",)
    going = [place / name for name in names if os.path.lexists(place / name)]
    if not going and not alone:
        raise RunError(f"{place} has none of {', '.join(names)}: there is nothing to remove")
    folders = [top for top in going if top.is_dir()]
    inside = [path for top in folders for path in (*entries(top), *entries(top / "simulation"))]
    marks = LEDGER, KEY, f"{RUNS}/*/{OPTIONS}"  # a folder `runs` alone may be anyone's
    marked = [path for path in inside if any(any(path.glob(mark)) for mark in marks)]
    states = [place] if alone else marked
    for state in states:
        own = {path.name for path in entries(state)}
        refused_all = LEDGER in own and own <= BARE
        if not refused_all and (alone or (LEDGER in own and RUNS not in own)):
            kept(state)  # which refuses another folder, and an older version's
    if linked := [
        path for path in (*going, *inside, *(path for at in states for path in entries(at))) if path.is_symlink()
    ]:
        raise RunError(f"no link is followed; {linked[0]} is one: put what it points to in its place, or remove it")
    ours = {*states, *(place / name for name in ("state/.flower", "state/supernode.pid", *OLDER) * clinic)}
    for file in [] if alone else [file for top in folders for file in files_below(top)]:
        decoded = file.parent.name == DECODED and file.suffix in OF_DECODED
        if ours.isdisjoint((file, *file.parents)) and not decoded:
            raise RunError(f"no other files are removed; {file} is not flwr-replay's: move it away")
    staying = list[Path]()
    for state in states:
        runs = files_below(state / RUNS) if (state / RUNS).exists() else []
        below = [*(file for file in runs if file.suffix not in GOES), *entries(state / SPENT, "*.json")]
        staying += [*segments(state / LEDGER), *state.glob(EVIDENCE), *below]
    return going, staying


def retire(place: Path, receipt: Path, look: Callable[[Path], tuple[list[Path], list[Path]]] = leaving) -> None:
    """Remove what `look` says that goes of a folder; a new folder keeps the files that it says shall be kept.

    `receipt.json` in it has the SHA-256 of every file that is kept, and names every file that was removed, with its
    bytes. The receipt is whole before anything is removed. No process may work there meanwhile. Whoever joins again has
    new keys and an empty account. A link is no file, nor is one kept.

    Raises
    ------
    RunError
        As `look` does; or if the receipt is there already, or in what is removed.
    """
    going, staying = look(place)
    if receipt.exists() or any(receipt.resolve().is_relative_to(top.resolve()) for top in going):
        raise RunError(f"a receipt is a new folder outside {place}; got {receipt}: give another")
    with new_folder(receipt) as new:
        sums = {}
        for file in (file for file in staying if file.exists() and not file.is_symlink()):
            name, content = file.relative_to(place), read_bytes(file)
            private_folder((new / name).parent)
            write_atomic(new / name, content)
            sums[name.as_posix()] = hashlib.sha256(content).hexdigest()
        files = looked([*going, *(file for top in going for file in looked_below(top))])
        gone = {
            path.relative_to(place).as_posix(): at.st_size for path, at in files.items() if stat.S_ISREG(at.st_mode)
        }
        gone = {name: size for name, size in gone.items() if name not in sums}
        at = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        private_folder(new)
        left = [path.name for path in entries(place) if not {path, place} & {*going}]
        told = {"folder": place.name, "at": at, "kept": sums, "removed": gone, "left": left}
        write_json(new / RECEIPT, told, indent=1)
    for top in going:
        with writing(top):
            (shutil.rmtree if top.is_dir() else os.unlink)(top)
