"""The counts that have left an institution in all runs: two of them can be subtracted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from flwr.app import Array, RecordDict

from flwr_replay.errors import PrivacyError, RefusedError, TrainingError, WireError
from flwr_replay.files.atomic import alone, sync
from flwr_replay.files.lines import add_line, read_lines

__all__ = ["FILE", "Released"]

FILE = "counts.jsonl"  # in the state directory: a line each, on the disk before what it says leaves


class Released:
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

    def check_room(self, run: str, tests: int, sums: bool) -> None:
        """Refuse a run that would ask for more tests, or sums with noise, than other runs have left."""
        with self._held() as lines:
            made = [line for line in lines if "test" in line and line["run"] != run]
            if tests and len(made) + tests > self.most:
                raise self._used_up("tests can be subtracted")
            if sums:
                self._check_sums(run, lines)

    def sums(self, run: str) -> None:
        """Count that sums with noise leave in a run."""
        with self._held() as lines:
            if self._check_sums(run, lines):
                self._write({"sums": run})

    def _check_sums(self, run: str, lines: list[dict[str, Any]]) -> bool:
        """Say whether these are the run's first sums; refuse those of more runs than may have some."""
        summed = {line["sums"] for line in lines if "sums" in line}
        if run not in summed and len(summed) >= self.most:
            raise self._used_up("the noise of many sums averages out")
        return run not in summed

    def _used_up(self, why: str) -> RefusedError:
        return self._refused(
            f"{why}, so of all runs together {self.most:,} may leave (max-evaluations); they are used up: leave them "
            "out, or ask the institution to change its policy file"
        )

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
            found = next((line for line in lines if line.get("of") == asked), None)
        if not found:
            try:
                found = {"of": asked, "answer": test()}
            except (PrivacyError, RefusedError, TrainingError, WireError) as error:  # their lines leave
                found = {"of": asked, "refused": str(error)}
            with self._held() as lines:  # where two make it, the first one's leaves
                earlier = next((line for line in lines if line.get("of") == asked), None)
                if not earlier:
                    self._write(found)
            found = earlier or found
        if "refused" in found:
            raise RefusedError(found["refused"])
        return dict(found["answer"])

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
            said = (value.shape, value.dtype, sha256(value.data).digest()) if isinstance(value, Array) else value
            whole.update(repr((name, key, said)).encode())
    return whole.hexdigest()
