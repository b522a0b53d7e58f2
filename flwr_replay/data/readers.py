"""Readers of public data sets: digits, idx files, CIFAR-10, MedMNIST. They import their packages when they run.

A reader returns the splits train, test and, if there is one, val, as in the files. Or it returns one split "all", which
`datasets.load` divides. `load` also checks the data against the task.
"""

import contextlib
import csv
import gzip
import importlib
import io
import math
import pickletools
import re
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.sections import TaskConfig
from flwr_replay.errors import ConfigError, DataError, nearest, refuse_all
from flwr_replay.files.atomic import home, make_folder
from flwr_replay.files.table import plain
from flwr_replay.rng import derived_rng
from flwr_replay.terminal import installing

__all__ = [
    "SPLIT_SEED",
    "Raw",
    "again",
    "csv_rows",
    "data_root",
    "line_of",
    "medmnist_form",
    "read_cifar10",
    "read_digits",
    "read_idx",
    "read_medmnist",
    "shortened",
]

TORCHVISION_FOLDER = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}
IDX_UBYTE = 8  # the idx header's code for unsigned bytes
# Of a pickle: what stands for itself, what takes how much from the stack, and the names that make up an array.
LITERALS = {"BININT", "BININT1", "BININT2", "SHORT_BINSTRING", "BINSTRING", "SHORT_BINUNICODE", "BINUNICODE"}
LITERALS |= {"SHORT_BINBYTES", "BINBYTES"}
CONSTANTS: dict[str, Callable[[], Any]] = {
    **{"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple},
    **{"NONE": lambda: None, "NEWFALSE": lambda: False, "NEWTRUE": lambda: True},
}
TAKEN = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3, "APPEND": 1, "SETITEM": 2, "STACK_GLOBAL": 2, "REDUCE": 1, "BUILD": 1}
NDARRAY = {"numpy ndarray", "numpy dtype", "numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"}
SHOWN = 40  # characters of a cell in an error line
SPLIT_SEED = 0  # a fixed split: the run's seed must not move examples between train and test


@dataclass(frozen=True, eq=False)
class Raw:
    """One split as read, and the origins of examples and labels, for error lines.

    x is (N, C, H, W), bytes or float32; y is (N,), or (N, H, W) if labels are masks.
    """

    x: NDArray[np.uint8] | NDArray[np.float32]
    y: NDArray[Any]
    images: str
    labels: str
    sites: NDArray[np.str_] | None = None
    patients: NDArray[np.str_] | None = None


def read_digits(task: TaskConfig) -> dict[str, Raw]:
    """Read scikit-learn's 1,797 digits of 8 x 8 pixels, in a fixed random order; grey levels 0..16 become 0..255."""
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")  # importing it takes long
    table = np.loadtxt(str(file), delimiter=",")
    x = np.rint(table[:, :-1].reshape(-1, 1, 8, 8) * (255 / 16)).astype(np.uint8)
    order = derived_rng(SPLIT_SEED, "digits", "split").permutation(len(x))
    source = "scikit-learn's digits"
    return {"all": Raw(x[order], table[order, -1].astype(np.int64), source, source)}


# ---------------------------------------------------------------------------------------------------- idx (MNIST)


def read_idx(task: TaskConfig) -> dict[str, Raw]:
    """Read idx files as of MNIST, plain or .gz; if there is only the t10k split, divide it four to one."""
    root, inner = data_root(task), TORCHVISION_FOLDER.get(task.name, "")
    places = [root, root / inner / "raw"] if inner else [root]
    pairs = {split: _idx_pair(places, prefix) for split, prefix in (("train", "train"), ("test", "t10k"))}
    if not pairs["test"] and task.download:
        if not inner:
            names = " and task=".join(TORCHVISION_FOLDER)
            raise ConfigError(f"task.download=true downloads idx files of task={names} only; got task={task.name}")
        vision = getattr(importlib.import_module("torchvision.datasets"), inner)
        _fetch(root, inner, lambda scratch: vision(str(scratch), download=True))
        pairs = {split: _idx_pair(places, prefix) for split, prefix in (("train", "train"), ("test", "t10k"))}
    if not pairs["test"]:
        raise _missing(task, "t10k-images-idx3-ubyte (or .gz)", places)
    raws = {
        split: Raw(_read_idx(images, 3)[:, None], _read_idx(labels, 1), str(images), str(labels))
        for split, (images, labels) in ((split, pair) for split, pair in pairs.items() if pair)
    }
    return raws if "train" in raws else {"all": raws["test"]}


