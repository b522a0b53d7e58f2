"""Reader of a folder of images: classes as folders, or a `manifest.csv`, such as that of a converted clinical set.

    <data-dir>/<class>/<image>                       or below <data-dir>/train/, test/, val/ or the like
    <data-dir>/manifest.csv                          columns image,label[,site][,split]; images relative to it

`flwr_replay/data/manifest.py` describes the manifest, and how examples are divided if no splits are given.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.sections import WHOLE, TaskConfig, require, spelled
from flwr_replay.data.decoded import DecodedImages, each
from flwr_replay.data.manifest import SPLITS, ManifestRow, manifest_rows, raws_of, some, words_of
from flwr_replay.data.picture import fitted, is_picture, picture
from flwr_replay.data.readers import Raw, data_root
from flwr_replay.data.subjects import by_subjects
from flwr_replay.errors import DataError, one_line, refuse_all
from flwr_replay.files.disk import files_below
from flwr_replay.memory import remembered

__all__ = ["folder_rows", "form_of", "images_below", "read_folder", "read_image", "readable", "tell_unread"]

Read = TypeVar("Read")
MODES = {1: "L", 3: "RGB"}
# What a split's folder is called, as a whole or after other words.
SPLIT = re.compile(r"(?<![a-z])(train|test|val)(?:ing|id|idation)?(?:s|[ _-]?(?:set|data|images))?(?![a-z])", re.I)
# What systems and tools leave in folders.
LEFT_BEHIND = re.compile(r"\..*|__macosx|@eadir|#recycle|\$recycle\.bin|(eh)?thumbs\.db|desktop\.ini", re.I | re.S)


def read_folder(task: TaskConfig, kept: DecodedImages | None = None) -> dict[str, Raw]:
    """Read a folder of images, laid out as in the module's docstring; `kept` has those that were decoded before.

    Raises
    ------
    DataError
        For a wrong file, row, label or image, which the error names.
    ConfigError
        Without `task.data_dir`, or if `task.channels` is neither 1 nor 3.
    """
    require(bool(task.data_dir), f"task={task.name} reads a folder of images: set task.data-dir=FOLDER")
    rule = "images of a folder have task.channels=1 (grey) or 3 (colour)"
    require(task.channels in MODES, f"{rule}; got {task.channels}")
    root = data_root(task)
    manifest, clinical = root / "manifest.csv", task.format == "clinical"
    if clinical and not manifest.is_file():
        raise DataError(f"{manifest} does not exist: run flwr-replay data convert {task.name} {root}")
    rows, source = folder_rows(root, task.site_column), str(manifest if manifest.is_file() else root)
    divide = partial(by_subjects, rows, task, manifest) if clinical else None

    def read(row: ManifestRow, task: TaskConfig) -> NDArray[np.uint8]:
        try:
            return read_image(row, task)
        except DataError as error:
            raise DataError(f"{error}; `flwr-replay data check` lists all such files") from None

    return raws_of(rows, task, source, read, kept=kept, divide=divide)


def folder_rows(root: Path, site_column: str = "site", faults: list[str] | None = None) -> list[ManifestRow]:
    """List the images of a folder, by its manifest if it has one; `faults` as of `manifest_rows`.

    Raises
    ------
    DataError
        If it is no folder, for a wrong row, or if there is none.
    """
    if not root.is_dir():
        raise DataError(f"task.data-dir must be a folder; {root} is not: set it to the folder with the images")
    manifest = root / "manifest.csv"
    if not manifest.is_file():
        return _folder_rows(root, faults)
    if not (rows := manifest_rows(manifest, site_column, "image", faults=faults)) and not faults:
        raise DataError(f"{manifest} must have a row for each image; got none")
    return rows


def form_of(rows: Sequence[ManifestRow], given: Container[str] = ()) -> dict[str, Any]:
    """Read size and channels off the first image, classes off the labels, with class_names unless these are 0 to C - 1.

    What is `given` is left out; with class_names classes are, too.

    Raises
    ------
    DataError
        If the first image cannot be read, or some labels are words and some are numbers.
    """
    try:
        image = picture(rows[0].file, "RGB", rows[0].where)
    except DataError as error:
        raise DataError(f"{error}; the form of all images is read off the first") from None
    red, green, blue = image.split()
    grey = red.tobytes() == green.tobytes() == blue.tobytes()
    form: dict[str, Any] = {"size": image.height, "channels": 1 if grey else 3}
    if "class_names" not in given:
        _refuse_inner(rows)
        if words := words_of(rows):
            form |= {"classes": len(words), "class_names": words}
        else:
            numbers = sorted({int(spelled(row.label)) for row in rows})
            if "classes" in given or numbers[0] < 0 or numbers == list(range(len(numbers))):
                form["classes"] = numbers[-1] + 1
            else:  # years, or grades from 1 on, are names
                form |= {"classes": len(numbers), "class_names": list(map(str, numbers))}
    return {name: value for name, value in form.items() if name not in given}


def _refuse_inner(rows: Sequence[ManifestRow]) -> None:
    """Refuse folders that are all divided alike, such as fold1/ and fold2/, or data/: their folders may be classes."""
    inner: dict[Path, set[str]] = {}
    for row in rows:
        folder = Path(row.where.removeprefix("folder "))
        if row.file.is_relative_to(folder):  # no manifest's
            inner.setdefault(folder, set()).add("".join(row.file.relative_to(folder).parts[:-1][:1]))
    first, names = next(iter(inner.items()), (Path(), set()))
    if len(names) > 1 and "" not in names and all(names == others for others in inner.values()):
        what = f"set task.data-dir={first}" if len(inner) == 1 else "put them into one folder, or into train/ and test/"
        raise DataError(
            f"folders above classes are no classes; {some(sorted({row.label for row in rows}))} all hold "
            f"{some(sorted(names))}: if these are the classes, {what}; if not, set task.class-names"
        )


def images_below(folder: Path, unread: Counter[str]) -> list[Path]:
    """Return the images in a folder and below it, sorted, and count what else is there, by suffix."""
    images = []
    for file in sorted(files_below(folder), key=lambda file: file.relative_to(folder).as_posix()):
        if any(map(LEFT_BEHIND.fullmatch, file.relative_to(folder).parts)):
            continue
        if is_picture(file):
            images.append(file)
        else:
            unread[(file.suffix.lower() or "without suffix") if file.is_file() else "broken links"] += 1
    return images


def tell_unread(root: Path, unread: Counter[str]) -> None:
    """Say how many files were not read, and of what kinds."""
    if +unread:
        _say(f"not read in {root}, being no images, or out of place: {_listed(unread)}")


@remembered(maxsize=16)  # so a process says it once
def _say(line: str) -> None:
    logging.getLogger("flwr").warning(line)


def _listed(unread: Counter[str]) -> str:
    return ", ".join(f"{count:,} {kind}" for kind, count in (+unread).most_common(8))


def _folder_rows(root: Path, faults: list[str] | None) -> list[ManifestRow]:
    unread, wrong = Counter[str](), list[str]() if faults is None else faults
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir() and not LEFT_BEHIND.fullmatch(entry.name))
    splits = _splits_among(folders)
    for split in ("train", "test"):
        if splits and split not in splits:
            other = next(iter(splits.values())).name
            raise DataError(
                f"{root} has a folder {other}/ and must have {split}/ too: put its class folders there; if "
                f"{other}/ is a class itself, list the images in a manifest.csv"
            )
    for folder in folders if splits else ():
        if folder not in splits.values():
            unread[f"images in {folder.name}/ beside the splits"] = len(images_below(folder, Counter()))
    rows = [row for split in SPLITS if split in splits for row in _class_rows(splits[split], split, unread, wrong)]
    rows = rows or ([] if wrong else _class_rows(root, None, unread, wrong))
    if faults is None:
        refuse_all(wrong, DataError)
    written: dict[str, str] = {}
    for row in rows:
        if WHOLE.fullmatch(row.label) and (other := written.setdefault(spelled(row.label), row.label)) != row.label:
            raise DataError(f"a class has one folder; {other}/ and {row.label}/ in {root} are one number: join them")
    tell_unread(root, unread)
    return rows


def _splits_among(folders: Sequence[Path]) -> dict[str, Path]:
    """Return the folders that are splits, not classes: any called train, test or val, or two called nearly so.

    Raises
    ------
    DataError
        If two are the same split, or if it is not clear whether they are splits or classes.
    """
    named = [(match[1].lower(), folder) for folder in folders if (match := SPLIT.fullmatch(folder.name))]
    splits = dict(named)
    if len(splits) > 1 or any(split == folder.name for split, folder in named):
        if len(splits) < len(named):
            raise DataError(f"a split has one folder; got {', '.join(folder.name for _, folder in named)}: join them")
        return splits
    maybe = {match[1].lower(): folder.name for folder in folders if (match := SPLIT.search(folder.name))}
    if len(maybe) > 1:
        raise DataError(
            f"{'/, '.join(maybe.values())}/ in {folders[0].parent} may be splits or classes: call splits train/, test/ "
            "and val/; classes that are called so need a manifest.csv"
        )
    return {}


def _class_rows(root: Path, split: str | None, unread: Counter[str], wrong: list[str]) -> list[ManifestRow]:
    rows = []
    for folder in sorted(entry for entry in root.iterdir() if not LEFT_BEHIND.fullmatch(entry.name)):
        if not folder.is_dir():
            unread["images outside the folders of classes"] += is_picture(folder)
            continue
        others: Counter[str] = Counter()
        files = images_below(folder, others)
        if others and not files:
            wrong.append(
                f"every folder in {root} is a class; {folder.name}/ has files but no image ({_listed(others)}): "
                "convert them, or move it elsewhere"
            )
        inner = {folder / file.relative_to(folder).parts[0] for file in files if file.parent != folder}
        if len(splits := _splits_among(sorted(inner))) > 1:
            raise DataError(
                f"splits stand above classes; {folder} has {', '.join(path.name for path in splits.values())} in it: "
                f"set task.data-dir={folder} if these have the classes, else turn the folders around"
            )
        rows += [ManifestRow(file, folder.name, f"folder {folder}", None, split) for file in files]
        unread += others
        unread[f"empty folders called {folder.name}/"] += not files and not others
    if not rows and not wrong:
        npz = next(root.glob("*.npz"), "")
        hint = f": task=medmnist task.data-dir={npz} reads arrays" if npz else ""
        raise DataError(f"{root} must hold a manifest.csv, or a folder of images for each class; got neither{hint}")
    return rows


def read_image(row: ManifestRow, task: TaskConfig) -> NDArray[np.uint8]:
    """Read one image as (C, H, W); one of another size is fitted as `task.fit` says, or refused."""
    image = picture(row.file, MODES[task.channels], row.where)
    if task.fit == "exact" and image.size != (task.size, task.size):
        raise DataError(
            f"images of task={task.name} must be task.channels x task.size x task.size = {task.channels} x "
            f"{task.size} x {task.size}; {row.file} is {image.height} x {image.width} pixels: give images of "
            "that size, or train with another task.size, or task.fit=pad"
        )
    pixels = np.asarray(fitted(image, task.size, task.fit))
    return pixels[None] if task.channels == 1 else pixels.transpose(2, 0, 1)


def readable(
    read: Callable[[ManifestRow], Read], rows: Sequence[ManifestRow]
) -> tuple[list[tuple[ManifestRow, Read]], dict[ManifestRow, str]]:
    """Read what can be read: return those rows, each with what was read, and why not the others."""

    def tried(row: ManifestRow) -> Read | DataError:
        try:
            return read(row)
        except DataError as error:
            return error

    images = each(tried, rows)
    good = [(row, image) for row, image in zip(rows, images, strict=True) if not isinstance(image, DataError)]
    return good, {row: one_line(why) for row, why in zip(rows, images, strict=True) if isinstance(why, DataError)}
