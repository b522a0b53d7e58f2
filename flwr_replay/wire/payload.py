"""Payloads, and their translation to and from Flower's records.

A payload is a frozen dataclass. Every field declares its kind. An undeclared value cannot be encoded, and is refused
when it arrives. A payload fills at most three Flower records: `arrays` (weights under the names of their state dict, or
one array per field), `metrics` (statistics) and `config` (instructions, notices). So any ClientApp of Flower's can read
`message.content["arrays"]`, without knowing this package.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple, Self, get_args, get_type_hints

import numpy as np
from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import ArrayLike, NDArray

from flwr_replay.errors import WireError
from flwr_replay.wire.bounds import LARGEST_NUMBER, MOST_COUNTED
from flwr_replay.wire.fields import RECORD_OF, Field, Kind, instruction
from flwr_replay.wire.masked import MASKED, is_masked
from flwr_replay.wire.records import StateDict, Weights, array_record, arrays_in, config_in, metrics_in, opened
from flwr_replay.wire.sealed import SEALED, is_sealed

__all__ = ["CLIENT_APP_RAISED", "REQUESTS", "LedgerRow", "Payload", "Request", "asked_for", "request_of", "rows"]

CLIENT_APP_RAISED = 2  # Flower's error code if a ClientApp's function raises or does not exist


@dataclass(frozen=True)
class ScalarType:
    """The type of a field that is not an array: a plain value, or a list of them."""

    base: type
    listed: bool

    @classmethod
    def of(cls, hint: Any) -> ScalarType:
        """Read an annotation: `int`, `float | None`, `Sequence[int]`."""
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        if not kinds:
            return cls(hint, False)
        optional = type(None) in get_args(hint)
        return cls.of(kinds[0]) if optional else cls(kinds[0], True)

    def fits(self, values: Sequence[Any], kind: Kind) -> bool:
        """Say whether all values are of this type; a number's size is bounded, and no count is negative."""
        types = (int, float) if self.base is float else (self.base,)
        for actual in set(map(type, values)):
            if not issubclass(actual, types) or (actual is bool and self.base is not bool):
                return False
        if kind == "notice" or self.base not in (int, float):
            return True
        if self.base is float:
            return all(abs(value) <= LARGEST_NUMBER for value in values)  # NaN is not
        most = max(values, default=0) if kind == "statistic" else 0  # an instruction may be a seed
        return min(values, default=0) >= 0 and most <= MOST_COUNTED

    def __str__(self) -> str:
        return f"a list of {self.base.__name__}" if self.listed else self.base.__name__


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Base of every message's content; subclasses are frozen keyword-only dataclasses."""

    @classmethod
    @cache
    def declared(cls) -> dict[str, Field]:
        """Return the declarations by field name; a field without one is an error of the payload's author.

        A field's `dp` holds only for the class that declares the field. A subclass may be the answer of a method that
        does not train by DP-SGD. So an inherited field is unprotected unless the subclass declares it again.
        """
        fields, annotated = {}, inspect.get_annotations(cls)
        for field in dataclasses.fields(cls):
            if "wire" not in field.metadata:
                raise WireError(f"{cls.__name__}.{field.name} must declare its kind: use model(), per_sample() …")
            declaration = field.metadata["wire"]
            kept = {} if field.name in annotated else {"dp": ""}
            key = declaration.key or field.name.replace("_", "-")
            fields[field.name] = dataclasses.replace(declaration, key=key, **kept)
        in_arrays = [field for field in fields.values() if RECORD_OF[field.kind] == "arrays"]
        if len(in_arrays) > 1 and any(field.shape == "state dict" for field in in_arrays):
            raise WireError(
                f"{cls.__name__} must declare either one state dict or separate arrays, since the ledger counts them "
                "differently: split the payload"
            )
        return fields

    @classmethod
    @cache
    def by_key(cls) -> dict[str, Field]:
        """Return the declarations by the fields' keys in records."""
        return {field.key: field for field in cls.declared().values()}

    @classmethod
    def blank(cls, sent: Weights | None = None, **known: Any) -> Self:
        """Return a payload as large as a real one: numbers are 0, weights as they were sent, or the declared part.

        `known` are other values, by field. Fields with a default keep it, but what may be withheld is there.
        """
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            declared = cls.declared()[field.name]
            if declared.shape == "state dict" and sent is not None:
                values[field.name] = declared.part(opened(sent)) if callable(declared.part) else sent
            elif field.name in cls.scalar_types() and (field.default is dataclasses.MISSING or declared.withheld):
                kind = cls.scalar_types()[field.name][1]
                values[field.name] = [] if kind.listed else kind.base()
        return cls(**{**values, **known})

    def encode(self) -> RecordDict:
        """Translate to Flower's records; arrays are copied, and the payload is unchanged."""
        arrays, metrics, config = self.contents()
        content = RecordDict()
        if arrays is not None:
            content["arrays"] = array_record(arrays)
        if metrics:
            content["metrics"] = MetricRecord(metrics)
        if config:
            content["config"] = ConfigRecord(config)
        return content

    def contents(self) -> tuple[Weights | None, dict[str, Any], dict[str, Any]]:
        """Split into named arrays (None if the payload declares none), metrics and config, with hyphens in keys."""
        arrays: Weights | None = None
        metrics: dict[str, Any] = {}
        config: dict[str, Any] = {}
        for name, field in self.declared().items():
            value = getattr(self, name)
            record = RECORD_OF[field.kind]
            if record == "arrays":
                if field.shape == "state dict" or isinstance(value, dict):  # of other fields: all arrays, sealed
                    arrays = value
                elif value is not None:
                    arrays = {**opened(arrays or {}), field.key: _checked(type(self).__name__, name, field, value)}
            elif value not in (None, "", [], ()):  # Flower cannot count the bytes of an empty value
                target = metrics if record == "metrics" else config
                target[field.key] = list(value) if isinstance(value, (list, tuple)) else value
        return arrays, metrics, config

    @classmethod
    def decode(cls, content: RecordDict) -> Self:
        """Translate from Flower's records.

        Raises
        ------
        WireError
            If the payload does not declare a record or key that arrived, or if a declared one is missing.
        """
        list(rows(content, cls))
        return cls.of(arrays_in(content), cls.check_scalars(content))

    @classmethod
    def check_scalars(cls, content: RecordDict) -> dict[str, Any]:
        """Check the types and values of metrics, instructions and notices; return them by key.

        A WireError if one is undeclared, of another type than declared, not finite, too large, or a negative count.
        """
        config, metrics = config_in(content), metrics_in(content)
        scalars, declared = {**config, **metrics}, cls.by_key()
        for record, names in (("metrics", metrics), ("config", config)):
            for name in names:  # a user's own ServerApp may add undeclared instructions, but no metrics
                if (name in declared or record == "metrics") and (
                    name not in declared or RECORD_OF[declared[name].kind] != record
                ):
                    raise WireError(
                        f"{cls.__name__} does not declare {name!r} in {record}: declare it, or leave it out"
                    )
        for name, (field, kind) in cls.scalar_types().items():
            value = scalars.get(field.key)
            if value is None:
                continue
            listed = isinstance(value, list)
            if listed != kind.listed or not kind.fits(value if listed else [value], field.kind):
                raise WireError(
                    f"{cls.__name__}.{name} must be {kind}, finite, and not negative if a count; numbers reach to "
                    f"{LARGEST_NUMBER:g}, counts to {MOST_COUNTED:.0e}; got {str(value)[:40]}"
                )
        return scalars

    @classmethod
    @cache
    def scalar_types(cls) -> dict[str, tuple[Field, ScalarType]]:
        """Return declaration and type of every field that is not an array."""
        hints = get_type_hints(cls)
        fields = {name: field for name, field in cls.declared().items() if RECORD_OF[field.kind] != "arrays"}
        return {name: (field, ScalarType.of(hints[name])) for name, field in fields.items()}

    @classmethod
    def of(cls, arrays: StateDict, scalars: Mapping[str, Any]) -> Self:
        """Build from named arrays and scalars with hyphens in their keys; undeclared scalars are ignored."""
        values: dict[str, Any] = {}
        sealed = is_sealed(arrays)  # then the first of several arrays stands for all
        for name, field in cls.declared().items():
            if field.shape == "state dict":
                values[name] = arrays
            elif RECORD_OF[field.kind] == "arrays" and sealed:
                values[name] = None if any(value is arrays for value in values.values()) else arrays
            elif RECORD_OF[field.kind] == "arrays":
                if field.key in arrays:
                    values[name] = _checked(cls.__name__, name, field, arrays[field.key])
            elif field.key in scalars:
                values[name] = scalars[field.key]
        try:
            return cls(**values)
        except TypeError as error:
            raise WireError(f"{cls.__name__} arrived incomplete: {error}") from None


