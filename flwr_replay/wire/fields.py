"""Declarations of a payload's fields: kind, shape, unit and protection."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "RECORD_OF",
    "Field",
    "Kind",
    "Meaning",
    "instruction",
    "model",
    "notice",
    "per_sample",
    "statistic",
    "synthetic",
]

Kind = Literal["model", "per-sample", "per-sample-raw", "synthetic", "statistic", "instruction", "notice"]
Meaning = Literal[
    "weights",
    "generator weights",
    "gradient",
    "activations",
    "codes",
    "scales",
    "labels",
    "gradients at a cut",
    "images",
    "class sums",
]
Part = Callable[[Mapping[str, Any]], dict[str, Any]]  # from named arrays to those of a part
RECORD_OF: dict[Kind, str] = {
    "model": "arrays",
    "per-sample": "arrays",
    "per-sample-raw": "arrays",
    "synthetic": "arrays",
    "statistic": "metrics",
    "instruction": "config",
    "notice": "config",
}


@dataclass(frozen=True)
class Field:
    """The declaration of one field: kind, shape, unit and protection."""

    kind: Kind
    shape: str = ""  # letters as in the code, e.g. "N C H W"; "state dict" for named weights; "" for a scalar
    dtypes: tuple[str, ...] = ()  # of a per-sample or synthetic array; empty: any
    unit: str = ""
    part: bool | Part = False  # weights: some part of the received model, or this part of it, not all
    optional: bool = False  # weights: there are none in messages between the first and the last of a training
    dp: str = ""  # mechanisms, joined by +, each of which makes it differentially private if on; never inherited
    withheld: bool = False  # not sent if another field of its payload is under DP
    key: str = ""  # in records; empty: the field's name with hyphens
    public: bool = False  # a number of examples, which every privacy claim declares public
    means: Meaning | None = None  # what the numbers of an array are; `lab.registry` says what can be tried
    counted: bool = False  # a test's number of examples or pixels; a policy may release these counts only


def _declare(declaration: Field, default: Any) -> Any:
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata={"wire": declaration})
    return dataclasses.field(default=default, metadata={"wire": declaration})


def model(part: bool | Part = False, dp: str = "", means: Meaning = "weights", optional: bool = False) -> Any:
    """Declare weights or a gradient: a state dict, name to array; `part` if it is a part of the received model, and
    where the server can check it, which.

    With `optional` a message may have none. They are then None before it is encoded, and empty after it is decoded.
    """
    declaration = Field("model", "state dict", part=part, dp=dp, means=means, optional=optional)
    return _declare(declaration, None if optional else dataclasses.MISSING)


def per_sample(
    shape: str, *dtypes: str, means: Meaning, raw: bool = False, dp: str = "", default: Any = dataclasses.MISSING
) -> Any:
    """Declare an array with one row for each example, a function of single patients; `raw`: the examples themselves."""
    return _declare(Field("per-sample-raw" if raw else "per-sample", shape, dtypes, dp=dp, means=means), default)


def synthetic(shape: str, *dtypes: str, means: Meaning, dp: str = "") -> Any:
    """Declare an array with one row for each example that a generator has drawn."""
    return _declare(Field("synthetic", shape, dtypes, dp=dp, means=means), dataclasses.MISSING)


def statistic(
    unit: str,
    default: Any = dataclasses.MISSING,
    dp: str = "",
    withheld: bool = False,
    public: bool = False,
    counted: bool = False,
) -> Any:
    """Declare a number, or a list of numbers, computed from an institution's data; all else is as in `Field`."""
    return _declare(Field("statistic", unit=unit, dp=dp, withheld=withheld, public=public, counted=counted), default)


def instruction(unit: str = "", default: Any = dataclasses.MISSING, key: str = "") -> Any:
    """Declare an instruction of the server's; it depends on no institution's data. `key`: its name in records."""
    return _declare(Field("instruction", unit=unit, key=key), default)


def notice(unit: str = "", default: Any = dataclasses.MISSING) -> Any:
    """Declare a text about the institution itself: its name, its reason to refuse; `unit` says what it is."""
    return _declare(Field("notice", unit=unit), default)
