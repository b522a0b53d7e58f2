"""Beside a run's metrics, so that nobody reads one without the other: epsilon, and what replay lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from flwr_replay.privacy.accounting import rounded_up

__all__ = ["Stated", "epsilon_suffix", "largest", "missing_suffix", "shown_epsilon"]


@dataclass(frozen=True)
class Stated:
    """An epsilon with its delta, whether it is proven, and what it covers."""

    epsilon: float | None  # None: not known, or the noise is not secret
    proven: bool
    dp: str  # the mechanisms it covers, as in the option dp=: proxy, generator+prior, …
    delta: float


def largest(stated: Iterable[Mapping[str, Any] | None]) -> Stated | None:
    """Return the largest epsilon and the largest delta that institutions state; together they hold for each of them.

    Parameters
    ----------
    stated : iterable of mappings
        As under `privacy` in `result.json`; None: this institution states none.

    Returns
    -------
    Stated or None
        Proven if all are; None if no institution states any.
    """
    given = [account for account in stated if account]
    if not given:
        return None
    epsilons = [account["epsilon"] for account in given]
    most = None if None in epsilons else max(epsilons)
    return Stated(most, all(map(_proven, given)), given[0].get("dp", ""), max(account["delta"] for account in given))


def _proven(account: Mapping[str, Any]) -> bool:
    """Say whether a stated epsilon is proven; one that is not known needs no proof."""
    return account["epsilon"] is None or account.get("proven") is True


def shown_epsilon(accounts: Sequence[Stated | None]) -> str:
    """Write one epsilon with its delta, or several in order unless all are equal.

    >>> shown_epsilon([Stated(28.6, False, "proxy", 1e-5), None])
    'epsilon 28.6, none at delta 1e-05 (dp=proxy), no proof'


    None is a run without differential privacy. If all are None, the text is empty.
    """
    stated = [account for account in accounts if account]
    if not stated:
        return ""
    values = [
        rounded_up(inf if account.epsilon is None else account.epsilon) if account else "none" for account in accounts
    ]
    covered = " and ".join(dict.fromkeys(f"dp={account.dp}" for account in stated if account.dp))
    proof = "" if all(account.proven for account in stated) else ", no proof"
    shown = ", ".join(values if len(set(values)) > 1 else values[:1])
    deltas = dict.fromkeys(rounded_up(account.delta, 2) for account in stated)
    return f"epsilon {shown} at delta {', '.join(deltas)}{f' ({covered})' if covered else ''}{proof}"


def epsilon_suffix(result: Mapping[str, Any]) -> str:
    """Return a run's `, epsilon 7.97 at delta 1e-05 (dp=proxy)`; empty without differential privacy."""
    account = largest(result.get("privacy", {}).values())
    return f", {shown_epsilon([account])}" if account else ""


def missing_suffix(result: Mapping[str, Any]) -> str:
    """Return the suffix of a run's metric that says what replay lacks; empty if it lacks nothing.

    >>> missing_suffix({"replay-lacks": {"b": "is not replayed", "c": "has received no replays"}})
    ', replay is incomplete: b is not replayed, c has received no replays'
    """
    lacks = [f"{name} {what}" for name, what in result.get("replay-lacks", {}).items()]
    return f", replay is incomplete: {', '.join(lacks)}" if lacks else ""
