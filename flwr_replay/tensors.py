"""Named arrays as files, in safetensors' format: https://github.com/huggingface/safetensors (Format).

The library's own `save` copies all arrays before they are written, which took half of the time of a save; so files are
laid out here, and the library reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.files import write_atomic
from flwr_replay.wire import StateDict

__all__ = ["digest", "under", "write_tensors"]

CODES = {  # safetensors' names of NumPy's dtypes
    "bool": "BOOL",
    "complex64": "C64",
    **{f"{kind}{8 * size}": f"{kind[0].upper()}{8 * size}" for kind in ("int", "uint") for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": f"F{8 * size}" for size in (2, 4, 8)},
}


def write_tensors(
    path: Path,
    arrays: Mapping[str, NDArray[Any]],
    metadata: Mapping[str, str] | None = None,
    *,
    to_disk: bool = True,
    over: Path | None = None,
) -> None:
    """Write named arrays to a file, whole or not at all.

    Parameters
    ----------
    path : Path
        Of the file.
    arrays : Mapping[str, NDArray[Any]]
        Numbers of any shape and order.
    metadata : Mapping[str, str] | None
        Texts beside them.
    to_disk, over
        As for `flwr_replay.files.write_atomic`.

    Raises
    ------
    TypeError
        If the format has no such dtype.
    """
    laid = [  # the largest numbers first, so that all begin at multiples of their sizes
        (name, np.asarray(array, array.dtype.newbyteorder("<"), order="C"))
        for name, array in sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    ]
    told = [f'"__metadata__": {json.dumps(dict(metadata))}'] if metadata else []
    entries = _entries(tuple((name, array.dtype, array.shape) for name, array in laid))
    header = f"{{{', '.join([*told, *entries])}}}".encode()
    header += b" " * (-len(header) % 8)
    parts: list[bytes | memoryview] = [len(header).to_bytes(8, "little"), header, *(array.data for _, array in laid)]
    write_atomic(path, parts, to_disk, over=over)


def under(prefix: str, arrays: StateDict) -> StateDict:
    """Return the arrays whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and numbers, `sha256:` and 64 hexadecimal digits."""
    found = sha256()
    for name, array in sorted(arrays.items()):
        found.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(array).data)
    return f"sha256:{found.hexdigest()}"


@lru_cache(maxsize=256)  # the same models are written again and again
def _entries(form: tuple[tuple[str, Any, tuple[int, ...]], ...]) -> list[str]:
    """Return the header's entry of each array, by name, dtype and shape."""
    entries, end = [], 0
    for name, dtype, shape in form:
        if dtype.name not in CODES:
            raise TypeError(f"a safetensors file has arrays of {', '.join(CODES)}; {name!r} is {dtype}")
        begin, end = end, end + dtype.itemsize * prod(shape)
        entry = {"dtype": CODES[dtype.name], "shape": shape, "data_offsets": (begin, end)}
        entries.append(f"{json.dumps(name)}: {json.dumps(entry)}")
    return entries
