"""An option's value, by Hydra's grammar: a number, true, false, a word, or a list of these."""

from __future__ import annotations

import re
from copy import deepcopy
from functools import lru_cache
from typing import Any

from flwr_replay.config.quoting import vanishes
from flwr_replay.errors import ConfigError

__all__ = ["short", "value_of"]

SHOWN = 80  # characters of a wrong value in an error line
WORDS = ("training.augment",)  # options that take words with commas between
QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.S)
DIGITS = "[0-9]+(?:_[0-9]+)*"  # as Hydra and Python read them; in YAML 1.2 that is a text
NUMBER = re.compile(rf"[-+]?(?:{DIGITS}\.?(?:{DIGITS})?|\.{DIGITS})(?:[eE][-+]?{DIGITS})?")


def value_of(key: str, full: str, text: str) -> Any:
    """Parse an option's value; `full` is the option's name with its section, `key` the one that the user wrote."""
    if full in WORDS and re.fullmatch(r"\w+(,\w+)+", text):  # for Hydra that would be a sweep
        return text
    option = key.replace("_", "-")
    if (parsed := _parsed(text)) is None:
        raise ConfigError(
            f"the value of {option} must be a number, true, false, a word, or a list [a,b]; got {short(text)}: quote "
            f"any other text, \"{option}='…'\""
        )
    (value,) = parsed
    if "${" in str(value):  # an interpolation, which would never be resolved
        raise ConfigError(f"an option must be a plain value without ${{...}}; got one in {option!r}: write the value")
    return deepcopy(value)


@lru_cache(maxsize=1024)  # a run that is resumed sets every option, and most of them to the same few values
def _parsed(text: str) -> tuple[Any] | None:
    """Parse a value with Hydra's grammar, without functions, sweeps and interpolations; None: it has none."""
    from hydra._internal.grammar.functions import Functions
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    for item in re.split(r"[\[\],]", QUOTED.sub("''", text)):
        if NUMBER.fullmatch(number := item.strip()):
            whole = number.lstrip("+-").isdecimal()  # `_typed` limits its digits
            if "_" in number or (vanishes(number) and not whole):
                return None
    try:
        override = OverridesParser(functions=Functions()).parse_override(f"value={text}")
        return None if override.is_sweep_override() else (override.value(),)
    except (HydraException, ValueError, RecursionError):
        return None


def short(value: Any) -> str:
    """Write a value for an error line."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
