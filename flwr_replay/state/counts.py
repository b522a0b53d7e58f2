"""The counts that have left an institution in all runs: two of them can be subtracted."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from flwr.app import Array, RecordDict

from flwr_replay.errors import PrivacyError, RefusedError, TrainingError, WireError
from flwr_replay.files.atomic import alone, private_folder, read_json, sync, write_json
from flwr_replay.files.disk import looked
from flwr_replay.files.lines import add_line, read_lines
from flwr_replay.state.store import REMOVED, RUNS

__all__ = ["FILE", "KEPT", "ROOM", "ReleasedCounts"]

FILE = "counts.jsonl"  # in the state directory: a line each, on the disk before what it says leaves
ROOM = "room"  # a run's file: what it may ask for
KEPT = 1800  # seconds after a run's last message for which no other run gets that


class ReleasedCounts:
    """The counts that have left in all runs, in a file of the state directory.

    Two answers can be subtracted, and the noise of many averages out. So a number of training examples is one that has
    left before, or differs from each such by the floor at least; only so many tests are answered as the policy says, in
    all runs together, and sums with noise leave in so many runs. Who asks for the same test again gets the same answer.
    `least` is the floor, `most` how many tests.
    """

    def __init__(self, state: Path, least: int, most: int) -> None:
        self.file, self.least, self.most = state / FILE, least, most

    def _refused(self, why: str) -> RefusedError:
        return RefusedError(f"policy lets no count below {self.least} leave (min-count); {why}")

    def check_total(self, n: int) -> None:
        """Refuse a number of training examples from which, with an earlier one, that of few follows."""
        with self._held() as lines:
            totals = [line["total"] for line in lines if "total" in line]
            if any(0 < abs(n - total) < self.least for total in totals):
                raise self._refused(
                    "it has some training examples more or fewer than before, which both numbers would tell: take part "
                    "with those of before, or when more have changed",
                )
            if n not in totals:
                self._write({"total": n})

    def check_room(self, tests: int, sums: bool, own: Path | None = None) -> None:
        """Refuse a run that would ask for more tests, or sums with noise, than other runs have left.

        What it may ask for is kept for it in its folder `own`, so that of two runs at the same time the second is
        refused; without a folder, nothing is.
        """
        run = own.name if own else ""
        with self._held() as lines:
            made = Counter(line["run"] for line in lines if "test" in line and line["run"] != run)
            summed = {line["sums"] for line in lines if "sums" in line}
            for with_others in (False, True):
                if tests and made.total() + tests > self.most:
                    raise self._used_up("tests can be subtracted", with_others)
                if sums:
                    self._check_sums(run, summed, with_others)
                for other, asked in self._kept(run):
                    made[other] = max(made[other], asked["tests"])
                    summed |= {other} if asked["sums"] else set()
            if own:
                write_json(private_folder(own) / ROOM, {"tests": tests, "sums": sums})

    def _kept(self, run: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the other runs that go on, and what they may ask for."""
        for file, status in looked(self.file.parent.glob(f"{RUNS}/*/{ROOM}")).items():
            over = time.time() - status.st_mtime > KEPT or (file.parent / REMOVED).exists()
            if file.parent.name != run and not over:
                yield file.parent.name, read_json(file, {"tests": int, "sums": bool})

    def goes_on(self, own: Path) -> None:
        """Keep for longer what a run may ask for."""
        with suppress(FileNotFoundError):
            os.utime(own / ROOM)

    def sums(self, run: str) -> None:
        """Count that sums with noise leave in a run."""
        with self._held() as lines:
            if self._check_sums(run, {line["sums"] for line in lines if "sums" in line}):
                self._write({"sums": run})

    def _check_sums(self, run: str, summed: set[str], with_others: bool = False) -> bool:
        """Say whether these are the run's first sums; refuse those of more runs than may have some."""
        if run not in summed and len(summed) >= self.most:
            raise self._used_up("the noise of many sums averages out", with_others)
        return run not in summed

    def _used_up(self, why: str, with_others: bool = False) -> RefusedError:
        how = "they are used up: leave them out, or ask the institution to change its policy file"
        if with_others:
            how = f"another run may still ask for them: wait until it ends, or is silent for {KEPT // 60} min"
        return self._refused(f"{why}, so of all runs together {self.most:,} may leave (max-evaluations); {how}")

    def tested(self, run: str, request: RecordDict, test: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the answer to a test, or raise its refusal again: it is counted before it is made.

        One whose result was not written down, as when a process was killed, is made again: nothing has left of it.
        """
        asked = _digest(request)
        with self._held() as lines:
            made = [line["test"] for line in lines if "test" in line]
            if asked not in made and len(made) >= self.most:
                raise self._used_up("tests can be subtracted")
            if asked not in made:
                self._write({"test": asked, "run": run})
            line = next((line for line in lines if line.get("of") == asked), None)
        if not line:
            try:
                line = {"of": asked, "answer": test()}
            except (PrivacyError, RefusedError, TrainingError, WireError) as error:  # their lines leave
                line = {"of": asked, "refused": str(error)}
            with self._held() as lines:  # where two make it, the first one's leaves
                earlier = next((line for line in lines if line.get("of") == asked), None)
                if not earlier:
                    self._write(line)
            line = earlier or line
        if "refused" in line:
            raise RefusedError(line["refused"])
        return dict(line["answer"])

    @contextmanager
    def _held(self) -> Iterator[list[dict[str, Any]]]:
        """Keep other processes from the file; yield its lines."""
        with alone(self.file.parent, wait=True):
            yield read_lines(self.file)

    def _write(self, line: dict[str, Any]) -> None:
        """Add a line, and wait until it is on the disk."""
        add_line(self.file, line, to_disk=True)
        sync(self.file.parent)  # the entry of a new file


def _digest(request: RecordDict) -> str:
    """Return the SHA-256 of all that a request says."""
    whole = sha256()
    for name, record in sorted(request.items()):
        for key, value in sorted(record.items()):
            content = (value.shape, value.dtype, sha256(value.data).digest()) if isinstance(value, Array) else value
            whole.update(repr((name, key, content)).encode())
    return whole.hexdigest()
