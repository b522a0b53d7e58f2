"""How what replay lacks stands beside a run's metrics, so that nobody takes it for whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["missing_suffix"]


def missing_suffix(result: Mapping[str, Any]) -> str:
    """Return what stands behind a metric of a run: `, replay is not whole: b is not replayed`; nothing where it is.

    >>> missing_suffix({"replay-lacks": {"b": "is not replayed", "c": "has received no replays"}})
    ', replay is not whole: b is not replayed, c has received no replays'
    """
    found = [f"{name} {what}" for name, what in result.get("replay-lacks", {}).items()]
    return f", replay is not whole: {', '.join(found)}" if found else ""
