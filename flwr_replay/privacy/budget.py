"""What an institution has released in a run, on its disk, and the budget that stops it.

A charge is on the disk before a step is taken, so nothing can leave that was not charged. After a crash the steps are
taken again with fresh noise and are charged again: both may have been released. A checkpoint of the server does not
turn the account back.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

from flwr_replay.errors import BudgetError
from flwr_replay.files import Lines, alone, read_lines
from flwr_replay.privacy.accounting import SampledGaussian, epsilon

__all__ = ["Account"]

CHARGES = "privacy.jsonl"


class Account:
    """The charges of one institution in one run, over all of its mechanisms, and its budget.

    The budget is kept by Rényi DP, which stays true where steps and noise are chosen while the run goes on (Lécuyer
    2021, arXiv 2103.01379), as a server does; without a limit, epsilon is that of steps that were chosen beforehand.
    Runs on the same examples add up beyond it: `Account(...).spent` of all their folders together.

    Parameters
    ----------
    folder : Path
        Where the institution keeps what belongs to the run; made when it is first used.
    delta : float
        At which epsilon is told, in (0, 1).
    limit : float
        Epsilon that no step may exceed; infinite: no limit.
    """

    def __init__(self, folder: Path, *, delta: float, limit: float = inf) -> None:
        self.folder, self.delta, self.limit = folder, delta, limit

    def charge(self, mechanism: str, cost: SampledGaussian, noise: str = "secret") -> None:
        """Write down what is about to be released, and wait until it is on the disk.

        Parameters
        ----------
        mechanism : str
            What is made private: generator, prior, encoder, classifier, …
        cost : SampledGaussian
            The steps to come.
        noise : str
            secret | seeded.

        Raises
        ------
        BudgetError
            If the budget does not allow all of these steps. Nothing is charged then, and none may be taken.
        """
        with self._held() as charges:
            spent = _costs(charges)
            if self.limit < inf and (total := epsilon([*spent, cost], self.delta)) > self.limit:
                raise BudgetError(
                    f"the privacy budget is epsilon {self.limit:g} at delta {self.delta:.2g}; {cost.steps} steps of "
                    f"{mechanism} would make {total:.2f}, {self._affordable(spent, cost)} of them are left: end the "
                    "training here, or begin a run with more noise or a larger privacy.epsilon"
                )
            now = datetime.now(UTC).isoformat(timespec="seconds")
            lines = Lines(self.folder / CHARGES)
            lines.append([{"time": now, "mechanism": mechanism, **asdict(cost), "noise": noise}])
            lines.flush(to_disk=True)
            lines.close()
            _sync(self.folder, (self.folder / CHARGES).stat().st_ino)

    def affordable(self, cost: SampledGaussian) -> int:
        """Return how many of these steps the budget still allows."""
        return self._affordable(self.spent, cost)

    def _affordable(self, spent: list[SampledGaussian], cost: SampledGaussian) -> int:
        low, high = 0, cost.steps + 1  # low steps are allowed, high are too many
        while high - low > 1:
            middle = (low + high) // 2
            within = epsilon([*spent, replace(cost, steps=middle)], self.delta) <= self.limit
            low, high = (middle, high) if within else (low, middle)
        return low

    @property
    def spent(self) -> list[SampledGaussian]:
        """All that was charged."""
        with self._held() as charges:
            return _costs(charges)

    def epsilon(self, accountant: str = "rdp") -> float:
        """Return epsilon of all that was charged; infinite where some noise came from the run's seed."""
        with self._held() as charges:
            protected = all(charge["noise"] == "secret" for charge in charges)
        return epsilon(_costs(charges), self.delta, accountant) if protected else inf

    @contextmanager
    def _held(self) -> Iterator[list[dict[str, Any]]]:
        """Read the charges and keep other processes from adding any meanwhile."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with alone(self.folder, wait=True):
            yield read_lines(self.folder / CHARGES)


def _costs(charges: list[dict[str, Any]]) -> list[SampledGaussian]:
    return [SampledGaussian(charge["rate"], charge["sigma"], charge["steps"]) for charge in charges]


@lru_cache(maxsize=1024)  # entries that are on the disk stay there; a file that was mended is another one
def _sync(folder: Path, inode: int) -> None:
    """Put the entries of a folder, and its own, on the disk: a new file's own flush does not."""
    if os.name == "posix":
        for holder in (folder, folder.parent):
            entry = os.open(holder, os.O_RDONLY)
            os.fsync(entry)
            os.close(entry)
