"""What a run's replay lacks, written next to its metrics, so that nobody takes the replay for complete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["missing_suffix"]


def missing_suffix(result: Mapping[str, Any]) -> str:
    """Return the suffix of a run's metric that says what replay lacks; empty if it lacks nothing.

    >>> missing_suffix({"replay-lacks": {"b": "is not replayed", "c": "has received no replays"}})
    ', replay is incomplete: b is not replayed, c has received no replays'
    """
    found = [f"{name} {what}" for name, what in result.get("replay-lacks", {}).items()]
    return f", replay is incomplete: {', '.join(found)}" if found else ""
