"""Reader of a folder of images: classes as folders, or a `manifest.csv`.

    <data-dir>/<class>/<image>                       or below <data-dir>/train/, test/ and val/
    <data-dir>/manifest.csv                          columns image,label[,site][,split]; images relative to it

Without given splits each site's examples are divided four to one. The division depends on the number and the order
of that site's rows only: an institution that holds its own rows gets the bits that a simulation over all rows gets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config import TaskConfig
from flwr_replay.data.readers import Raw, csv_rows, picture
from flwr_replay.errors import ConfigError, DataError, nearest
from flwr_replay.rng import derived_rng

__all__ = ["read_folder"]

SPLITS = ("train", "test", "val")
SUFFIXES = frozenset([".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"])
MODES = {1: "L", 3: "RGB"}
INTEGER = re.compile(r"[+-]?\d+(\.0+)?")  # spreadsheets write 1 as 1.0


@dataclass(frozen=True)
class _Row:
    image: Path
    label: str
    where: str  # for error lines
    site: str | None = None
    split: str | None = None


def read_folder(task: TaskConfig) -> dict[str, Raw]:
    """Read a folder of images as the module's docstring lays it out.

    Labels are class numbers, or names: resolved by `task.class_names`, else numbered in sorted order.

    Raises
    ------
    DataError
        For a file, row, label or image that is not as said; the line names it.
    ConfigError
        Without `task.data_dir`, or with a number of channels that images do not have.
    """
    if not task.data_dir:
        raise ConfigError(f"task={task.name} reads a folder of images: set task.data-dir=FOLDER")
    if task.channels not in MODES:
        raise ConfigError(f"images of a folder have task.channels=1 (grey) or 3 (colour); got {task.channels}")
    root = Path(task.data_dir).expanduser().absolute()
    if not root.is_dir():
        raise DataError(f"task.data-dir must be a folder; got {root}: there is none")
    manifest = root / "manifest.csv"
    rows = _manifest_rows(manifest, task) if manifest.is_file() else _folder_rows(root)
    source = str(manifest if manifest.is_file() else root)
    if not rows:
        raise DataError(f"task={task.name} needs examples; got none in {source}")
    y = _labels(rows, task, source)
    sites = None if rows[0].site is None else np.asarray([row.site for row in rows], dtype=np.str_)
    splits = _splits(rows, sites)
    found = {}
    for split in SPLITS:
        # Row order within a split: restricted to one site it is the order that this site's own folder gives.
        members = np.flatnonzero(splits == split)
        x = np.empty((len(members), task.channels, task.size, task.size), np.uint8)
        for n, member in enumerate(members):
            x[n] = _read_image(rows[member], task)
        found[split] = Raw(x, y[members], source, source, None if sites is None else sites[members])
    return found


def _manifest_rows(path: Path, task: TaskConfig) -> list[_Row]:
    wanted = ["image", "label", *([task.site_column] if task.site_column != "site" else [])]
    lines = csv_rows(path, wanted)
    columns = list(lines[0][1]) if lines else []
    used = {*wanted, *(column for column in (task.site_column, "split") if column in columns)}
    rows, listed = [], {}  # type: list[_Row], dict[Path, str]
    for where, cells in lines:
        values = {column: cells[column] for column in used}
        for column, value in values.items():
            if not value:
                raise DataError(f"every row must have a value for {column!r}; {where} has none")
        if "split" in values and values["split"] not in SPLITS:
            raise DataError(f"split must be one of {', '.join(SPLITS)}; got {values['split']!r} in {where}")
        image = path.parent / values["image"]
        if (earlier := listed.setdefault(image, where)) != where:
            raise DataError(f"an image must be listed once; {image} is in {earlier} and in {where}")
        rows.append(_Row(image, values["label"], where, values.get(task.site_column), values.get("split")))
    return rows


def _folder_rows(root: Path) -> list[_Row]:
    given = [split for split in SPLITS if (root / split).is_dir()]
    if not given:
        return _class_rows(root, None)
    for split in ("train", "test"):
        if split not in given:
            raise DataError(f"{root} has a folder {given[0]}/ and must have {split}/ too: put its class folders there")
    return [row for split in given for row in _class_rows(root / split, split)]


def _class_rows(root: Path, split: str | None) -> list[_Row]:
    rows = []
    for folder in sorted(entry for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        files = [file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file()]
        for file in sorted(files, key=lambda file: file.relative_to(folder).as_posix()):
            if not file.name.startswith("."):
                rows.append(_Row(file, folder.name, f"folder {folder}", None, split))
    if not rows:
        raise DataError(f"{root} must hold a manifest.csv, or a folder of images for each class; got neither")
    return rows


def _labels(rows: list[_Row], task: TaskConfig, source: str) -> NDArray[np.int64]:
    """Turn labels into class numbers; a wrong one is reported with its row."""
    numbers = {name: number for number, name in enumerate(task.class_names)}
    found = sorted({row.label for row in rows})
    named = any(not INTEGER.fullmatch(label) for label in found)
    if not numbers and named:
        # With fewer names than classes, an institution that lacks a class would number the others differently.
        if len(found) != task.classes:
            raise DataError(
                f"task={task.name} has {task.classes} classes; got {len(found)} class names in {source} "
                f"({_some(found)}): set task.class-names to all of them, in the order of the labels"
            )
        numbers = {name: number for number, name in enumerate(found)}
    y = np.empty(len(rows), np.int64)
    for n, row in enumerate(rows):
        if row.label in numbers:
            y[n] = numbers[row.label]
            continue
        if not INTEGER.fullmatch(row.label):
            raise DataError(f"unknown class {row.label!r} ({row.where}): {nearest(row.label, numbers)}")
        number = int(row.label.split(".")[0])
        if not 0 <= number < task.classes:
            raise DataError(
                f"labels of task={task.name} must lie in 0..{task.classes - 1}; got {row.label} ({row.where}): "
                "set task.classes, or correct the label"
            )
        y[n] = number
    return y


def _splits(rows: list[_Row], sites: NDArray[np.str_] | None) -> NDArray[np.str_]:
    if rows[0].split is not None:
        return np.asarray([row.split for row in rows])
    splits = np.full(len(rows), "train", dtype="<U5")
    for site in [None] if sites is None else np.unique(sites):
        members = np.arange(len(rows)) if sites is None else np.flatnonzero(sites == site)
        tested = max(1, round(len(members) / 5)) if len(members) > 1 else 0
        # Seeded by nothing but the count, so that it holds with or without a site column in the site's own manifest.
        order = derived_rng(0, "folder", "split", len(members)).permutation(len(members))
        splits[members[order[:tested]]] = "test"
    return splits


def _read_image(row: _Row, task: TaskConfig) -> NDArray[np.uint8]:
    """Read one image as (C, H, W); nothing is resized, since that would change the data silently."""
    image = picture(row.image, MODES[task.channels], row.where)
    if image.size != (task.size, task.size):
        raise DataError(
            f"images of task={task.name} must be task.channels x task.size x task.size = {task.channels} x "
            f"{task.size} x {task.size}; {row.image} is {image.height} x {image.width} pixels: resize it, or set "
            "task.size"
        )
    pixels = np.asarray(image)
    return pixels[None] if task.channels == 1 else pixels.transpose(2, 0, 1)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
