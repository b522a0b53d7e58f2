"""An institution's account of what it has released in a run, on its disk, and the budget that ends its releases.

A charge is on the disk before a step is taken, so nothing can leave that was not charged. After a crash the steps are
taken again with fresh noise and are charged again: both may have been released. Resuming from a server's checkpoint
does not reset the account. The server has a file of the same name in its run: what institutions have stated
(`flwr_replay/runs/directory.py`). It sends the newest back, and an institution whose account says less refuses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from math import inf, isfinite
from pathlib import Path
from typing import Any

from flwr_replay.config.sections import NODES
from flwr_replay.errors import BudgetError, DamagedError
from flwr_replay.files.atomic import CHECKSUM, alone, checksum, private_folder, stamp, sync
from flwr_replay.files.disk import there
from flwr_replay.files.lines import add_line, read_lines
from flwr_replay.memory import remembered
from flwr_replay.privacy.accounting import LocalRelease, SampledGaussian, epsilon

__all__ = ["Account"]

CHARGES = "privacy.jsonl"
CHARGE = {"mechanism": str, "rate": int | float, "sigma": int | float, "steps": int, "noise": str}
LABELS = "label_epsilon"  # a key of local releases alone


class Account:
    """The charges of one institution in one run, over all of its mechanisms, and its budget.

    The budget is kept by Rényi DP, or exactly where every step takes all examples. Its bound stays true where steps and
    noise are chosen during the run, as a server does (Lécuyer 2021, arXiv 2103.01379). The PRV accountant's does where
    every step is the same: fewer of them are part of what all within the limit release. Without a limit, epsilon is
    that of steps that were chosen beforehand. Local releases have accounts of their own, which compose exactly.
    Runs on the same examples add up beyond the budget: `flwr_replay.state.spent` has their sum.

    Parameters
    ----------
    folder : Path
        Where the institution keeps what belongs to the run; made when it is first used.
    delta : float
        At which epsilon is stated, in (0, 1).
    limit : float
        Epsilon that no step may exceed; infinite: no limit.
    accountant : str
        rdp | prv: of an account without charges. They name it, and those that do not are by rdp.
    """

    def __init__(self, folder: Path, *, delta: float, limit: float = inf, accountant: str = "rdp") -> None:
        self.folder, self.delta, self.limit, self.accountant = folder, delta, limit, accountant

    def charge(self, mechanism: str, cost: SampledGaussian, noise: str = "secret") -> None:
        """Write down what is about to be released, and wait until it is on the disk.

        Parameters
        ----------
        mechanism : str
            What is trained under DP: generator, prior, encoder, classifier, …
        cost : SampledGaussian
            The steps to come.
        noise : str
            secret | seeded.

        Raises
        ------
        BudgetError
            If the budget does not allow all of these steps. Then nothing is charged, and no step may be taken.
        """
        with self._held() as book:
            self._check(book, mechanism, cost)
            book.add(mechanism, cost, noise, self.accountant, self.delta)

    def check(self, mechanism: str, cost: SampledGaussian, *beside: SampledGaussian) -> None:
        """Refuse, as `charge` does, what the budget does not allow, beside other costs; charge nothing."""
        self._check(self._read(), mechanism, cost, *beside)

    def _check(self, book: _Book, mechanism: str, cost: SampledGaussian, *beside: SampledGaussian) -> None:
        if self.limit < inf and (total := self._total(book, cost, *beside)) > self.limit:
            few = range(1, cost.steps)
            left = bisect_right(few, self.limit, key=lambda n: self._total(book, replace(cost, steps=n), *beside))
            raise BudgetError(
                f"the privacy budget is epsilon {self.limit:g} at delta {self.delta:.2g}; {cost.steps} steps of "
                f"{mechanism} would make {total:.2f}, {left} of them are left: end the training here, or begin a run "
                "with more noise or a larger privacy.epsilon"
            )

    def _total(self, book: _Book, *more: SampledGaussian) -> float:
        accountants = book.accountants | {self.accountant} if more else book.accountants
        return epsilon([*book.costs, *more], self.delta, "prv" if accountants == {"prv"} else "rdp")

    @property
    def spent(self) -> list[SampledGaussian]:
        """All that was charged."""
        return list(self._read().costs)

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """Mechanism of each charge, in order."""
        return tuple(self._read().mechanisms)

    @property
    def stated_epsilon(self) -> float | None:
        """Epsilon as an answer states it; None where some noise came from the run's seed."""
        known = self.epsilon()
        return known if isfinite(known) else None

    @property
    def charged_delta(self) -> float | None:
        """Delta of the newest charge; None of an older version's, and without charges."""
        return self._read().delta

    def epsilon(self, *more: SampledGaussian) -> float:
        """Return epsilon of all that was charged, and of more; infinite where some noise came from the run's seed."""
        book = self._read()
        return self._total(book, *more) if "seeded" not in book.noises else inf

    def _read(self) -> _Book:
        """Return the charges as they stand."""
        book = _book(self.folder)
        if book.current:
            return book
        with self._held() as book:
            return book

    @contextmanager
    def _held(self) -> Iterator[_Book]:
        """Read the charges and keep other processes from adding any meanwhile."""
        if not there(self.folder):
            private_folder(self.folder)
        with alone(self.folder, wait=True):
            book = _book(self.folder)
            book.read()
            yield book


