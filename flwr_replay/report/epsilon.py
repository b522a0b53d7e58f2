"""A run's epsilon, written next to its metrics, so that nobody reads one without the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from flwr_replay.privacy.accounting import rounded_up

__all__ = ["Stated", "epsilon_suffix", "largest", "shown_epsilon"]


class Stated(NamedTuple):
    """An epsilon, whether it is proven, and what it covers."""

    epsilon: float | None  # None: not known, or the noise is not secret
    proven: bool
    dp: str  # the mechanisms it covers, as in the option dp=: proxy, generator+prior, …


def largest(stated: Iterable[Mapping[str, Any] | None]) -> Stated | None:
    """Return the largest epsilon that institutions state.

    Parameters
    ----------
    stated : iterable of mappings
        As under `privacy` in `result.json`; None: this institution states none.

    Returns
    -------
    Stated or None
        Proven if all are; None if no institution states any.
    """
    given = [one for one in stated if one]
    if not given:
        return None
    epsilons = [one["epsilon"] for one in given]
    return Stated(None if None in epsilons else max(epsilons), all(map(_proven, given)), given[0].get("dp", ""))


def _proven(one: Mapping[str, Any]) -> bool:
    """Say whether a stated epsilon is proven; one that is not known needs no proof."""
    return one["epsilon"] is None or one.get("proven") is True


def shown_epsilon(found: Sequence[Stated | None]) -> str:
    """Write one epsilon, or several in order unless all are equal: `epsilon 28.6, none (dp=proxy), no proof`.

    None is a run without differential privacy. If all are None, the text is empty.
    """
    stated = [one for one in found if one]
    if not stated:
        return ""
    values = [rounded_up(inf if one.epsilon is None else one.epsilon) if one else "none" for one in found]
    covered = " and ".join(dict.fromkeys(f"dp={one.dp}" for one in stated if one.dp))
    proof = "" if all(one.proven for one in stated) else ", no proof"
    shown = ", ".join(values if len(set(values)) > 1 else values[:1])
    return f"epsilon {shown}{f' ({covered})' if covered else ''}{proof}"


def epsilon_suffix(result: Mapping[str, Any]) -> str:
    """Return the suffix of a run's metric: `, epsilon 7.97 (dp=proxy)`; empty without differential privacy."""
    found = largest(result.get("privacy", {}).values())
    return f", {shown_epsilon([found])}" if found else ""
