"""Which plain values a field of a payload may hold."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args

__all__ = ["ScalarType"]


@dataclass(frozen=True)
class ScalarType:
    """What a field that is no array may hold."""

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

    def fits(self, value: Any, statistic: bool) -> bool:
        """Say whether a single value is of this type, and if it is a statistic, one that can be."""
        if self.base in (int, float) and isinstance(value, bool):
            return False
        if not isinstance(value, (int, float) if self.base is float else self.base):
            return False
        if not statistic or not isinstance(value, (int, float)):
            return True
        return math.isfinite(value) and (self.base is float or value >= 0)

    def __str__(self) -> str:
        return f"a list of {self.base.__name__}" if self.listed else self.base.__name__
