"""From an option's value, as it is read, to a dataclass that has it: unknown keys and wrong types are refused."""

import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from flwr_replay.config.quoting import short
from flwr_replay.errors import ConfigError, nearest

__all__ = ["HINTS", "build", "typed"]

WHOLE = 10**18
CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")
HINTS = cache(get_type_hints)  # of a section, they take a millisecond
KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def build(cls: type, values: Mapping[str, Any], section: str) -> Any:
    """Construct a config dataclass; refuse unknown keys and values of the wrong type."""
    return cls(**typed(cls, values, section))


def typed(cls: type, values: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Return a config dataclass's values by its types; refuse unknown keys and values of the wrong type."""
    hints = HINTS(cls)
    known = [field.name for field in fields(cls)]
    prefix = f"{section}." if section else ""
    right = {}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"unknown option {prefix}{key}: {nearest(key, known)}")
        right[key] = _typed(f"{prefix}{key}".replace("_", "-"), value, hints[key])
    return right


def _typed(option: str, value: Any, hint: Any) -> Any:
    if get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{option} must be a list; got {short(value)}")
        return tuple(_typed(option, item, get_args(hint)[0]) for item in value)
    if type(value) is int and not -WHOLE < value < WHOLE:
        raise ConfigError(f"{option} must be a number of fewer than 19 digits; got {short(value)}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, (bool, int, float)):  # the option itself says which words it takes
        return str(value).lower()
    if hint in KINDS and type(value) is not hint:
        raise ConfigError(f"{option} must be {KINDS[hint]}; got {short(value)}")
    if hint is str and CONTROL.search(value):  # it would break lists and lines of logs
        raise ConfigError(f"{option} must be on one line, without control characters; got {short(value)}")
    return value
