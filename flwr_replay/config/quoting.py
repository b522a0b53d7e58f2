"""Values as words, written and read: of an option by Hydra's grammar, of TOML, and of Flower's --node-config."""

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache
from math import isinf
from pathlib import Path
from typing import Any

from flwr_replay.config.renamed import key_today
from flwr_replay.errors import ConfigError

__all__ = ["NUMBER", "digits", "key_of", "node_config", "quoted", "short", "toml_text", "value_of", "vanishes"]

SHOWN = 80  # characters of a wrong value in an error line
WORDS = ("training.augment",)  # options that take words with commas between
QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.S)
DIGITS = "[0-9]+(?:_[0-9]+)*"  # as Hydra and Python read them; in YAML 1.2 that is a text
NUMBER = re.compile(rf"[-+]?(?:{DIGITS}\.?(?:{DIGITS})?|\.{DIGITS})(?:[eE][-+]?{DIGITS})?")


def quoted(value: Any) -> str:
    """Write a value so that `compose` reads it back.

    >>> print(quoted(["a b", 1]), quoted(1e-5), quoted(True))
    ['a b',1] 1e-05 true
    """
    from hydra.core.override_parser.types import Quote, QuotedString

    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(quoted, value)) + "]"
    if isinstance(value, (str, Path)):
        return QuotedString(str(value), Quote.single).with_quotes()
    return json.dumps(value)


def key_of(option: str) -> str:
    """Return the name in `key=value`, in which a hyphen is an underscore, as it is today."""
    return key_today(option.partition("=")[0].replace("-", "_"))


def digits(text: str) -> str:
    """Return a number's text for `int` and `float`, which read other scripts' digits and skip underscores.

    Raises
    ------
    ValueError
        If it has either.

    >>> int(digits("31"))
    31
    """
    if "_" in text or not text.isascii():
        raise ValueError(f"a number has the digits 0 to 9; got {text!r}")
    return text


def vanishes(number: str) -> bool:
    """Return whether a decimal number is so large or small that a float would be infinite, or 0.

    >>> [vanishes(number) for number in ("1e-400", "-1e400", "0e-400", "1e-300")]
    [True, True, False, False]
    """
    value = float(number)
    return isinf(value) or (value == 0 and bool(re.match(r"[^eE]*[1-9]", number)))


def toml_text(text: str) -> str:
    r"""Write a text as a TOML string.

    >>> print(toml_text('a "b"'))
    "a \"b\""
    """
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def node_config(owned: Mapping[str, str]) -> str:
    r"""Write what a SuperNode owns as the value of `--node-config`.

    Flower ends a text at the next quote, whatever stands before it, and reads the rest as TOML.

    >>> print(node_config({"name": "a", "data": '/the "images"'}))
    name="a" data='/the "images"'

    Raises
    ------
    ConfigError
        If a text has both kinds of quotes, or control characters.
    """
    words = []
    for key, text in owned.items():
        plain = '"' not in text
        if not text.isprintable() or not (plain or "'" not in text):
            raise ConfigError(
                f"{key} in --node-config may have one kind of quotes and no control characters; got {text!r}: rename it"
            )
        words.append(f"{key}={toml_text(text) if plain else chr(39) + text + chr(39)}")
    return " ".join(words)


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
