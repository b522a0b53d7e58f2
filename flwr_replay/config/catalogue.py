"""What can be chosen in each group of options, and in which file a choice has its values.

The names are those of the files in `conf/`, and of the strategies that other installed packages bring. Listing them
imports nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from flwr_replay.config.brought import Brought, brought
from flwr_replay.errors import ConfigError, nearest

__all__ = ["check_choice", "choices", "conf_dir", "conf_dir_of", "conf_path", "own_options", "package_of"]

OURS = "flwr-replay"


def conf_dir() -> Path:
    """Return our folder of YAML files, in a checkout, in Flower's app bundle or in a wheel."""
    return Path(next(iter(importlib.import_module("flwr_replay.conf").__path__)))


def choices(group: str) -> list[str]:
    """List the choices of a config group: `choices("strategy")`."""
    others = brought() if group == "strategy" else ()
    places = _conf_dirs() if group == "preset" else [conf_dir()]
    folders = [conf / group for conf in places if (conf / group).is_dir()]
    files = [path for folder in folders for path in folder.iterdir() if path.is_dir() or path.suffix == ".yaml"]
    return sorted({*(path.stem for path in files), *others})


def check_choice(group: str, choice: str) -> None:
    """Refuse what cannot be chosen.

    Raises
    ------
    ConfigError
        For an unknown name, with the nearest valid names; for one that several packages have, or a broken package.
    """
    if choice not in choices(group):
        raise ConfigError(f"unknown {group} {choice!r}: {nearest(choice, choices(group))}")
    conf_dir_of(group, choice)


def package_of(strategy: str) -> Brought | None:
    """Return the package of a strategy that is not ours.

    Raises
    ------
    ConfigError
        If several have a strategy of this name.
    """
    others = brought().get(strategy, ())
    owners = [other.distribution for other in others]
    if owners and (conf_dir() / "strategy" / f"{strategy}.yaml").exists():
        owners.append(OURS)
    if len(owners) > 1:
        raise ConfigError(f"a strategy's name must be one package's; {strategy} is of {_listed(owners)}")
    return others[0] if others else None


def conf_dir_of(group: str, choice: str) -> Path:
    """Return the folder of YAML files that has a choice: ours, or another package's.

    Raises
    ------
    ConfigError
        If several packages have it, or the one that has it is broken.
    """
    if group == "strategy":
        package = package_of(choice)
        return package.conf if package else conf_dir()
    if group != "preset":
        return conf_dir()
    having = {conf: owner for conf, owner in _conf_dirs().items() if (conf / group / choice).is_dir()}
    if len(having) > 1:
        raise ConfigError(f"a preset's name must be one package's; {choice} is of {_listed(having.values())}")
    return next(iter(having))


def conf_path(group: str, choice: str) -> Path:
    """Return the file with a choice's values; of a preset, its folder."""
    return conf_dir_of(group, choice) / group / (choice if group == "preset" else f"{choice}.yaml")


@cache
def own_options(strategy: str) -> frozenset[str]:
    """Return the names of a strategy's options; none if another package's file cannot be read."""
    from flwr_replay.config.strict_yaml import read_yaml

    try:
        values = read_yaml(conf_path("strategy", strategy), f"the options of strategy={strategy}")
    except ConfigError:
        return frozenset()
    return frozenset(values) - {"name"}


def _conf_dirs() -> dict[Path, str]:
    """Return all folders of YAML files with their packages: ours, and others that are not broken."""
    found = {conf_dir(): OURS}
    for package in (package for packages in brought().values() for package in packages):
        try:
            found[package.conf] = package.distribution
        except ConfigError:  # said when its strategy is chosen
            continue
    return found


def _listed(owners: Iterable[str]) -> str:
    return f"{' and '.join(owners)}: uninstall one, or ask its author for another name"