def _idx_pair(places: list[Path], prefix: str) -> tuple[Path, Path] | None:
    """Find the images and the labels of one split, which must be in one folder."""
    for place in places:
        images, labels = f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte"
        files = {
            name: [file for end in ("", ".gz") if (file := place / f"{name}{end}").is_file()]
            for name in (images, labels)
        }
        if files[images] and files[labels]:
            return files[images][0], files[labels][0]
        for rule, there, lacking in (("images need labels", images, labels), ("labels need images", labels, images)):
            if files[there]:
                raise DataError(f"{rule}; got {files[there][0]} without {lacking} in its folder: add it")
    return None


def _read_idx(path: Path, dims: int) -> NDArray[np.uint8]:
    """Read one idx file: two zero bytes, type, number of dimensions, big-endian sizes, then the values."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, OSError) as error:
        raise DataError(f"idx files must be complete; {path} cannot be read ({error}): {again(error)}") from None
    header = 4 + 4 * dims
    if len(data) < header or data[:4] != bytes([0, 0, IDX_UBYTE, dims]):
        raise DataError(
            f"an idx file of bytes in {dims} dimensions must start with 0000080{dims}; {path} starts with "
            f"{data[:4].hex() or 'nothing'}: it is another file, or damaged"
        )
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", dims, 4))
    if len(data) - header != math.prod(shape):
        raise DataError(
            f"{path} must hold {math.prod(shape)} bytes after its header, as that says; got {len(data) - header}: "
            "it is truncated or damaged, download it again"
        )
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


# ------------------------------------------------------------------------------------------------------- CIFAR-10


def read_cifar10(task: TaskConfig) -> dict[str, Raw]:
    """Read CIFAR-10's Python batches; the data folder contains `cifar-10-batches-py`, or is it."""
    root = data_root(task)
    places = [root / "cifar-10-batches-py", root]
    folder = next((place for place in places if (place / "test_batch").is_file()), None)
    if folder is None and task.download:
        vision = importlib.import_module("torchvision.datasets").CIFAR10
        _fetch(root, "CIFAR-10", lambda scratch: vision(str(scratch), download=True))
        folder = next((place for place in places if (place / "test_batch").is_file()), None)
    if folder is None:
        raise _missing(task, "cifar-10-batches-py/test_batch", places)
    train = [_read_batch(folder / f"data_batch_{number}") for number in range(1, 6)]
    x, y = (np.concatenate(arrays) for arrays in zip(*train, strict=True))
    test_x, test_y = _read_batch(folder / "test_batch")
    test = str(folder / "test_batch")
    return {"train": Raw(x, y, str(folder), str(folder)), "test": Raw(test_x, test_y, test, test)}


def _read_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    try:
        batch = _values_in(path.read_bytes())
        if not all(type(label) is int for label in batch["labels"]):
            raise ValueError("its labels must be whole numbers")
        match batch["data"]:
            case (_, (1, (int(n), int(pixels)), ((_, ("u1", *_)), _), False, raw)):
                data = raw.encode("latin1") if isinstance(raw, str) else raw
                x = np.frombuffer(data, np.uint8).reshape(n, pixels).reshape(-1, 3, 32, 32)
            case _:
                raise ValueError("its data must be an array of bytes, a row for each image")
        return x, np.asarray(batch["labels"], np.int64)
    except FileNotFoundError:
        raise DataError(f"CIFAR-10 is five training batches and a test batch; {path} is missing: download it") from None
    except Exception as error:  # a damaged pickle can raise any error
        raise DataError(f"{path} must be one of CIFAR-10's batches; it cannot be read ({line_of(error)})") from None


