"""How many examples of each class the institutions of partition=majority have, and which classes starve.

Letters: K institutions, C classes.

A class starves at an institution that has fewer than a quarter of the examples that an equal remainder would give it.
An equal remainder has as many of every class but the major one. If these are fewer than four, no class starves, since
chance alone could take them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ClassCounts", "extremes", "starving", "summary", "warnings"]

STARVED = 0.25  # of the examples in an equal remainder
LEAST = 4  # examples of a class in an equal remainder


@dataclass(frozen=True, eq=False)
class ClassCounts:
    """Training examples by institution and class."""

    values_C: NDArray[np.int64]  # the classes
    counts_KC: NDArray[np.int64]
    majors_K: NDArray[np.int64]  # each institution's major class, as an index into `values_C`
    equal: float  # examples of each other class in an equal remainder
    uniform_size: int = 0  # the largest `partition.size` that `partition.rest=uniform` has room for; 0: not dealt so
    names: tuple[str, ...] = ()  # of all classes, by number; empty: they are called by their numbers

    def report(self, names: Sequence[str]) -> dict[str, Any]:
        """Return each institution's smallest and largest class and the starved ones, as `result.json` has them."""
        institutions = zip(names, self.counts_KC, self.majors_K, strict=True)
        return {
            "equal-remainder": round(self.equal, 6),
            "uniform-size": self.uniform_size,
            "institutions": {name: self._of(counts_C, major) for name, counts_C, major in institutions},
        }

    def _of(self, counts_C: NDArray[np.int64], major: int) -> dict[str, Any]:
        few_C = (counts_C < STARVED * self.equal) & (self.equal >= LEAST)
        few_C[major] = False
        at = {"smallest": counts_C.argmin(), "largest": counts_C.argmax()}
        called = [self.names[value] if self.names else int(value) for value in self.values_C]
        return {
            **{name: {"class": called[c], "examples": int(counts_C[c])} for name, c in at.items()},
            "starved": {str(called[c]): int(counts_C[c]) for c in np.flatnonzero(few_C)},
        }


def extremes(skew: Mapping[str, Any]) -> list[str]:
    """Return a line for each institution with its largest and smallest class; none for another partition's skew."""
    shards = skew["classes"]["institutions"].items() if "classes" in skew else ()
    return [f"{name}: largest {_shown(own['largest'])}, smallest {_shown(own['smallest'])}" for name, own in shards]


def summary(skew: Mapping[str, Any]) -> list[str]:
    """Return a line with the largest and smallest class of any institution; none for another partition's skew."""
    if "classes" not in skew:
        return []
    by_name = skew["classes"]["institutions"]
    most = max(by_name, key=lambda name: by_name[name]["largest"]["examples"])
    least = min(by_name, key=lambda name: by_name[name]["smallest"]["examples"])
    return [
        f"training examples of a class: most {_shown(by_name[most]['largest'])} at {most}, "
        f"fewest {_shown(by_name[least]['smallest'])} at {least}"
    ]


def starving(skew: Mapping[str, Any]) -> int:
    """Count the institutions at which a class starves."""
    return sum(bool(own["starved"]) for own in skew["classes"]["institutions"].values()) if "classes" in skew else 0


def warnings(skew: Mapping[str, Any]) -> list[str]:
    """Return one line if classes starve: the rule, the worst case, and what to do."""
    if not (number := starving(skew)):
        return []
    classes = skew["classes"]
    by_name = classes["institutions"]
    count, value, name = min((n, c, name) for name, own in by_name.items() for c, n in own["starved"].items())
    room = classes["uniform-size"]
    uniform = f"set partition.rest=uniform (partition.size={room} at most), or a smaller partition.size"
    return [
        f"warning: classes starve at {number} of {len(by_name)} institutions, with less than a quarter of an equal "
        f"remainder's {classes['equal-remainder']:.0f} examples; {name} has {count} of class {value}: "
        f"{uniform if room else 'deal more evenly'}"
    ]


def _shown(end: Mapping[str, int]) -> str:
    return f"{end['examples']:,} of class {end['class']}"
