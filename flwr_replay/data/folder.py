"""Reader of a folder of images: classes as folders, or a `manifest.csv`.

    <data-dir>/<class>/<image>                       or below <data-dir>/train/, test/ and val/
    <data-dir>/manifest.csv                          columns image,label[,site][,split]; images relative to it

`flwr_replay/data/manifest.py` describes the manifest, and how examples are divided if no splits are given.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.sections import TaskConfig
from flwr_replay.data.decoded import DecodedImages
from flwr_replay.data.manifest import SPLITS, Row, manifest_rows, raws_of, words_of
from flwr_replay.data.picture import DICOM, fitted, picture
from flwr_replay.data.readers import Raw
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.files.disk import files_below

__all__ = ["SUFFIXES", "folder_rows", "form_of", "read_folder", "read_image"]

SUFFIXES = frozenset([".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp", *DICOM])
MODES = {1: "L", 3: "RGB"}


def read_folder(task: TaskConfig, kept: DecodedImages | None = None) -> dict[str, Raw]:
    """Read a folder of images, laid out as in the module's docstring; `kept` has those that were decoded before.

    Raises
    ------
    DataError
        For a wrong file, row, label or image, which the error names.
    ConfigError
        Without `task.data_dir`, or if `task.channels` is neither 1 nor 3.
    """
    if not task.data_dir:
        raise ConfigError(f"task={task.name} reads a folder of images: set task.data-dir=FOLDER")
    if task.channels not in MODES:
        raise ConfigError(f"images of a folder have task.channels=1 (grey) or 3 (colour); got {task.channels}")
    root = Path(task.data_dir).expanduser().absolute()
    manifest = root / "manifest.csv"
    rows, source = folder_rows(root, task.site_column), str(manifest if manifest.is_file() else root)
    return raws_of(rows, task, source, read_image, kept=kept)


def folder_rows(root: Path, site_column: str = "site") -> list[Row]:
    """List the images of a folder, by its manifest if it has one.

    Raises
    ------
    DataError
        If it is no folder, for a wrong row, or if there is none.
    """
    if not root.is_dir():
        raise DataError(f"task.data-dir must be a folder; {root} is not: set it to the folder with the images")
    manifest = root / "manifest.csv"
    if not manifest.is_file():
        return _folder_rows(root)
    if not (rows := manifest_rows(manifest, site_column, "image")):
        raise DataError(f"{manifest} must have a row for each image; got none")
    return rows


def form_of(rows: Sequence[Row], given: Container[str] = ()) -> dict[str, Any]:
    """Read size and channels off the first image, and classes off the labels, with class_names if these are words.

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
    found: dict[str, Any] = {"size": image.height, "channels": 1 if grey else 3}
    if "class_names" in given:
        pass
    elif words := words_of(rows):
        found |= {"classes": len(words), "class_names": words}
    else:
        found["classes"] = int(min(max(float(row.label) for row in rows), 1e9)) + 1
    return {name: value for name, value in found.items() if name not in given}


def _folder_rows(root: Path) -> list[Row]:
    given = [split for split in SPLITS if (root / split).is_dir()]
    if not given:
        return _class_rows(root, None)
    for split in ("train", "test"):
        if split not in given:
            raise DataError(f"{root} has a folder {given[0]}/ and must have {split}/ too: put its class folders there")
    return [row for split in given for row in _class_rows(root / split, split)]


def _class_rows(root: Path, split: str | None) -> list[Row]:
    rows = []
    for folder in sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        files = [file for file in files_below(folder) if file.suffix.lower() in SUFFIXES and file.is_file()]
        for file in sorted(files, key=lambda file: file.relative_to(folder).as_posix()):
            if not file.name.startswith("."):
                rows.append(Row(file, folder.name, f"folder {folder}", None, split))
    if not rows:
        raise DataError(f"{root} must hold a manifest.csv, or a folder of images for each class; got neither")
    return rows


def read_image(row: Row, task: TaskConfig) -> NDArray[np.uint8]:
    """Read one image as (C, H, W); one of another size is fitted as `task.fit` says, or refused."""
    image = picture(row.file, MODES[task.channels], row.where)
    if task.fit == "exact" and image.size != (task.size, task.size):
        raise DataError(
            f"images of task={task.name} must be task.channels x task.size x task.size = {task.channels} x "
            f"{task.size} x {task.size}; {row.file} is {image.height} x {image.width} pixels: set task.size, or "
            "task.fit=pad"
        )
    pixels = np.asarray(fitted(image, task.size, task.fit))
    return pixels[None] if task.channels == 1 else pixels.transpose(2, 0, 1)
