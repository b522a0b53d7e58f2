"""What an institution has spent in all runs: on the same examples their epsilons and deltas add up.

    spent/RUN.json    in the state directory: what a run has spent, and the budget that is kept for it

Runs whose accounts state (ε, δ) are together (Σε, Σδ)-differentially private: basic composition. Under one lock the sum
is checked, the account is charged, and the file is written. The file lies beside the runs' folders: a run that is
removed, or an account that is lost, frees nothing. What an account has beyond its file, of an older version or after a
crash, is read from it. An older copy of the state directory has an older sum, which nothing here can notice.

Epsilons of rows of single patients are added as they stand, though their neighbours are others. Metrics of tests,
counts, and what left without differential privacy have no epsilon: they are not in the sum.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from math import fsum, inf
from pathlib import Path
from typing import NamedTuple

from flwr_replay.errors import PrivacyError, RefusedError
from flwr_replay.files.atomic import NAME, alone, private_folder, read_json, write_json
from flwr_replay.files.disk import entries, there
from flwr_replay.privacy.account import CHARGES, Account
from flwr_replay.privacy.accounting import LocalRelease, SampledGaussian, epsilon, rounded_up
from flwr_replay.state.counts import KEPT
from flwr_replay.state.store import REMOVED, RUNS

__all__ = ["AllRuns", "SpentByRun"]

FOLDER = "spent"  # in the state directory
DELTA = 1e-5  # of accounts that name none, all together; or a tenth of what all runs may have
ROUNDING = 1e-6  # by which epsilon may differ between versions of a library
NUMBER = int | float
FORM = {"epsilon": NUMBER, "delta": NUMBER, "charges": int, "budget": NUMBER}


class SpentByRun(NamedTuple):
    """What a run has spent at which delta, by how many charges, and the budget that is kept for it."""

    epsilon: float
    delta: float
    charges: int
    budget: float


class AllRuns:
    """The sum over all runs in a state directory; `most` is the largest epsilon, `most_delta` the largest delta."""

    def __init__(self, state: Path, most: float = inf, most_delta: float = inf) -> None:
        self.state, self.most, self.most_delta = state, most, most_delta

    def read(self) -> dict[str, SpentByRun]:
        """Return by run what it has spent; of older accounts at a small delta, as any may be chosen afterwards."""
        known, by_run = self._written(), defaultdict[str, list[Account]](list)
        for account in self._accounts(DELTA):  # an older run may have had the name of a newer one
            by_run[account.folder.name].append(account)
        older = sum(account.charged_delta is None for accounts in by_run.values() for account in accounts)
        for run, accounts in by_run.items():
            own = known.get(run, SpentByRun(0.0, 0.0, 0, 0.0))
            if (charges := sum(len(account.mechanisms) for account in accounts)) > own.charges:
                for account in accounts:
                    account.delta = account.charged_delta or min(DELTA, self.most_delta / 10) / older
                spent = fsum(account.epsilon() for account in accounts)
                known[run] = SpentByRun(spent, fsum(account.delta for account in accounts), charges, own.budget)
        return known

    def local(self, more: LocalRelease, delta: float) -> float:
        """Return epsilon of the local releases of all runs, and of one more; they compose exactly."""
        spent = [cost for account in self._accounts(delta) for cost in account.spent]
        return epsilon([*(cost for cost in spent if isinstance(cost, LocalRelease)), more], delta)

    def check(self, budget: float, delta: float) -> None:
        """Refuse a new run with a budget and a delta for which there is no room."""
        self._check(self.read(), "", budget, delta)

    def reserve(self, run: str, budget: float, delta: float) -> None:
        """Keep a run's whole budget for it, from its roll call on and while it goes on; refuse as `check`."""
        with self._held() as known:
            own = known.get(run, SpentByRun(0.0, delta, 0, budget))
            self._check(known, run, max(budget, own.epsilon), delta)
            self._write(run, own._replace(budget=budget))

    def goes_on(self, run: str) -> None:
        """Keep a run's budget for longer."""
        with suppress(FileNotFoundError):
            os.utime(self._file(run))

    def charge(
        self, account: Account, mechanism: str, cost: SampledGaussian, noise: str = "secret", stated: float = 0.0
    ) -> None:
        """Charge a run's account, as `Account.charge`, if all runs together may have that much.

        Raises
        ------
        RefusedError
            If they may not. Then nothing is charged.
        PrivacyError
            If the account says less than the institution has `stated`, or lacks charges.
        """
        counted = self.most < inf or there(self._file(account.folder.name))  # a lost account is seen without a sum, too
        with self._held() if counted else nullcontext(dict[str, SpentByRun]()) as known:
            run, states, charges = account.folder.name, account.epsilon(), len(account.mechanisms)
            own = known.get(run, SpentByRun(0.0, account.delta, 0, 0.0))
            if states < (1 - ROUNDING) * stated or charges < own.charges:
                raise PrivacyError(
                    f"a privacy account never states less than before; this institution has stated epsilon "
                    f"{max(stated, own.epsilon):.4g}, its account of run {run!r} states {states:.4g}, so it is missing "
                    "or an older copy and lacks later releases: restore the newest copy, or begin a new run"
                )
            if counted:
                account.check(mechanism, cost)
                own = own._replace(epsilon=account.epsilon(cost), delta=account.delta, charges=charges + 1)
                self._check(known, run, own.epsilon, own.delta)
            account.charge(mechanism, cost, noise)
            if counted:
                self._write(run, own)

    def sentence(self) -> str:
        """Say what all runs have spent, and what they may."""
        spent = [of for of in self.read().values() if of.epsilon]
        total, delta = fsum(of.epsilon for of in spent), fsum(of.delta for of in spent)
        allowed = f", of {self.most:g} and {rounded_up(self.most_delta, 2)} (max-total-epsilon)"
        return (
            f"all runs together, {len(spent)} of them with an epsilon: epsilon {rounded_up(total)} and delta "
            f"{rounded_up(delta, 2)}{allowed if self.most < inf else ''}"
        )

    def _check(self, known: Mapping[str, SpentByRun], run: str, asked: float, delta: float) -> None:
        """Refuse, beside the other runs, the epsilon that one asks for, or its delta."""
        going = {name for name, of in known.items() if of.budget and self._going(name)}
        others = [(name, of) for name, of in known.items() if name != run and (of.epsilon or name in going)]
        spent = fsum(of.epsilon for _, of in others)
        kept = fsum(max(0.0, of.budget - of.epsilon) for name, of in others if name in going)
        sums = {"epsilon": (spent + kept, asked, self.most)}
        sums["delta"] = fsum(of.delta for _, of in others), delta, self.most_delta
        for what, (all_others, own, most) in sums.items():
            if all_others + own > most * (1 + ROUNDING**2):  # a sum of decimal fractions is not exact
                left = max(0.0, most - all_others)
                wait = f" (of it {rounded_up(kept)} is kept for runs that go on, until silent for {KEPT // 60} min)"
                raise RefusedError(
                    f"policy lets all runs together have {what} <= {most:g} (max-total-epsilon); others (runs: "
                    f"{len(others)}) have {rounded_up(all_others)}{wait if kept and what == 'epsilon' else ''}, "
                    f"{left:.6g} is left, and this run would have {rounded_up(own, 6)}: choose a smaller "
                    f"privacy.{what} or ask the institution to change its policy file"
                )

    def _going(self, run: str) -> bool:
        """Say whether a run has not ended, as far as can be known here."""
        removed = there(self.state / RUNS / run / REMOVED)
        return not removed and time.time() - self._file(run).stat().st_mtime <= KEPT

    @contextmanager
    def _held(self) -> Iterator[dict[str, SpentByRun]]:
        """Keep other processes from the sum; yield it, with what accounts add on the disk."""
        with alone(private_folder(self.state / FOLDER), wait=True):
            before, known = self._written(), self.read()
            for run in (run for run in known if known[run] != before.get(run)):
                self._write(run, known[run])
            yield known

    def _accounts(self, delta: float) -> list[Account]:
        older = [run for run in entries(self.state) if NAME.fullmatch(run.name)]  # beside the ledger, and lost+found
        return [Account(run, delta=delta) for run in [*entries(self.state / RUNS), *older] if there(run / CHARGES)]

    def _written(self) -> dict[str, SpentByRun]:
        return {file.stem: SpentByRun(**read_json(file, FORM)) for file in entries(self.state / FOLDER, "*.json")}

    def _write(self, run: str, spent: SpentByRun) -> None:
        write_json(self._file(run), spent._asdict())

    def _file(self, run: str) -> Path:
        return self.state / FOLDER / f"{run}.json"
