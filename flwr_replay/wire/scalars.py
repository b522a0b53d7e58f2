"""The types of a payload's plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from flwr_replay.wire.bounds import LARGEST_NUMBER, MOST_COUNTED
from flwr_replay.wire.fields import Kind

__all__ = ["ScalarType"]


@dataclass(frozen=True)
class ScalarType:
    """The type of a field that is not an array: a plain value, or a list of them."""

    base: type
    listed: bool

    @classmethod
    def of(cls, hint: Any) -> ScalarType:
        """Read an annotation: `int`, `float | None`, `Sequence[int]`."""
        parts = [part for part in get_args(hint) if part is not type(None)]
        if not parts:
            return cls(hint, False)
        optional = type(None) in get_args(hint)
        return cls.of(parts[0]) if optional else cls(parts[0], True)

    def fits(self, values: Sequence[Any], kind: Kind) -> bool:
        """Say whether all values are of this type; a number's size is bounded, and no count is negative."""
        types = (int, float) if self.base is float else (self.base,)
        for found in set(map(type, values)):
            if not issubclass(found, types) or (found is bool and self.base is not bool):
                return False
        if kind == "notice" or self.base not in (int, float):
            return True
        if self.base is float:
            return all(abs(value) <= LARGEST_NUMBER for value in values)  # NaN is not
        most = max(values, default=0) if kind == "statistic" else 0  # an instruction may be a seed
        return min(values, default=0) >= 0 and most <= MOST_COUNTED

    def __str__(self) -> str:
        return f"a list of {self.base.__name__}" if self.listed else self.base.__name__
