"""How the epsilon of a run stands beside its metrics, so that nobody reads one without the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from flwr_replay.privacy.plan import NO_PROOF

__all__ = ["Stated", "beside", "largest", "shown_epsilon"]


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


def shown_epsilon(found: Sequence[Stated]) -> str:
    """Write one epsilon, or the range of several: `epsilon 7.97 (dp=proxy)`, `epsilon 12.1 to 28.6, no proof`."""
    if not found:
        return ""
    epsilons = [inf if one.epsilon is None else one.epsilon for one in found]
    ends = dict.fromkeys(f"{end:.3g}" for end in (min(epsilons), max(epsilons)))
    covered = " and ".join(dict.fromkeys(f"dp={one.dp}" for one in found if one.dp))
    proof = "" if all(one.proven for one in found) else ", no proof"
    return f"epsilon {' to '.join(ends)}{f' ({covered})' if covered else ''}{proof}"


def beside(result: Mapping[str, Any]) -> str:
    """Return what stands behind a metric of a run: `, epsilon 7.97 (dp=proxy)`; nothing where nothing is private."""
    found = largest(result.get("privacy", {}).values())
    return f", {shown_epsilon([found])}" if found else ""
