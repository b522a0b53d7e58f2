"""Python values as the words of an option: texts quoted as Hydra wants them, lists in brackets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["quoted"]


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
