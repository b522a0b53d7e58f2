"""The runs in a folder: which there are, how far they are, what they take on the disk, what of that can go."""

import hashlib
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from flwr_replay.errors import RunError
from flwr_replay.files.atomic import alone, in_use, read_bytes
from flwr_replay.files.disk import looked_below, there
from flwr_replay.report.progress import shown_metrics, shown_time
from flwr_replay.report.run_files import CONFIG, METRICS, RESULT, check_grown, mark_of, read_result, rows_of
from flwr_replay.runs.opening import ENDED

__all__ = ["SPARE", "Listed", "clean", "listed", "newest_in", "runs_in", "same_bits", "spare", "watch"]

SPARE = ("checkpoints", "latents", "shared", "mailbox", "messages", "replay")  # a finished run's result needs none
EVERY = 1.0  # seconds between two looks at a live run
QUIET = 60.0  # seconds without news after which somebody must work on it


@dataclass(frozen=True)
class Listed:
    """A run directory at a glance."""

    folder: Path
    result: dict[str, Any] | None  # None: the run has not finished
    seconds: float  # since it was last written
    bytes: int

    @property
    def state(self) -> str:
        """Say whether it has finished, or when it was last written, and why it ended if it has said so."""
        if self.result:
            return "finished"
        ended = self.folder / ENDED
        why = f": {ended.read_text(errors='replace').strip()}" if ended.is_file() else ""
        return f"not finished, last written {shown_time(self.seconds)} ago{why}"

    @property
    def metric(self) -> str:
        """Its main metric, with its name."""
        result = self.result
        return f"{result['metric']} {result['final']['global'][result['metric']]:.4f}" if result else ""


class Ended(NamedTuple):
    """An exchange that has ended in a run that is watched."""

    exchange: int
    metrics: dict[str, float]  # the pooled ones; none if nobody evaluated after it
    seconds: float  # since the run began

    def __str__(self) -> str:
        return f"exchange {self.exchange}  {shown_metrics(self.metrics)}  elapsed {shown_time(self.seconds)}"


def runs_in(root: Path) -> list[Path]:
    """Return the run directories in a folder and its comparisons, what was worked on last at the end, or a RunError."""
    folders = [file.parent for pattern in ("*", "*/*") for file in root.glob(f"{pattern}/config.yaml")]
    if not folders:
        raise RunError(f"{root} must be a folder with run directories; it has none")
    return sorted(folders, key=_worked_on)


def _worked_on(folder: Path) -> float:
    """Return when a run last began, tested or ended, resumed or not: a page written again is no work on it."""
    files = (folder / name for name in (CONFIG, METRICS, RESULT, ENDED))
    return max(file.stat().st_mtime for file in files if file.is_file())


def newest_in(root: Path, comparisons: bool) -> Path:
    """Return the run that was worked on last, or the comparison that ended later and is not one of a run's.

    Raises
    ------
    RunError
        If there is none, or it is a comparison and these are not wanted.
    """
    last = runs_in(root)[-1]
    ended = max(root.glob("*/*/compare.json"), key=lambda file: file.stat().st_mtime, default=None)
    if ended is None or ended.stat().st_mtime < _worked_on(last):
        return last
    if not comparisons:
        raise RunError(f"last is a comparison, {ended.parent}: give one of its runs, such as {last}")
    return ended.parent


def same_bits(folders: Sequence[Path]) -> str:
    """Say whether finished runs have identical metrics of all rounds, and identical final global weights.

    Parameters
    ----------
    folders : sequence of Path
        Run directories, at least two.
    """
    verdicts = []
    for name, file in (("metrics", METRICS), ("final global weights", "models/global.safetensors")):
        if not all(there(folder / file) for folder in folders):
            verdicts.append(f"{name}: not in every run")
            continue
        for folder in folders:
            check_grown(folder, file)
        digests = {hashlib.sha256(read_bytes(folder / file)).digest() for folder in folders}
        verdicts.append(f"{name}: {'identical' if len(digests) == 1 else 'different'}")
    return "; ".join(verdicts)


def listed(folder: Path) -> Listed:
    """Look at a run directory; a RunError if it is none, or its result is damaged."""
    if not there(folder / CONFIG):
        raise RunError(f"a run directory has a config.yaml; {folder} has none: `flwr-replay runs list` names the runs")
    statuses = looked_below(folder).values()  # a live run replaces files and deletes old checkpoints
    files = [status for status in statuses if stat.S_ISREG(status.st_mode)]
    last = max(status.st_mtime for status in files)
    mark_of(folder)
    result = read_result(folder) if there(folder / RESULT) else None
    return Listed(folder, result, max(0.0, time.time() - last), sum(status.st_size for status in files))


def spare(folders: Sequence[Path]) -> list[tuple[Path, int]]:
    """Return what finished runs no longer need, each folder with its bytes; a comparison's folder means all its runs.

    Raises
    ------
    RunError
        If there is no run, or one has not finished.
    """
    unneeded = []
    for root in folders:
        for folder in [root] if (root / "config.yaml").exists() or not root.is_dir() else runs_in(root):
            if listed(folder).result is None:
                raise RunError(
                    f"only finished runs are cleaned; {folder} has no result.json: resume it, or delete it yourself"
                )
            for place in (
                folder / name for name in SPARE if (folder / name).is_dir() and not (folder / name).is_symlink()
            ):
                unneeded.append((place, sum(status.st_size for status in looked_below(place).values())))
    return unneeded


def clean(folders: Sequence[Path]) -> None:
    """Delete what `spare` finds. Metrics, ledger, result, page and models stay; no run can be made longer then.

    Raises
    ------
    RunError
        If `spare` refuses, before anything is deleted, or a process works in a run.
    """
    for place, _ in spare(folders):
        with alone(place.parent), suppress(FileNotFoundError):  # another process may have deleted it
            shutil.rmtree(place)


def watch(folder: Path, wait: bool = True) -> Iterator[Ended]:
    """Yield every exchange of a run that another process works on, from the first to the last.

    Parameters
    ----------
    folder : Path
        The run directory.
    wait : bool
        Go on until the run has finished; else end with what there is.

    Raises
    ------
    RunError
        If it is no run, or it has not finished and no process works on it.
    """
    from flwr_replay.report.metrics import without_beside  # late, as PyTorch is: a list needs neither
    from flwr_replay.report.summary import confusion_of

    listed(folder)  # refuses what is no run
    seen, news = 0, -inf
    while True:
        finished = (folder / "result.json").exists()
        times = rows_of(folder, "timings.jsonl")
        if len(times) > seen:
            news, tested, confusion = time.monotonic(), _pooled(folder), confusion_of(folder)
            for at in times[seen:]:
                last = max((exchange for exchange in tested if exchange <= at["round"]), default=0)
                yield Ended(at["round"], without_beside(tested.get(last, {}), confusion), at["seconds"])
        seen = len(times)
        if finished or not wait:
            return
        if time.monotonic() - news > QUIET:
            if not in_use(folder) and listed(folder).seconds > QUIET and not (folder / "result.json").exists():
                raise RunError(
                    f"a run that is watched must have a process; nobody works on {folder} any more: go on by the same "
                    "command with --resume, in a deployment by run.sh with resume"
                )
            news = time.monotonic()
        time.sleep(EVERY)


def _pooled(folder: Path) -> dict[int, dict[str, float]]:
    """Return the metrics over all institutions by exchange."""
    by_exchange: dict[int, dict[str, float]] = {}
    for row in rows_of(folder, METRICS):
        if row["institution"] == "":
            by_exchange.setdefault(row["exchange"], {})[row["metric"]] = row["value"]
    return by_exchange