REQUESTS: dict[str, type[Request]] = {}


@dataclass(frozen=True, kw_only=True)
class Request(Payload):
    """Base of the server's requests; every request declares its stage and the payload that answers it."""

    stage_name: ClassVar[str]
    answer: ClassVar[type[Payload]]
    message_type: ClassVar[str]

    stage: str = instruction(default="")
    exchange: int = instruction("exchanges", default=0, key="server-round")

    def __init_subclass__(cls, *, stage: str, answer: type[Payload], message_type: str = "train") -> None:
        cls.stage_name, cls.answer, cls.message_type = stage, answer, message_type
        if (first := REQUESTS.setdefault(stage, cls)).__module__ != cls.__module__:
            raise WireError(f"every stage is one request's; {cls.__module__} declares {stage!r} of {first.__module__}")
        REQUESTS[stage] = cls

    def __post_init__(self) -> None:
        object.__setattr__(self, "stage", self.stage_name)

    @classmethod
    def added(cls, instructions: Mapping[str, Any]) -> StateDict:
        """Return blank arrays that the answer to these instructions has beside weights of the form that was sent."""
        return {}


def request_of(message: Message) -> type[Request] | None:
    """Return the class of a message's request; None if it is not a request of this package."""
    return REQUESTS.get(str(config_in(message.content).get("stage", ""))) if message.has_content() else None


