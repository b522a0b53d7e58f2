"""How a payload declares its fields: what each is about, its form and its unit."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["RECORD_OF", "Field", "Kind", "instruction", "model", "notice", "per_sample", "statistic"]

Kind = Literal["model", "per-sample", "per-sample-raw", "synthetic", "statistic", "instruction", "notice"]
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
    """The declaration of one field: what it is about, its form and its unit."""

    kind: Kind
    shape: str = ""  # letters as in the code, e.g. "N C H W"; "state dict" for named weights; "" for a scalar
    dtypes: tuple[str, ...] = ()  # of a per-sample or synthetic array; empty: any
    unit: str = ""
    part: bool = False  # of the model that came, not all of it
    dp: str = ""  # the mechanism that makes it differentially private, where that is switched on; never inherited
    withheld: bool = False  # not sent where another field of its payload is made private
    public: bool = False  # declared public wherever a claim is made: it says how many examples there are
    counted: bool = False  # of a test: a number of examples or pixels, which a policy may let leave where no more may


def _declare(declaration: Field, default: Any) -> Any:
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata={"wire": declaration})
    return dataclasses.field(default=default, metadata={"wire": declaration})


def model(part: bool = False, dp: str = "") -> Any:
    """Declare weights: a state dict, name to array; `part` if it is not the whole model that came."""
    return _declare(Field("model", "state dict", part=part, dp=dp), dataclasses.MISSING)


def per_sample(shape: str, *dtypes: str, raw: bool = False, default: Any = dataclasses.MISSING) -> Any:
    """Declare an array with one row per patient's example: a function of single patients; `raw`: the example itself."""
    return _declare(Field("per-sample-raw" if raw else "per-sample", shape, dtypes), default)


def statistic(
    unit: str,
    default: Any = dataclasses.MISSING,
    dp: str = "",
    withheld: bool = False,
    public: bool = False,
    counted: bool = False,
) -> Any:
    """Declare a number, or a list of numbers, computed from an institution's data; what else is as in `Field`."""
    return _declare(Field("statistic", unit=unit, dp=dp, withheld=withheld, public=public, counted=counted), default)


def instruction(unit: str = "", default: Any = dataclasses.MISSING) -> Any:
    """Declare what the server asks for; it carries nothing of any institution's data."""
    return _declare(Field("instruction", unit=unit), default)


def notice(default: Any = dataclasses.MISSING) -> Any:
    """Declare a text or fact about the institution itself: its name, why it refuses."""
    return _declare(Field("notice"), default)
