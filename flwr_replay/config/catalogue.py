"""What can be chosen in each group of options, and in which file a choice has its values.

The names are those of the files in `conf/`, and of the strategies that other installed packages bring by entry points:

    [project.entry-points."flwr_replay.strategies"]
    median = "mypkg.median"

names a folder `mypkg/median` with `strategy.py`, `client.py`, `payload.py` if the method sends something new, and
`conf/strategy/median.yaml`. Presets of its own lie in `conf/preset`. Listing and finding all these imports none of
that package.
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
GROUP = "flwr_replay.strategies"


@dataclass(frozen=True)
class Brought:
    """A strategy of another package: `package` is the dotted name of the folder with its files."""

    name: str
    package: str
    distribution: str  # as it is installed and uninstalled

    @property
    def code(self) -> str:
        """What an institution allows: `mypkg.median:median`."""
        return f"{self.package}:{self.name}"

    @cached_property
    def conf(self) -> Path:
        """The folder of its YAML files; a ConfigError if the package is not as it must be."""
        top, *inner = self.package.split(".")
        if not (is_own(self.code) and self.name.islower()):
            raise ConfigError(
                f"the package {self.distribution} brings a strategy {self.name!r} = {self.package!r}; the name must be "
                "a Python name in lower case, and the value a package: correct or uninstall it"
            )
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
def brought() -> Mapping[str, tuple[Brought, ...]]:
    """Return what is installed, by the strategies' names; several packages of one name clash."""
    by_name: dict[str, tuple[Brought, ...]] = {}
    for point in metadata.entry_points(group=GROUP):
        distribution = point.dist.name if point.dist else point.value
        by_name[point.name] = (*by_name.get(point.name, ()), Brought(point.name, point.value, distribution))
    return by_name


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
    """Return the package of a strategy that is not ours; a ConfigError if several have one of this name."""
    others = brought().get(strategy, ())
    owners = [other.distribution for other in others]
    if owners and (conf_dir() / "strategy" / f"{strategy}.yaml").exists():
        owners.append(OURS)
    if len(owners) > 1:
        raise ConfigError(f"a strategy's name must be one package's; {strategy} is of {_listed(owners)}")
    return others[0] if others else None


def code_of(strategy: str) -> tuple[str, ...]:
    """Return the code that must be allowed for another package's strategy; none for ours; errors as of `package_of`."""
    package = package_of(strategy)
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
    """Return the file with a choice's values; of a preset, its folder."""
    return conf_dir_of(group, choice) / group / (choice if group == "preset" else f"{choice}.yaml")


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
    for package in (package for packages in brought().values() for package in packages):
        try:
            owners[package.conf] = package.distribution
        except ConfigError:  # said when its strategy is chosen
            continue
    return owners


def _listed(owners: Iterable[str]) -> str:
    return f"{' and '.join(owners)}: uninstall one, or ask its author for another name"
