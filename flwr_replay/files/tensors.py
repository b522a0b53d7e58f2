"""Named arrays as files, in safetensors' format: https://github.com/huggingface/safetensors (Format).

The library's own `save` copies all arrays first, which took half the time of a save. So files are laid out here, and
the library reads them. The header begins with a checksum of all other bytes of the file.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from flwr_replay.errors import DamagedError, WireError
from flwr_replay.files.atomic import fits, parsed, read_bytes, write_atomic
from flwr_replay.files.disk import reading

__all__ = [
    "OF_RUN",
    "StateDict",
    "digest",
    "nested",
    "read_own",
    "read_tensors",
    "read_texts",
    "read_with_texts",
    "unnested",
    "write_tensors",
]

T = TypeVar("T")

StateDict = dict[str, NDArray[Any]]  # a model's weights and buffers, or other named arrays

MOST = 10**8  # bytes of a header that safetensors reads
OF_RUN = "of-run"  # key of a text: the run whose file it is
METADATA = "__metadata__"  # the header's entry of texts; no array has this name
HEAD = b'{"__metadata__": {"crc32": "'  # the header's first bytes, after eight bytes with its length
AT = slice(8 + len(HEAD), 16 + len(HEAD))  # the checksum's place, eight hexadecimal digits

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
    """Write named arrays to a file, completely or not at all.

    Parameters
    ----------
    path : Path
        The file.
    arrays : Mapping[str, NDArray[Any]]
        Arrays of any shape and memory order.
    metadata : Mapping[str, str] | None
        Texts for the file's metadata.
    to_disk, over
        As for `flwr_replay.files.atomic.write_atomic`.

    Raises
    ------
    TypeError
        If the format lacks an array's dtype.
    """
    laid = [  # the largest item sizes first, so that every array begins at a multiple of its item size
        (name, np.asarray(array, array.dtype.newbyteorder("<"), order="C"))
        for name, array in sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    ]
    texts = f'"{METADATA}": {json.dumps({"crc32": "", **(metadata or {})})}'
    entries = _entries(tuple((name, array.dtype, array.shape) for name, array in laid))
    header = f"{{{', '.join([texts, *entries])}}}".encode()
    header += b" " * ((len(_digits(0)) - len(header)) % 8)
    before = (len(header) + len(_digits(0))).to_bytes(8, "little") + HEAD
    chunks: list[bytes | memoryview] = [header.removeprefix(HEAD), *(array.data for _, array in laid)]
    checksum = crc32(before)
    for chunk in chunks:
        checksum = crc32(chunk, checksum)
    write_atomic(path, [before, _digits(checksum), *chunks], to_disk, over=over)


def read_tensors(path: Path) -> StateDict:
    """Read named arrays, which are writable.

    Raises
    ------
    DamagedError
        If the file is missing or damaged. Files of older versions have no checksum; only their format is checked.
    """
    return read_with_texts(path)[0]


def read_with_texts(path: Path) -> tuple[StateDict, dict[str, str]]:
    """Read named arrays and the metadata's texts, as `read_tensors` does."""
    data = read_bytes(path)
    try:
        if data[8 : AT.start] == HEAD:
            stored, view = data[AT], memoryview(data)
            if stored != _digits(crc32(view[AT.stop :], crc32(view[: AT.start]))):
                raise ValueError("its checksum differs")
        arrays, header = load(data), json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(
            f"{path} must be as it was written; it is damaged ({error}): restore it from a backup, or begin a new run"
        ) from None
    texts = header.pop(METADATA, {})
    return {name: arrays[name] for name in header}, texts  # in the file's order, which `load` does not keep


def read_own(path: Path, run: str) -> StateDict:
    """Read what a run has kept for itself, as `read_tensors` does; files of older versions name no run.

    Raises
    ------
    DamagedError
        Also if it is another run's.
    """
    arrays, texts = read_with_texts(path)
    if (owner := texts.get(OF_RUN, run)) != run:
        raise DamagedError(f"{path} must be of the run {run}; it names {owner}: put the run's own file back")
    return arrays


def read_texts(path: Path) -> dict[str, str]:
    """Read the metadata's texts without the arrays; their checksum is not checked.

    Raises
    ------
    DamagedError
        If there are none.
    """
    with reading(path), open(path, "rb") as file:
        header = parsed(file.read(min(int.from_bytes(file.read(8), "little"), MOST)))
    if not fits(header, {METADATA: {...: str}}):
        raise DamagedError(f"{path} must be as it was written; it is damaged: restore it from a backup")
    return dict(header[METADATA])


def nested(groups: Mapping[str, Mapping[str, T]], *, mark: str = ".") -> dict[str, T]:
    """Join the named arrays of several groups into one mapping, in the order of the groups.

    Examples
    --------
    >>> nested({"model": {"head.bias": 1}, "optimizer": {"0.step": 2}})
    {'model.head.bias': 1, 'optimizer.0.step': 2}
    """
    return {f"{group}{mark}{name}": array for group, arrays in groups.items() for name, array in arrays.items()}


def unnested(arrays: Mapping[str, T], *, mark: str = ".", only: Sequence[str] | None = None) -> dict[str, dict[str, T]]:
    """Split a mapping of `nested` into its groups; a missing group is empty.

    Names without the mark belong to no group. If `only` is given, other groups and names are refused, so that a sender
    cannot add arrays.

    Raises
    ------
    WireError
        If a name is in none of the groups in `only`.

    Examples
    --------
    >>> groups = unnested({"model.head.bias": 1, "optimizer.0.step": 2, "w": 3})
    >>> groups["model"], groups["optimizer"], groups["proxy"]
    ({'head.bias': 1}, {'0.step': 2}, {})
    """
    groups: dict[str, dict[str, T]] = defaultdict(dict)
    for name, array in arrays.items():
        group, separator, rest = name.partition(mark)
        if only is not None and not (separator and group in only):
            allowed = " or ".join(f"{group}{mark}…" for group in only)
            raise WireError(
                f"arrays must be named {allowed}; got {name!r}" if only else f"no arrays belong here; got {name!r}"
            )
        if separator:
            groups[group][rest] = array
    return groups


def digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and numbers: `sha256:` and 64 hexadecimal digits."""
    sha = sha256()
    for name, array in sorted(arrays.items()):
        sha.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        sha.update(np.ascontiguousarray(array).data)
    return f"sha256:{sha.hexdigest()}"


def _digits(checksum: int) -> bytes:
    return f"{checksum:08x}".encode()


@lru_cache(maxsize=256)  # the same models are written many times
def _entries(form: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> list[str]:
    """Return the header's entry of each array, by name, dtype and shape."""
    entries, end = [], 0
    for name, dtype, shape in form:
        if dtype.name not in CODES:
            raise TypeError(f"a safetensors file has arrays of {', '.join(CODES)}; {name!r} is {dtype}")
        begin, end = end, end + dtype.itemsize * prod(shape)
        entry = {"dtype": CODES[dtype.name], "shape": shape, "data_offsets": (begin, end)}
        entries.append(f"{json.dumps(name)}: {json.dumps(entry)}")
    return entries
