"""How the epsilon of a run stands beside its metrics, so that nobody reads one without the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from flwr_replay.privacy.accounting import rounded_up
from flwr_replay.privacy.plan import NO_PROOF

__all__ = ["Stated", "epsilon_suffix", "largest", "shown_epsilon"]


class Stated(NamedTuple):
    """An epsilon, and what it is worth."""

    epsilon: float | None  # None: not known, or the noise is not secret
    proven: bool
    dp: str  # of what it is, as the option dp= says it: proxy, generator+prior, …


def largest(stated: Iterable[Mapping[str, Any] | None]) -> Stated | None:
    """Return the largest epsilon of what institutions state.

    Parameters
    ----------
    stated : iterable of mappings
        As under `privacy` in `result.json`; None: this institution states nothing.

    Returns
    -------
    Stated or None
        Proven if all are; None where nobody states anything.
    """
    told = [one for one in stated if one]
    if not told:
        return None
    epsilons = [one["epsilon"] for one in told]
    proven = not any(str(one["mechanism"]).endswith(NO_PROOF) for one in told)
    return Stated(None if None in epsilons else max(epsilons), proven, told[0].get("dp", ""))


def shown_epsilon(found: Sequence[Stated | None]) -> str:
    """Write one epsilon, or several in order unless all are equal: `epsilon 28.6, none (dp=proxy), no proof`.

    None stands for a run in which nothing is private; nothing is written where all are.
    """
    told = [one for one in found if one]
    if not told:
        return ""
    values = [rounded_up(inf if one.epsilon is None else one.epsilon) if one else "none" for one in found]
    covered = " and ".join(dict.fromkeys(f"dp={one.dp}" for one in told if one.dp))
    proof = "" if all(one.proven for one in told) else ", no proof"
    shown = ", ".join(values if len(set(values)) > 1 else values[:1])
    return f"epsilon {shown}{f' ({covered})' if covered else ''}{proof}"


def epsilon_suffix(result: Mapping[str, Any]) -> str:
    """Return what stands behind a metric of a run: `, epsilon 7.97 (dp=proxy)`; nothing where nothing is private."""
    found = largest(result.get("privacy", {}).values())
    return f", {shown_epsilon([found])}" if found else ""