def asked_for(request: type[Request], instructions: Mapping[str, Any]) -> list[type[Payload]]:
    """Return the answers that a request asks for: its own, and at the roll call those of all stages of the run."""
    stages = [str(stage) for stage in instructions.get("stages", [])]
    return [request.answer, *(REQUESTS[stage].answer for stage in stages if stage in REQUESTS)]


class LedgerRow(NamedTuple):
    """One field of one message, as in the ledger."""

    field: str
    kind: Kind
    bytes: int
    protection: str = "none"


def rows(
    content: RecordDict, declared: type[Payload] | None, extra: frozenset[str] = frozenset()
) -> Iterator[LedgerRow]:
    """Yield a message's fields; their bytes sum to those of its records.

    `declared` is the payload's class; None accepts any message, and takes a value's kind from its record. `extra` are
    keys that a user's own ServerApp added to the config record. A record or key that is not declared is a WireError.
    """
    fields = declared.by_key() if declared else {}
    first = next((name for name, field in fields.items() if RECORD_OF[field.kind] == "arrays"), "")
    defaults: dict[str, Kind] = {"arrays": "model", "metrics": "statistic", "config": "instruction"}
    for record_name, record in content.items():
        if record_name not in defaults:
            raise WireError(f"a message may have the records arrays, metrics and config only; got {record_name!r}")
        sealed = record_name == "arrays" and is_sealed(record) and bool(first)
        if sealed or (record_name == "arrays" and (not declared or (first and fields[first].shape == "state dict"))):
            whole = sum(len(name) + _bytes(value) for name, value in record.items())
            hidden = SEALED if sealed else MASKED if is_masked(record) else "none"
            yield LedgerRow(first or "arrays", fields[first].kind if sealed else "model", whole, hidden)
            continue
        for name, value in record.items():
            size = len(name) + _bytes(value)
            if not declared or name in extra:
                yield LedgerRow(name, defaults[record_name], size)
            elif name in fields and RECORD_OF[fields[name].kind] == record_name:
                yield LedgerRow(name, fields[name].kind, size)
            else:
                raise WireError(
                    f"{declared.__name__} does not declare {name!r} in {record_name}; declare the field with its kind "
                    f"or leave it out. Declared: {', '.join(fields)}"
                )


def _bytes(value: object) -> int:
    """Count bytes as Flower does: a bool has 1, a number 8, a text or array its length, a list the sum."""
    if type(value) in (int, float):  # most are
        return 8
    if isinstance(value, Array):
        return len(value.data)
    if isinstance(value, list):
        texts = isinstance(value[0], (str, bytes)) if value else False
        return sum(map(len, value)) if texts else _bytes(value[0]) * len(value) if value else 0
    if isinstance(value, (str, bytes)):
        return len(value)
    return 1 if isinstance(value, bool) else 8


def _checked(payload: str, name: str, field: Field, value: ArrayLike) -> NDArray[Any]:
    array = np.asarray(value)
    if field.dtypes and array.dtype.name not in field.dtypes:
        raise WireError(f"{payload}.{name} is declared {' or '.join(field.dtypes)}; got {array.dtype.name}")
    if field.shape and "..." not in field.shape and len(field.shape.split()) != array.ndim:
        raise WireError(f"{payload}.{name} is declared with shape ({field.shape}); got {array.shape}")
    return array