class _Book:
    """The charges of one account as they stand in its file; the file is read again when others have written it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / CHARGES
        self.costs: list[SampledGaussian] = []
        self.mechanisms: list[str] = []
        self.noises: set[str] = set()
        self.accountants: set[str] = set()
        self.delta: float | None = None
        self.written: tuple[int, ...] = ()  # the file that these are from

    def read(self) -> None:
        """Read the file, unless nobody has written it since."""
        if not self.current:
            before = stamp(self.path)  # what is written meanwhile is read the next time
            charges = [self._whole(charge) for charge in read_lines(self.path, CHARGE)]
            self.costs = [_cost(charge) for charge in charges]
            self.mechanisms = [charge["mechanism"] for charge in charges]
            self.noises = {charge["noise"] for charge in charges}
            self.accountants = {charge.get("accountant", "rdp") for charge in charges}  # older ones name none
            self.delta = charges[-1].get("delta") if charges else None
            self.written = before

    @property
    def current(self) -> bool:
        """Say whether nobody else has written the file."""
        return stamp(self.path) == self.written

    def add(self, mechanism: str, cost: SampledGaussian, noise: str, accountant: str, delta: float) -> None:
        """Write a charge, and wait until it is on the disk."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        charge = {"time": now, "mechanism": mechanism, **asdict(cost), "noise": noise, "accountant": accountant}
        charge["delta"] = delta
        add_line(self.path, {**charge, CHECKSUM: checksum(charge)}, to_disk=True)
        self.costs.append(cost)
        self.mechanisms.append(mechanism)
        self.noises.add(noise)
        self.accountants.add(accountant)
        self.delta = delta
        self.written = stamp(self.path)
        _sync(self.path.parent, self.written[0])

    def _whole(self, charge: dict[str, Any]) -> dict[str, Any]:
        """Refuse a charge that is not as it was written: damage could make it smaller. Older ones have no checksum."""
        if charge.pop(CHECKSUM, None) not in (None, checksum(charge)):
            raise DamagedError(
                f"every line of {self.path} must be as it was written; that of {charge.get('time')} is damaged: "
                "restore the account's newest copy from a backup, or begin a new run"
            )
        return charge


def _cost(charge: Mapping[str, Any]) -> SampledGaussian:
    numbers = charge["rate"], charge["sigma"], charge["steps"]
    return LocalRelease(*numbers, charge[LABELS]) if LABELS in charge else SampledGaussian(*numbers)


_book = remembered(maxsize=NODES)(_Book)


@remembered(maxsize=NODES)  # entries on the disk stay there; a repaired file has another inode
def _sync(folder: Path, inode: int) -> None:
    """Flush a folder's entries and its own entry to the disk: flushing a new file does not."""
    for holder in (folder, folder.parent):
        sync(holder)
