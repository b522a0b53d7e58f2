"""What can be chosen in each group of options, and in which file of `conf/` a choice has its values.

The names are those of the files, so that listing them imports nothing.
"""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path

from flwr_replay.errors import ConfigError, nearest

__all__ = ["check_choice", "choices", "conf_dir", "conf_path", "own_options"]


def conf_dir() -> Path:
    """Return the folder of YAML files, in a checkout, in Flower's app bundle or in a wheel."""
    return Path(next(iter(importlib.import_module("flwr_replay.conf").__path__)))


def choices(group: str) -> list[str]:
    """List the choices of a config group: `choices("strategy")`."""
    return sorted({path.stem for path in (conf_dir() / group).iterdir() if path.is_dir() or path.suffix == ".yaml"})


def check_choice(group: str, choice: str) -> None:
    """Refuse what cannot be chosen.

    Raises
    ------
    ConfigError
        With the nearest valid names.
    """
    if choice not in choices(group):
        raise ConfigError(f"unknown {group} {choice!r}: {nearest(choice, choices(group))}")


def conf_path(group: str, choice: str) -> Path:
    """Return the file with a choice's values; of a preset, its folder."""
    return conf_dir() / group / (choice if group == "preset" else f"{choice}.yaml")


@cache
def own_options(strategy: str) -> frozenset[str]:
    """Return the names of a strategy's options."""
    import yaml

    return frozenset(yaml.safe_load(conf_path("strategy", strategy).read_text(encoding="utf-8"))) - {"name"}