def _values_in(pickled: bytes) -> Any:
    """Read texts, numbers, tuples, lists and dictionaries from a pickle, and call nothing that it names.

    A foreign pickle could run any code, and numpy ends the process where the state of a dtype is made up. So an array
    is not built: it is the tuple of its making and its state. Python 2 has written the public batches.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for opcode, value, _ in pickletools.genops(pickled):
        name = opcode.name
        first = marks.pop() if pickletools.markobject in opcode.stack_before else len(stack) - TAKEN.get(name, 0)
        given, stack[first:] = stack[first:], []
        match name:
            case "PROTO" | "FRAME" | "STOP":
                pass
            case "MARK":
                marks.append(len(stack))
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(given))
            case "APPEND" | "APPENDS":
                stack[-1].extend(given)
            case "SETITEM" | "SETITEMS":
                keys = [key.decode() if isinstance(key, bytes) else key for key in given[::2]]
                if not all(isinstance(key, str) for key in keys):  # to hash nested tuples would end the process, too
                    raise ValueError("its keys must be texts")
                stack[-1].update(zip(keys, given[1::2], strict=True))
            case "GLOBAL" | "STACK_GLOBAL":
                stack.append(value or " ".join(given))
                if stack[-1] not in {*NDARRAY, "_codecs encode"}:
                    raise ValueError(f"it asks for {stack[-1].replace(' ', '.')}")
            case "REDUCE" if stack[-1] == "_codecs encode":  # so Python 3 writes bytes for Python 2
                stack[-1] = given[0][0].encode("latin1")
            case "REDUCE" | "BUILD":
                stack[-1] = (stack[-1], *given)
            case "BINPUT" | "LONG_BINPUT" | "MEMOIZE":
                memo[len(memo) if value is None else value] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case _ if name in CONSTANTS:
                stack.append(CONSTANTS[name]())
            case _ if name in LITERALS:
                stack.append(value)
            case _:
                raise ValueError(f"it has what no batch has: {name}")
    return stack[-1]


# ------------------------------------------------------------------------------------------------------- MedMNIST


def read_medmnist(task: TaskConfig) -> dict[str, Raw]:
    """Read a MedMNIST file `<name>.npz`: `task.data-dir` is it, or a folder; of several, `<task.name>.npz`."""
    path = _medmnist_file(task)
    if not path.is_file() and task.download:
        _fetch_medmnist(path)
    if not path.is_file():
        raise _missing(task, path.name, [path.parent])
    try:
        with zipfile.ZipFile(path), np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except Exception as error:  # a damaged archive can raise any error
        broken = f"{path} must be a MedMNIST .npz file; it is truncated, unreadable or another file"
        raise DataError(f"{broken} ({line_of(error)}): {again(error)}") from None
    for key in ("train_images", "train_labels", "test_images", "test_labels"):
        if key not in arrays:
            raise DataError(f"{path} must hold {key}, as MedMNIST files do; got {', '.join(arrays) or 'nothing'}")
    if len({"val_images", "val_labels"} & arrays.keys()) == 1:
        raise DataError(f"{path} must hold both val_images and val_labels, or neither; one is missing")
    splits = ("train", "test", "val")[: 2 + ("val_images" in arrays)]
    return {split: _medmnist_split(path, split, arrays) for split in splits}


def medmnist_form(task: TaskConfig) -> dict[str, int]:
    """Read channels, size and classes off a MedMNIST file; nothing if it cannot be read, which its reader says."""
    try:
        with np.load(_medmnist_file(task), allow_pickle=False) as file:
            shape, labels = file["test_images"].shape, [file[name] for name in file.files if name.endswith("_labels")]
        if shape[1] != shape[2] or not all(np.issubdtype(y.dtype, np.integer) for y in labels):
            return {}
        classes = max(2, 1 + max(int(y.max(initial=0)) for y in labels))
        return {"channels": (*shape, 1)[3], "size": shape[1], "classes": classes}
    except Exception:  # a damaged archive can raise any error
        return {}


def _medmnist_file(task: TaskConfig) -> Path:
    path = data_root(task)
    named = path if path.suffix == ".npz" else path / f"{task.name}.npz"
    there = [named] if named.is_file() or task.download else [*sorted(path.glob("*.npz")), named]
    if len(there) > 2:
        raise DataError(f"one .npz file is read; {path} has {len(there) - 1}: set task.data-dir={there[0]} or another")
    return there[0]


def _medmnist_split(path: Path, split: str, arrays: dict[str, NDArray[Any]]) -> Raw:
    x, y = arrays[f"{split}_images"], arrays[f"{split}_labels"]
    images, labels = f"{path} ({split}_images)", f"{path} ({split}_labels)"
    if x.dtype != np.uint8 or not (x.ndim == 3 or (x.ndim == 4 and x.shape[3] == 3)):
        raise DataError(
            f"images must be uint8 of shape (N, H, W) or (N, H, W, 3); got {x.dtype} of shape {x.shape} in {images}"
        )
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise DataError(
            f"every image must have one class; got labels of {y.dtype} and shape {y.shape} in {labels}: sets with "
            "several labels per image are not supported"
        )
    return Raw(x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2), y, images, labels)


def _fetch_medmnist(path: Path) -> None:
    try:
        medmnist = importlib.import_module("medmnist")
    except ModuleNotFoundError:
        raise ConfigError(
            f"task.download=true for {path.name} needs the package medmnist: {installing('medmnist')}, or "
            "download the file yourself and set task.data-dir"
        ) from None
    name, _, pixels = path.stem.partition("_")  # "pathmnist" has 28 pixels, "pathmnist_64" has 64
    if name not in medmnist.INFO or not re.fullmatch(r"(64|128|224)?", pixels):
        raise DataError(f"{path.name} must be named as a MedMNIST set: {nearest(name, medmnist.INFO)}")
    reader = getattr(medmnist, medmnist.INFO[name]["python_class"])
    _fetch(path.parent, name, lambda scratch: reader("train", download=True, root=str(scratch), size=int(pixels or 28)))


# --------------------------------------------------------------------------------------------------------- shared


def data_root(task: TaskConfig) -> Path:
    """Return the folder in which a task's files are searched."""
    return Path(task.data_dir).expanduser().absolute() if task.data_dir else home() / "data"


