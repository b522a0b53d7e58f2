"""Values as words: of an option as Hydra wants them quoted, of TOML, and of Flower's --node-config."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import isinf
from pathlib import Path
from typing import Any

from flwr_replay.errors import ConfigError

__all__ = ["digits", "node_config", "quoted", "toml_text", "vanishes"]


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
