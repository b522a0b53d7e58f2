"""How the epsilon of a run stands beside its metrics, so that nobody reads one without the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

from flwr_replay.privacy.plan import NO_PROOF

__all__ = ["beside", "largest", "shown_epsilon"]


def largest(stated: Iterable[Mapping[str, Any] | None]) -> tuple[float | None, bool] | None:
    """Return the largest epsilon of what institutions state, and whether it is proven.

    Parameters
    ----------
    stated : iterable of mappings
        As under `privacy` in `result.json`; None: this institution states nothing.

    Returns
    -------
    tuple of (float or None) and bool, or None
        Without an epsilon where noise came from the run's seed; None where nobody states anything.
    """
    told = [one for one in stated if one]
    if not told:
        return None
    epsilons = [one["epsilon"] for one in told]
    proven = not any(str(one["mechanism"]).endswith(NO_PROOF) for one in told)
    return (None if None in epsilons else max(epsilons)), proven


def shown_epsilon(found: Sequence[tuple[float | None, bool]]) -> str:
    """Write one epsilon, or the range of several: `epsilon 7.97`, `epsilon 12.1 to 28.6, no proof`."""
    if not found:
        return ""
    epsilons = [inf if epsilon is None else epsilon for epsilon, _ in found]
    ends = dict.fromkeys(f"{end:.3g}" for end in (min(epsilons), max(epsilons)))
    return f"epsilon {' to '.join(ends)}{'' if all(proven for _, proven in found) else ', no proof'}"


def beside(result: Mapping[str, Any]) -> str:
    """Return what stands behind a metric of a run: `, epsilon 7.97`; nothing where nothing is private."""
    found = largest(result.get("privacy", {}).values())
    return f", {shown_epsilon([found])}" if found else ""
