"""Named arrays, metrics and instructions as Flower's records, and back."""

import io
import math
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from numpy.typing import NDArray

from flwr_replay.errors import WireError
from flwr_replay.files.tensors import StateDict

__all__ = [
    "StateDict",
    "Weights",
    "array_record",
    "arrays_in",
    "config_in",
    "decoded",
    "metrics_in",
    "opened",
    "undecoded",
]
Record = TypeVar("Record", ArrayRecord, MetricRecord, ConfigRecord)
Weights = StateDict | ArrayRecord  # the server does not decode a record that it only passes on
NUMPY_FORMAT = "numpy.ndarray"  # Flower's name for arrays in NumPy's file format


def arrays_in(content: RecordDict) -> StateDict:
    """Decode a message's arrays; empty without such a record."""
    return opened(undecoded(content) or {})


def undecoded(content: RecordDict) -> ArrayRecord | None:
    """Return a message's arrays as they are; None without.

    Flower's `array_records` makes reference cycles, which keep large arrays until Python looks for such.
    """
    return _record(content, "arrays", ArrayRecord)


def metrics_in(content: RecordDict) -> dict[str, Any]:
    """Return a message's metrics."""
    record = _record(content, "metrics", MetricRecord)
    return {} if record is None else dict(record.items())  # of the record itself `dict` would check every item


def config_in(content: RecordDict) -> dict[str, Any]:
    """Return a message's instructions and notices."""
    record = _record(content, "config", ConfigRecord)
    return {} if record is None else dict(record.items())


def _record(content: RecordDict, name: str, kind: type[Record]) -> Record | None:
    """Return a record by name; a record of another type is refused, since not all checks would read it."""
    record = content.get(name)
    if record is not None and type(record) is not kind:
        raise WireError(f"record {name!r} must be of type {kind.__name__}; got {type(record).__name__}")
    return record


def array_record(arrays: Weights) -> ArrayRecord:
    """Encode named arrays as a new record; a record is copied, with the same arrays and Flower's cached hashes."""
    if isinstance(arrays, ArrayRecord):
        return arrays.copy()
    record = ArrayRecord()  # filled item by item: the constructor would copy every array again
    for name, value in arrays.items():
        record[name] = _encoded(np.asarray(value))
    return record


def opened(weights: Weights) -> StateDict:
    """Decode weights, unless they are decoded already; the arrays are read-only views of a record's bytes."""
    return {name: decoded(array) for name, array in weights.items()} if isinstance(weights, ArrayRecord) else weights


def _encoded(array: NDArray[Any]) -> Array:
    """Encode an array as Flower does, in NumPy's file format, with one copy of the values instead of three."""
    if array.dtype.hasobject:
        raise WireError(f"arrays in messages must hold numbers or texts; got dtype {array.dtype}")
    array = np.ascontiguousarray(array).reshape(array.shape)
    data = b"".join([_header(array.dtype.str, array.shape), array.data])
    return Array(_name(array.dtype), array.shape, NUMPY_FORMAT, data)


@lru_cache(maxsize=64)
def _name(dtype: np.dtype[Any]) -> str:
    return str(dtype)


@lru_cache(maxsize=1024)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


def decoded(array: Array) -> NDArray[Any]:
    """Decode an array as a read-only view of its bytes; comparing the header is faster than parsing it.

    Bytes that are not an array as declared are a WireError.
    """
    try:
        dtype, size = np.dtype(array.dtype), math.prod(array.shape)
        start = len(array.data) - size * dtype.itemsize
        if array.stype == NUMPY_FORMAT and array.data[:start] == _header(dtype.str, tuple(array.shape)):
            return np.frombuffer(array.data, dtype, size, start).reshape(array.shape)
        decoded = array.numpy()
        whole = len(_encoded(decoded).data)
    except Exception as error:  # of any kind, since the bytes come from another machine
        raise WireError(f"an array must be in NumPy's file format; it cannot be read: {error}") from None
    if len(array.data) != whole:
        raise WireError(f"an array's bytes must be its header and numbers only, {whole} bytes; got {len(array.data)}")
    if decoded.shape != tuple(array.shape) or decoded.dtype != dtype:
        raise WireError(f"an array must be as declared, {array.dtype} {tuple(array.shape)}; got {decoded.shape}")
    return decoded
