"""The options that a run is bound to at an institution.

A server names runs, and may give two runs the same name. The second must not use what the first has left at an
institution: weights, optimizer state, a privacy account. Otherwise weights trained without noise could leave under the
epsilon of a few steps of DP-SGD. So an institution stores the options of a run's first message, and refuses later
messages with other options.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from hashlib import sha256
from typing import Any

from flwr_replay.config.run import RunConfig

__all__ = ["FREE", "binding", "differing", "digest_of", "flat", "plain", "shared_digest"]

# May differ when a run is resumed; no promise depends on them.

FREE = (
    "runs_dir",
    "run_name",
    "resume",
    "rounds",
    "nodes",
    "timeout",
    "wait",
    "clinics",
    "device",
    "client_cpus",
    "client_gpus",
    "record",
    "record_mb",
    "tracking",
    "task.data_dir",
    "strategy.server_processes",
    "replay.missing",
)

# Their paths are not told to a server.
OWN_FILES = ("model.weights", "generator.checkpoint", "generator.perceptual_weights")


@lru_cache(maxsize=64)
def binding(config: RunConfig) -> str:
    """Write the options that a run is bound to as JSON, including its strategy and its mechanisms under DP."""
    return json.dumps({key: value for key, value in sorted(flat(plain(config)).items()) if key not in FREE})


@lru_cache(maxsize=64)
def digest_of(bound: str) -> str:
    """Return a digest of these options, which every file of the run's state contains."""
    return sha256(bound.encode()).hexdigest()[:16]


@lru_cache(maxsize=64)
def shared_digest(config: RunConfig) -> str:
    """Return the SHA-256 of what is the same at all institutions of a run: these options without own files."""
    values = {key: value for key, value in json.loads(binding(config)).items() if key not in OWN_FILES}
    return sha256(json.dumps(values).encode()).hexdigest()


def differing(before: str, now: str) -> str:
    """Say which option differs: `strategy.name was 'avgpush', now 'proxyfl'`."""
    try:
        was, become = dict(json.loads(before)), dict(json.loads(now))
    except (ValueError, TypeError):
        return "its stored options are damaged, or of another version"
    for key in sorted(was.keys() | become.keys(), key=lambda key: (key != "strategy.name", key)):
        if was.get(key) == become.get(key):
            continue
        if key in OWN_FILES:
            return f"{key} is another file now"
        return f"{key} was {was.get(key)!r}, now {become.get(key)!r}"
    return "only their spelling differs"


def plain(config: RunConfig) -> dict[str, Any]:
    """Return a resolved configuration by section, as its YAML is read."""
    values = {**asdict(config), "strategy": {"name": config.strategy.name, **asdict(config.strategy)}}
    return dict(json.loads(json.dumps(values)))  # a list for each tuple


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings, with dotted keys: `strategy.name`."""
    options: dict[str, Any] = {}
    for key, value in values.items():
        options |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return options
