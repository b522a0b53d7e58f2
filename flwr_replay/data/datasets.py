"""Data sets in memory, and `load`, which checks a reader's data before any training.

Letters: N examples, C channels, H and W height and width in pixels.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.own_code import users_code
from flwr_replay.config.sections import CLASSES, TaskConfig, one_of
from flwr_replay.data.bags import read_bags
from flwr_replay.data.decoded import DecodedImages
from flwr_replay.data.folder import read_folder
from flwr_replay.data.manifest import VALIDATED, parted
from flwr_replay.data.own import arrays_of, channels_first, read_own
from flwr_replay.data.readers import SPLIT_SEED, Raw, read_cifar10, read_digits, read_idx, read_medmnist, shortened
from flwr_replay.data.slices import read_isbi2012
from flwr_replay.data.tables import read_diabetes, read_heart_disease
from flwr_replay.errors import DataError
from flwr_replay.rng import derived_seed

__all__ = ["MIXES_PATIENTS", "PREPARES", "Dataset", "Examples", "bounded", "dataset_of", "examples_of", "load"]

READERS: dict[str, Callable[[TaskConfig], dict[str, Raw]]] = {
    "digits": read_digits,
    "idx": read_idx,
    "cifar10": read_cifar10,
    "medmnist": read_medmnist,
    "diabetes": read_diabetes,
    "heart_disease": read_heart_disease,
    "isbi2012": read_isbi2012,
    "own": read_own,
}
#: Readers of a file for each example, which an institution decodes once.
DECODERS: dict[str, Callable[[TaskConfig, DecodedImages | None], dict[str, Raw]]] = {
    "folder": read_folder,
    "bags": read_bags,
    "clinical": read_folder,
}
#: Readers that mix patients' data, and how; there is no DP with them.
MIXES_PATIENTS = {
    "heart_disease": "fills gaps with medians of the training rows",
    "own": "reads by a function of your own, for all we know with statistics of all rows",
}
#: Tasks whose images went through more than fitting their size, and what: other files have not gone through that.
PREPARES = {
    "own": "your own function prepares",
    "retina": "flwr_replay.convert.retina.graham prepares",
}


@dataclass(frozen=True, eq=False)
class Examples:
    """Images, or rows of a table, with their labels.

    Parameters
    ----------
    x : ndarray of uint8 or float32, shape (N, C, H, W)
        Images. Models get bytes 0..255 as numbers 0..1, and floats unchanged. A table's row has the shape
        (features, 1, 1), a bag the shape (features, H, W) with a vector at each place.
    y : ndarray, shape (N,), int64 (classes) or float32 (continuous labels); or (N, H, W), uint8 (masks of 0 and 1)
        Labels.
    sites : ndarray of str, shape (N,), or None
        The institution each example comes from, where the data name it.
    patients : ndarray of str, shape (N,), or None
        The patient each example comes from, where the data name it.
    image_bytes : int
        Bytes of an image, if `x` has features that were computed of images; 0: `x` has what the institution owns.
    images : Examples | None
        These images, whose `digest` counts; None: that of `x`.

    Raises
    ------
    DataError
        If shapes, lengths or dtypes are wrong.
    """

    x: NDArray[np.uint8] | NDArray[np.float32]
    y: NDArray[np.int64] | NDArray[np.float32] | NDArray[np.uint8]
    sites: NDArray[np.str_] | None = None
    patients: NDArray[np.str_] | None = None
    image_bytes: int = 0
    images: Examples | None = None

    def __post_init__(self) -> None:
        if self.x.ndim != 4 or self.x.dtype not in (np.uint8, np.float32):
            raise DataError(
                f"images must be uint8 or float32 of shape (N, C, H, W); got {self.x.dtype} of shape {self.x.shape}"
            )
        masks = self.y.ndim == 3 and self.y.dtype == np.uint8
        if not masks and (self.y.ndim != 1 or self.y.dtype not in (np.int64, np.float32)):
            raise DataError(
                "labels must be int64 or float32 of shape (N,), or masks, uint8 of shape (N, H, W); got "
                f"{self.y.dtype} of shape {self.y.shape}"
            )
        sites = len(self.y) if self.sites is None else len(self.sites)
        if not len(self.x) == len(self.y) == sites:
            raise DataError(
                f"every image needs a label and, with sites, a site; got {len(self.x)}, {len(self.y)}, {sites}"
            )

    def __len__(self) -> int:
        return len(self.y)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all images and labels in their order, with their dtypes and shapes; hexadecimal digits."""
        if self.images is not None:
            return self.images.digest
        sha = hashlib.sha256()
        for array in (self.x, self.y):
            sha.update(f"{array.dtype.str} {array.shape} ".encode())
            sha.update(np.ascontiguousarray(array).data)
        return sha.hexdigest()

    @property
    def labels(self) -> NDArray[np.int64] | NDArray[np.float32]:
        """One label per example, shape (N,), to measure skew by; for a mask, the share of its pixels that are 1."""
        labels: NDArray[Any] = self.y if self.y.ndim == 1 else self.y.mean(axis=(1, 2), dtype=np.float32)
        return labels

    @property
    def nbytes(self) -> int:
        """Bytes of images and labels."""
        return (len(self) * self.image_bytes or self.x.nbytes) + self.y.nbytes

    def take(self, indices: NDArray[np.int64]) -> Examples:
        """Return the examples at these indices, in their order, as copies."""
        sites, patients = (None if of is None else of[indices] for of in (self.sites, self.patients))
        return Examples(self.x[indices], self.y[indices], sites, patients, self.image_bytes)


