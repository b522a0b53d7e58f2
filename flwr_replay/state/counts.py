"""The counts that have left an institution in all runs: two of them can be subtracted."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from flwr.app import Array, RecordDict

from flwr_replay.errors import RefusedError
from flwr_replay.files.disk import locked, opener, writing

__all__ = ["FILE", "Released"]

FILE = "counts.jsonl"  # in the state directory: a line each


class Released:
    """The counts that have left in all runs, in a file of the state directory.

    Two answers can be subtracted. So a number of training examples is one that has left before, or differs from each
    such by the floor at least; and only so many tests are answered as the policy says, in all runs together. Who asks
    for the same test again gets the same answer. `least` is the floor, `tests` how many are answered.
    """

    def __init__(self, state: Path, least: int, tests: int) -> None:
        self.file, self.least, self.tests = state / FILE, least, tests

    def _refused(self, why: str) -> RefusedError:
        return RefusedError(f"policy lets no count below {self.least} leave (min-count); {why}")

    def check_total(self, n: int) -> None:
        """Refuse a number of training examples from which, with an earlier one, that of few follows."""
        with self._lines() as (lines, write):
            totals = [line["total"] for line in lines if "total" in line]
            if any(0 < abs(n - total) < self.least for total in totals):
                raise self._refused(
                    "it has some training examples more or fewer than before, which both numbers would tell: take part "
                    "with those of before, or when more have changed",
                )
            if n not in totals:
                write({"total": n})

    def tested(self, request: RecordDict, test: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the answer to a test, which is counted before it is made, and made once."""
        asked, most = _digest(request), self.tests
        with self._lines() as (lines, write):
            if answers := [line["answer"] for line in lines if line.get("of") == asked]:
                return dict(answers[0])
            made = [line["test"] for line in lines if "test" in line]
            if asked in made or len(made) >= most:
                raise self._refused(
                    f"tests can be subtracted, so of all runs together {most:,} may leave (max-evaluations); they are "
                    "used up: leave tests out, or ask the institution to change its policy file",
                )
            write({"test": asked})
        answer = test()
        with self._lines() as (_, write):
            write({"of": asked, "answer": answer})
        return answer

    @contextmanager
    def _lines(self) -> Iterator[tuple[list[dict[str, Any]], Callable[[Mapping[str, Any]], None]]]:
        """Hold the file alone; yield its lines, and what adds one."""
        with writing(self.file):
            file = open(self.file, "a+b", 0, opener=opener())  # noqa: SIM115 - closed below
        with file, locked(file):
            file.seek(0)
            lines = [json.loads(line) for line in file]  # a line that a full disk cut off is an error: nothing leaves

            def write(line: Mapping[str, Any]) -> None:
                file.write(json.dumps(line).encode() + b"\n")
                os.fsync(file.fileno())

            yield lines, write


def _digest(request: RecordDict) -> str:
    """Return the SHA-256 of all that a request says."""
    whole = sha256()
    for name, record in sorted(request.items()):
        for key, value in sorted(record.items()):
            said = (value.shape, value.dtype, sha256(value.data).digest()) if isinstance(value, Array) else value
            whole.update(repr((name, key, said)).encode())
    return whole.hexdigest()
