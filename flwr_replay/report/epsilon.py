"""How the epsilon of a run stands beside its metrics, so that nobody reads one without the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from flwr_replay.privacy.accounting import rounded_up

__all__ = ["Stated", "epsilon_suffix", "largest", "shown_epsilon"]

OLD_NO_PROOF = "as the paper counts it; not a proof"  # how runs of older versions, without `proven`, end the mechanism


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
    return Stated(None if None in epsilons else max(epsilons), all(map(_proven, told)), told[0].get("dp", ""))


def _proven(one: Mapping[str, Any]) -> bool:
    """Say whether a stated epsilon is proven; where none is stated, nothing is left to prove."""
    if one["epsilon"] is None:
        return True
    if "proven" in one:
        return bool(one["proven"])
    return not str(one["mechanism"]).endswith(OLD_NO_PROOF)


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
