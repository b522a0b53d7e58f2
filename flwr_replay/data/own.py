"""A data set of the user's own: `task=mypkg.data:load`.

    def load(data_dir: str) -> dict

Its keys are train, test and perhaps val; or all, of which the last fifth is for testing. Each split is what `arrays_of`
takes.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.own_code import import_own, users_code
from flwr_replay.config.sections import TaskConfig
from flwr_replay.data.classes import Classes
from flwr_replay.data.readers import Raw
from flwr_replay.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

__all__ = ["arrays_of", "channels_first", "raws_of", "read_own"]

SPLITS = ({"train", "test"}, {"train", "test", "val"}, {"all"})
IMAGES = ("image", "img", "x")  # columns that are looked for
LABELS = ("label", "labels", "y")
ROWS = 256  # of a data set that are collated at a time


def read_own(task: TaskConfig) -> dict[str, Raw]:
    """Call the user's function, and make arrays of what it returns.

    Images are uint8 0..255 or floats, (N, C, H, W), or (N, H, W) and (N, H, W, C) with 1 or 3 channels. Labels are
    class numbers from 0, or `task.class_names`, as text or numbers; other kinds of task have numbers, or masks.

    Raises
    ------
    ConfigError
        If the function cannot be imported, or returns no such splits.
    DataError
        If it fails, or a split cannot be read as images with labels.
    """
    option, load = f"task={task.load}", import_own("task", task.load)
    with users_code(DataError, f"{option}, called with task.data-dir={task.data_dir!r}, failed"):
        splits = load(task.data_dir)
    return raws_of(splits, task, option)


def raws_of(splits: Any, task: TaskConfig, option: str) -> dict[str, Raw]:
    """Return the splits that a function of the user's has returned, which `option` names, as `read_own` says."""
    if not isinstance(splits, Mapping) or set(splits) not in SPLITS:
        got = ", ".join(map(str, splits)) if isinstance(splits, Mapping) else type(splits).__name__
        raise ConfigError(f'{option} must return {{"train": …, "test": …}}, perhaps with "val", or "all"; got {got}')
    raws = {}
    for name, split in splits.items():
        source = f"{option}, {name}"
        with users_code(DataError, f"{option}: the split {name} is no images with labels"):
            x, y = arrays_of(split)
            y = Classes(task).numbers(y, source) if task.kind == "classification" and y.ndim == 1 else y
            raws[name] = Raw(channels_first(x, (task.channels,)), y, source, source)
    return raws


def arrays_of(split: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return images and labels as arrays, in the order of the data set; labels of shape (N, 1, …) as (N, …).

    Parameters
    ----------
    split : tuple, Dataset or DataLoader
        A pair of arrays; a `torch.utils.data.Dataset` of pairs; a Hugging Face dataset with a column image, img or x
        and a column label, labels or y; or a DataLoader of one of these. Of a DataLoader, the data set is read once,
        whole, through its `collate_fn`. Its batch size and its shuffling do not count.

    Raises
    ------
    TypeError, ValueError, KeyError, IndexError
        If these are no images with labels, or if the DataLoader does not draw every example once.
    """
    if isinstance(split, tuple) and len(split) == 2:
        x, y = map(_array, split)
    elif hasattr(split, "collate_fn"):  # a DataLoader, told without importing torch
        pairs = [(_array(x), _array(y)) for x, y in map(_pair, _in_order(split))]
        x, y = np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])
    else:
        pairs = [(_array(x), _array(y)) for x, y in (_pair(split[index]) for index in range(len(split)))]
        if not pairs:
            raise ValueError("it is empty")
        x, y = np.stack([x for x, _ in pairs]), np.asarray([y for _, y in pairs])
    if x.dtype != np.uint8 and x.dtype.kind != "f":
        ends = f" from {x.min()} to {x.max()}" if x.size and x.dtype.kind in "iu" else ""
        raise ValueError(
            f"images must be uint8 or floats, so that their scale is known; got {x.dtype}{ends}: make bytes uint8, and "
            "all others floats, scaled as the model shall see them"
        )
    return x, y[:, 0] if y.ndim in (2, 4) and y.shape[1] == 1 else y


def _array(values: Any) -> NDArray[Any]:
    if np.ma.is_masked(values):
        raise ValueError("some values are masked: fill them in, or leave these examples out")
    return np.asarray(values)


def _in_order(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of all examples of a loader's data set, each once, in the data set's order."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

    rows = len(loader.dataset)  # type: ignore[arg-type]
    plain = type(loader.batch_sampler) is BatchSampler and isinstance(loader.sampler, RandomSampler | SequentialSampler)
    if not plain or len(loader.sampler) != rows or getattr(loader.sampler, "replacement", False):  # type: ignore[arg-type]
        raise ValueError(
            f"a DataLoader must draw each of its {rows} examples once; this one's {type(loader.sampler).__name__} does "
            "not: give a torch.utils.data.Subset of its data set"
        )
    return DataLoader(loader.dataset, batch_size=ROWS, collate_fn=loader.collate_fn)


def _pair(row: Any) -> tuple[Any, Any]:
    if isinstance(row, Mapping):
        columns = [next((name for name in names if name in row), "") for names in (IMAGES, LABELS)]
        if not all(columns):
            raise KeyError(f"a row needs a column {' or '.join(IMAGES)}, and {' or '.join(LABELS)}; got {list(row)}")
        return row[columns[0]], row[columns[1]]
    x, y = row
    return x, y


def channels_first(x: NDArray[Any], channels: Container[int]) -> NDArray[Any]:
    """Return images as (N, C, H, W), uint8 or float32; `channels` are the values that C may have."""
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim == 4 and x.shape[1] not in channels and x.shape[3] in channels:
        x = x.transpose(0, 3, 1, 2)
    return x if x.dtype == np.uint8 else x.astype(np.float32)