def csv_rows(path: Path, columns: Sequence[str], faults: list[str] | None = None) -> list[tuple[str, dict[str, str]]]:
    """Read a CSV file whose first line names the columns, between commas or, as some spreadsheets write, semicolons.

    Returns
    -------
    list of (str, dict)
        For every row, its place and its stripped cells by column. Missing cells at the end of a row are empty.

    Raises
    ------
    DataError
        If the file is missing or unreadable; if it lacks `columns` or names one twice, or a row has too many cells.
        Given a list, these faults are added to it instead.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            text = re.sub(r'"[ \t]+(?=[,;\r\n]|$)', '"', file.read())  # blanks behind a quoted cell
        if "\0" in text:
            raise csv.Error("it holds zero bytes")
        first, lines = re.split(r"[\r\n]", text, maxsplit=1)[0], io.StringIO(text, newline="")
        reader = csv.DictReader(lines, skipinitialspace=True, strict=True, delimiter=max(",;", key=first.count))
        reader.fieldnames = header = [name.strip() for name in reader.fieldnames or ()]
        rows = [(f"{path} line {reader.line_num}", row) for row in reader]
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: add it") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} must be a CSV file in UTF-8, all quotes closed; it cannot be read ({error})") from None
    wrong = [] if faults is None else faults
    wrong += [
        f"{path} must have a column {column!r}, between commas or semicolons: {nearest(column, header)}"
        for column in columns
        if column not in header
    ]
    if repeated := [column for column in header if header.count(column) > 1]:
        wrong.append(f"every column of {path} must have its own name; two are named {repeated[0]!r}: rename one")
    if longer := [where for where, row in rows if None in row]:
        wrong.append(f"every row must have {len(header)} cells, as the first line says; {longer[0]} has more")
    if faults is None:
        refuse_all(wrong, DataError)
    return [(where, {column: plain((row[column] or "").strip()) for column in header}) for where, row in rows]


def _missing(task: TaskConfig, what: str, places: list[Path]) -> DataError:
    tried = "; the download did not contain it" if task.download else ", or task.download=true to download it"
    return DataError(
        f"task={task.name} needs {what}; not found in {' or '.join(map(str, places))}: "
        f"set task.data-dir to where it is{tried}"
    )


def _fetch(root: Path, what: str, download: Callable[[Path], object]) -> None:
    """Download to a temporary folder, then move: so no interrupted or concurrent download leaves a partial file."""
    make_folder(root, "the data folder")
    with tempfile.TemporaryDirectory(dir=root, prefix=".download-") as scratch:
        try:
            download(Path(scratch))
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"{what} could not be downloaded ({line_of(error)}): download it by hand into {root}"
            ) from None
        for entry in Path(scratch).iterdir():
            with contextlib.suppress(OSError):  # another process was faster, with the same files
                entry.rename(root / entry.name)


def line_of(error: Exception) -> str:
    """Put an error's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def again(error: Exception) -> str:
    """Say what to do about a file that cannot be read: what the system could not read may be sound."""
    return "download it again" if getattr(error, "errno", None) is None else "mend that, and try again"


def shortened(cell: str) -> str:
    """Quote a cell for an error line, shortened if it is long."""
    return repr(cell if len(cell) <= SHOWN else f"{cell[:SHOWN]}…")
