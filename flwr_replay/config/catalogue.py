"""What can be chosen in each group of options, and in which file a choice has its values.

The names are those of the files in `conf/`, and of what other installed packages bring by entry points:

    [project.entry-points."flwr_replay.strategies"]
    median = "mypkg.median"

    [project.entry-points."flwr_replay.models"]
    mynet = "mypkg.nets:build"

A strategy is a folder `mypkg/median` with `strategy.py`, `client.py`, `payload.py` if the method sends something new,
and `conf/strategy/median.yaml`. Presets of its own lie in `conf/preset`. Models, tasks, partitions and attacks are
functions: `model=mynet` is `model=mypkg.nets:build`. Listing and finding all these imports none of that package.
"""

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata, util
from pathlib import Path
from typing import Any

from flwr_replay.config.own_code import is_own
from flwr_replay.errors import ConfigError, nearest

__all__ = [
    "GROUPS",
    "POINTS",
    "brought",
    "check_choice",
    "choices",
    "code_of",
    "conf_dir",
    "conf_dir_of",
    "conf_path",
    "own_options",
    "package_of",
    "settable",
]

GROUPS = ("strategy", "task", "partition", "model", "replay", "generator", "prior", "preset")
OURS = "flwr-replay"
POINTS = {  # the entry points of what a package brings
    "strategy": "flwr_replay.strategies",
    **{group: f"flwr_replay.{group}s" for group in ("task", "partition", "model", "attack")},
}


@dataclass(frozen=True)
class Brought:
    """What another package brings under a name."""

    group: str  # strategy, task, partition, model, attack
    name: str
    package: str  # of a strategy, the dotted name of the folder with its files; of others the function
    distribution: str  # as it is installed and uninstalled

    @property
    def code(self) -> str:
        """What an institution allows: `mypkg.median:median`, `mypkg.nets:build`; a ConfigError if it is none."""
        code = f"{self.package}:{self.name}" if self.group == "strategy" else self.package
        if not (is_own(code) and is_own(f"name:{self.name}") and self.name.islower()):
            what = "package" if self.group == "strategy" else "function, as mypkg.nets:build"
            raise ConfigError(
                f"the package {self.distribution} brings {self.group} {self.name!r} = {self.package!r}; the name "
                f"must be a Python name in lower case, and the value a {what}: correct or uninstall it"
            )
        return code

    @cached_property
    def conf(self) -> Path:
        """The folder of its YAML files; a ConfigError if the package is not as it must be."""
        top, *inner = self.code.partition(":")[0].split(".")
        spec = util.find_spec(top)  # of the top only: looking for what lies in it would import it
        folders = [Path(place, *inner, "conf") for place in (spec and spec.submodule_search_locations) or ()]
        holding = [folder for folder in folders if (folder / "strategy" / f"{self.name}.yaml").is_file()]
        if not holding:
            raise ConfigError(
                f"strategy={self.name} of the package {self.distribution} has no conf/strategy/{self.name}.yaml in "
                f"{self.package}: correct or uninstall the package"
            )
        return holding[0]


@cache
def brought() -> Mapping[str, Mapping[str, tuple[Brought, ...]]]:
    """Return what is installed, by group and name; several packages of one name clash."""
    points, by_group = metadata.entry_points(), dict[str, dict[str, tuple[Brought, ...]]]()
    for group, place in POINTS.items():
        by_name = by_group.setdefault(group, {})
        for point in points.select(group=place):
            bringing = Brought(group, point.name, point.value, (point.dist and point.dist.name) or point.value)
            by_name[point.name] = (*by_name.get(point.name, ()), bringing)
    return by_group


def conf_dir() -> Path:
    """Return our folder of YAML files, in a checkout, in Flower's app bundle or in a wheel."""
    return Path(next(iter(importlib.import_module("flwr_replay.conf").__path__)))


def choices(group: str) -> list[str]:
    """List the choices of a config group: `choices("strategy")`."""
    places = _conf_dirs() if group == "preset" else [conf_dir()]
    folders = [conf / group for conf in places if (conf / group).is_dir()]
    files = [path for folder in folders for path in folder.iterdir() if path.is_dir() or path.suffix == ".yaml"]
    return sorted({*(path.stem for path in files), *brought().get(group, ())})


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


def package_of(choice: str, group: str = "strategy") -> Brought | None:
    """Return the package of a choice that is not ours; a ConfigError if several have one of this name."""
    others = brought().get(group, {}).get(choice, ())
    owners = [other.distribution for other in others]
    if owners and (conf_dir() / group / f"{choice}.yaml").exists():
        owners.append(OURS)
    if len(owners) > 1:
        raise ConfigError(f"a name must be one package's; {group} {choice} is of {_listed(owners)}")
    return others[0] if others else None


def code_of(choice: str, group: str = "strategy") -> tuple[str, ...]:
    """Return the code that a choice needs allowed, a function or a package's; none for ours. Errors of `package_of`."""
    if group != "strategy" and is_own(choice):
        return (choice,)
    package = package_of(choice, group)
    return (package.code,) if package else ()


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
    """Return the file with a choice's values; of a preset, its folder; of a package's function that of `own`."""
    folder = conf_dir_of(group, choice) / group
    path = folder / (choice if group == "preset" else f"{choice}.yaml")
    of_own = group != "strategy" and choice in brought().get(group, {}) and not path.exists()
    return folder / "own.yaml" if of_own else path


@cache
def own_options(group: str, choice: str) -> frozenset[str]:
    """Return the names of a choice's own options; none if another package's file cannot be read."""
    from flwr_replay.config.strict_yaml import read_yaml

    try:
        values = read_yaml(conf_path(group, choice), f"the options of {group}={choice}")
    except ConfigError:
        return frozenset()
    return frozenset(settable(values))


def settable(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a choice's options; what the choice is known by is none: its library, whose models have names, or name."""
    choice = "library" if "library" in values else "name"
    return {option: value for option, value in values.items() if option != choice}


def _conf_dirs() -> dict[Path, str]:
    """Return all folders of YAML files with their packages: ours, and others that are not broken."""
    owners = {conf_dir(): OURS}
    for package in (package for packages in brought().get("strategy", {}).values() for package in packages):
        try:
            owners[package.conf] = package.distribution
        except ConfigError:  # said when its strategy is chosen
            continue
    return owners


def _listed(owners: Iterable[str]) -> str:
    return f"{' and '.join(owners)}: uninstall one, or ask its author for another name"
