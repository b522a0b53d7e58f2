"""Strategies that other installed packages bring, found by their entry points.

    [project.entry-points."flwr_replay.strategies"]
    median = "mypkg.median"

names a folder `mypkg/median` with `strategy.py`, `client.py`, `payload.py` if the method sends something new, and
`conf/strategy/median.yaml`. Presets of its own lie in `conf/preset`. Finding them imports none of that package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata, util
from pathlib import Path

from flwr_replay.config.parts import is_part
from flwr_replay.errors import ConfigError

__all__ = ["Brought", "brought"]

GROUP = "flwr_replay.strategies"


@dataclass(frozen=True)
class Brought:
    """A strategy of another package: `package` is the dotted name of the folder with its files."""

    name: str
    package: str
    distribution: str  # as it is installed and uninstalled

    @property
    def part(self) -> str:
        """What an institution allows: `mypkg.median:median`."""
        return f"{self.package}:{self.name}"

    @cached_property
    def conf(self) -> Path:
        """The folder of its YAML files.

        Raises
        ------
        ConfigError
            If the package is not as it must be.
        """
        top, *inner = self.package.split(".")
        if not (is_part(self.part) and self.name.islower()):
            raise ConfigError(
                f"the package {self.distribution} brings a strategy {self.name!r} = {self.package!r}; the name must be "
                "a Python name in lower case, and the value a package: correct or uninstall it"
            )
        spec = util.find_spec(top)  # of the top only: looking for what lies in it would import it
        folders = [Path(place, *inner, "conf") for place in (spec and spec.submodule_search_locations) or ()]
        found = [folder for folder in folders if (folder / "strategy" / f"{self.name}.yaml").is_file()]
        if not found:
            raise ConfigError(
                f"strategy={self.name} of the package {self.distribution} has no conf/strategy/{self.name}.yaml in "
                f"{self.package}: correct or uninstall the package"
            )
        return found[0]


@cache
def brought() -> Mapping[str, tuple[Brought, ...]]:
    """Return what is installed, by the strategies' names; several packages of one name clash."""
    found: dict[str, tuple[Brought, ...]] = {}
    for point in metadata.entry_points(group=GROUP):
        distribution = point.dist.name if point.dist else point.value
        found[point.name] = (*found.get(point.name, ()), Brought(point.name, point.value, distribution))
    return found
