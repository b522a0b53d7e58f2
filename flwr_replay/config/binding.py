"""What a run is bound to: the options under which an institution has left state and charges.

A server names runs, and may give one name to two of them. What the first has left at an institution (weights, an
optimizer, an account of privacy) must not serve the second: weights that were trained without noise would leave under
the epsilon of a few private steps. So the first message of a run writes its options down, and later ones must have the
same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from hashlib import sha256
from typing import Any

from flwr_replay.config.run import RunConfig

__all__ = ["FREE", "binding", "differing", "digest_of", "flat"]

# What may differ when a run goes on; no promise rests on it.

FREE = (
    "runs_dir",
    "run_name",
    "resume",
    "rounds",
    "nodes",
    "timeout",
    "wait",
    "device",
    "task.data_dir",
    "replay.missing",
)


@lru_cache(maxsize=64)
def binding(config: RunConfig) -> str:
    """Write the options that a run keeps, its strategy and mechanisms among them, as JSON."""
    values = flat({**asdict(config), "strategy": {"name": config.strategy.name, **asdict(config.strategy)}})
    return json.dumps({key: value for key, value in sorted(values.items()) if key not in FREE})


def digest_of(bound: str) -> str:
    """Return a digest of such options, which stands in every file of the run's state."""
    return sha256(bound.encode()).hexdigest()[:16]


def differing(before: str, now: str) -> str:
    """Say in which option two of them differ: `strategy.name was 'avgpush', now 'proxyfl'`."""
    try:
        was, become = dict(json.loads(before)), dict(json.loads(now))
    except (ValueError, TypeError):
        return "what is written down of it is damaged, or of another version"
    for key in sorted(was.keys() | become.keys(), key=lambda key: (key != "strategy.name", key)):
        if was.get(key) != become.get(key):
            return f"{key} was {was.get(key)!r}, now {become.get(key)!r}"
    return "they are written otherwise"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Name the values of nested mappings by their way: `strategy.name`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found