def examples_of(given: Any) -> Examples:
    """Return the examples that a user's own app has: arrays as they are, others converted.

    Parameters
    ----------
    given : tuple, Dataset or DataLoader
        As in `flwr_replay.data.own.arrays_of`. Of data sets, images with one or three channels last are turned around,
        images that are floats become float32, and labels int64 where they are integers, else float32.

    Raises
    ------
    DataError
        If they are no images with labels, or a label is neither a class, a mask of 0 and 1 nor a finite number.
    """
    rule = "an institution's examples must be (images, labels), or a Dataset or DataLoader of these"
    with users_code(DataError, f"{rule}; got {type(given).__name__}"):
        x, y = arrays_of(given)
    kind = "segmentation" if y.ndim == 3 else "regression" if y.dtype.kind == "f" else "classification"
    labels = _cast(y, kind, CLASSES, "an institution's examples")
    return Examples(x, y) if isinstance(given, tuple) else Examples(channels_first(x, (1, 3)), labels)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples to train and test on; if the source has them, examples to validate on, and external test examples.

    `classes` are the names of the classes; empty: they are called by their numbers. `held` says which of the data's own
    training examples were held out, and are `val`.
    """

    name: str
    train: Examples
    test: Examples
    val: Examples | None = None
    external: Examples | None = None
    classes: tuple[str, ...] = ()
    held: NDArray[np.bool_] | None = None


def load(task: TaskConfig, kept: DecodedImages | None = None) -> Dataset:
    """Read a task's data; the same files give the same bits on every machine.

    Nothing is fetched from the network unless `task.download` says so.

    Parameters
    ----------
    task : TaskConfig
        Its `format` chooses the reader. The data must have its `channels`, `size` and `classes`.
    kept : DecodedImages, or None
        Where an institution keeps decoded images. From there examples are memory maps, which cannot be written to. Sets
        of a few files, such as idx and MedMNIST, are read each time.

    Returns
    -------
    Dataset
        Train and test have at least one example each; `val` and `external` are None without such a split.

    Raises
    ------
    DataError
        If files are missing, truncated or of another format, if images have another size, if labels are not classes,
        or if a split is empty. The error names the file, the value and what to do.
    ConfigError
        If an option or a package that the format needs is missing.
    """
    one_of("task.format", task.format, (*READERS, *DECODERS))
    raws = DECODERS[task.format](task, kept) if task.format in DECODERS else READERS[task.format](task)
    return dataset_of(raws, task)


def dataset_of(raws: dict[str, Raw], task: TaskConfig) -> Dataset:
    """Check what was read, and divide it; errors as of `load`."""
    splits = {split: _checked(raw, task) for split, raw in raws.items()}
    if "all" in splits:
        splits |= _divided(splits.pop("all"))
    for split in ("train", "test"):
        if not len(splits[split]):
            source = raws.get(split, raws.get("all"))
            raise DataError(
                f"task={task.name} needs {split} examples; got none in {source and source.images}: add some"
            )
    held = _held_out(splits["train"]) if task.validation and not len(splits.get("val", ())) else None
    if held is not None:
        splits |= {name: splits["train"].take(np.flatnonzero(own)) for name, own in (("val", held), ("train", ~held))}
    rest = {split: splits[split] for split in ("val", "external") if split in splits and len(splits[split])}
    return Dataset(task.name, splits["train"], splits["test"], **rest, classes=task.class_names, held=held)


def bounded(load_task: Callable[[TaskConfig], Dataset], task: TaskConfig) -> Dataset:
    """Read a task's data by a function, but take labels of C classes that are above C - 1 for C - 1, and log it.

    The server chooses C: a refusal, or another number of examples, would tell it whether there are such labels. So it
    is under dp=end-to-end. Where classes are named, a label that is no name is refused as ever.
    """
    if task.kind != "classification" or task.class_names:
        return load_task(task)
    read = load_task(replace(task, classes=CLASSES, class_groups=()))
    splits, last = {name: held for name, held in vars(read).items() if isinstance(held, Examples)}, task.classes - 1
    if above := sum(int((held.y > last).sum()) for held in splits.values()):
        logging.getLogger("flwr").warning(
            "%d labels are above %d, the last of task.classes=%d, and are taken for it: set task.classes to what the "
            "data have, and begin a new run",
            above,
            last,
            task.classes,
        )
    bounded: dict[str, Any] = {name: replace(held, y=held.y.clip(max=last)) for name, held in splits.items()}
    return replace(read, **bounded)


def _divided(examples: Examples) -> dict[str, Examples]:
    """Divide four to one: the first 80 % train, the rest test."""
    train, test = np.split(np.arange(len(examples)), [len(examples) - round(len(examples) / 5)])
    return {"train": examples.take(train), "test": examples.take(test)}


def _held_out(examples: Examples) -> NDArray[np.bool_]:
    """Hold out about one training example in ten; a hash of it decides, so that no other example moves it."""
    places = [
        derived_seed(SPLIT_SEED, "val", hashlib.sha256(x.tobytes() + y.tobytes()).hexdigest()) / 2**63
        for x, y in zip(examples.x, examples.y, strict=True)
    ]
    held, sites = np.zeros(len(examples), bool), examples.sites
    for site in [None] if sites is None else np.unique(sites):  # a site's depend on its own examples only
        members = np.arange(len(examples)) if sites is None else np.flatnonzero(sites == site)
        held[members[parted(np.asarray(places)[members], VALIDATED)[0]]] = True
    return held


def _checked(raw: Raw, task: TaskConfig) -> Examples:
    if len(raw.x) != len(raw.y):
        raise DataError(
            f"every image needs one label; got {len(raw.x)} images in {raw.images} and {len(raw.y)} labels in "
            f"{raw.labels}: are both files of the same set?"
        )
    if raw.x.dtype == np.float32 and not np.isfinite(raw.x).all():
        first = int(np.flatnonzero(~np.isfinite(raw.x).reshape(len(raw.x), -1).all(1))[0])
        raise DataError(f"features of task={task.name} must be finite; example {first} of {raw.images} has others")
    expected = (task.channels, task.size, task.size)
    if len(raw.y) and raw.x.shape[1:] != expected:
        raise DataError(
            f"images of task={task.name} must be task.channels x task.size x task.size = {_by(expected)}; got "
            f"{_by(raw.x.shape[1:])} in {raw.images}: set task.channels and task.size, or convert the images"
        )
    form = (len(raw.y), *(expected[1:] if task.kind == "segmentation" else ()))
    if raw.y.shape != form:
        raise DataError(
            f"labels of task={task.name} must have the shape {form}; got {raw.y.shape} in {raw.labels}: give a mask of "
            "the image's size or one number for each image, of one-hot rows the argmax"
        )
    y = _cast(raw.y, task.kind, task.classes, raw.labels)
    # Writable, since torch shares the array's memory; a memory map stays on the disk.
    x = raw.x if isinstance(raw.x, np.memmap) else np.require(raw.x, requirements=["C", "W"])
    return Examples(x, y, raw.sites, raw.patients)


def _cast(labels: NDArray[Any], kind: str, classes: int, source: str) -> NDArray[Any]:
    """Return labels as `Examples` has them, if that loses nothing: a cast makes a class of NaN, of 0.9 and of -1."""
    numbers = labels if labels.dtype.kind in "biuf" else np.full(labels.shape, np.nan)  # text and objects are none
    with np.errstate(over="ignore", invalid="ignore"):
        if kind == "regression":
            rule, y = "be finite numbers", numbers.astype(np.float32)
            right = np.isfinite(y)
        else:
            masks = kind == "segmentation"
            rule = "be masks of 0 and 1" if masks else f"be classes in 0..{classes - 1} (task.classes)"
            right = (numbers >= 0) & (numbers < (2 if masks else classes)) & (numbers % 1 == 0)
            y = numbers.astype(np.uint8 if masks else np.int64)
    if not right.all():
        first, *pixel = map(int, np.unravel_index(np.argmin(right), right.shape))
        value = shortened(str(labels[(first, *pixel)]))[1:-1] + ("" if numbers is labels else f" as {labels.dtype}")
        at = f", row {pixel[0]}, column {pixel[1]}," if pixel else ""
        more = kind == "classification" and bool(((numbers >= 0) & (numbers % 1 == 0)).all())
        hint = f"set task.classes={int(numbers.max()) + 1}, or " if more else ""
        raise DataError(
            f"labels must {rule}; got {value} (example {first}{at} of {source}): {hint}correct it, or leave the "
            "example out"
        )
    return y


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
