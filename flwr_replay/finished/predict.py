"""Predictions of a finished run's model for a folder of images, or for those that a CSV file lists."""

import csv
import io
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import torch

from flwr_replay.data.classes import Classes
from flwr_replay.data.datasets import PREPARES
from flwr_replay.data.folder import images_below, read_image, readable, tell_unread
from flwr_replay.data.manifest import ManifestRow
from flwr_replay.data.picture import SUFFIXES
from flwr_replay.data.readers import csv_rows
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.files.table import csv_text
from flwr_replay.finished.trained import TrainedModel
from flwr_replay.learning.training import at_once

__all__ = ["images_in", "predictions", "right_in", "rows_of"]


def images_in(place: Path) -> list[ManifestRow]:
    """List images: a file, a folder's (in folders of it, too), or those in the column `image` of a CSV file.

    A CSV file's column `label` is read as well.

    Raises
    ------
    DataError
        If there is none.
    """
    if not place.exists():
        raise DataError(f"there is no {place}: give a folder of images, a CSV file with a column image, or one image")
    if place.suffix.lower() == ".csv":
        rows = [
            ManifestRow(place.parent / cells["image"], cells.get("label", ""), where)
            for where, cells in csv_rows(place, ["image"])
        ]
    elif place.is_dir():
        unread: Counter[str] = Counter()
        rows = [ManifestRow(file, "", f"folder {place}") for file in sorted(images_below(place, unread))]
        tell_unread(place, unread)
    else:
        rows = [ManifestRow(place, "", "the command line")]
    if not rows:
        raise DataError(f"{place} must hold images ({', '.join(sorted(SUFFIXES))}) or list them; it has none")
    return rows


def predictions(model: TrainedModel, rows: list[ManifestRow], base: Path, left_out: list[str] | None = None) -> str:
    """Return a CSV text with a line for each image.

    Parameters
    ----------
    model : TrainedModel
        From `load_model`.
    rows : list of Row
        The images.
    base : Path
        The folder to which the names in the column `image` are relative.
    left_out : list of str, or None
        Receives a line on each image that cannot be read, or has another form than the task's; the others are
        predicted. None: such an image stops all.

    Returns
    -------
    str
        Classification: `image,predicted` and a probability for each class. Regression: `image,predicted`, in the
        label's unit. Where a row has a label: `label`, too, and for classes `right` (1 or 0), empty for rows without
        one; a class is written as its name.

    Raises
    ------
    ConfigError
        For other kinds of task or of data, or if a reader prepares images by more than their size.
    DataError
        For images that cannot be used, unless they are left out and others are not; for a label that is no class.
    """
    task, classes = model.task, Classes(model.task)
    if task.kind == "segmentation" or task.channels not in (1, 3):
        raise ConfigError(
            f"predictions are for images, one class or number each; task={task.name} has another form: use "
            "flwr_replay.load_model in Python"
        )
    if task.name in PREPARES:
        raise ConfigError(
            f"task={task.load or task.name} learns from images that {PREPARES[task.name]}, and image files are not "
            "so prepared: give its images to flwr_replay.load_model in Python"
        )
    labelled = any(row.label for row in rows)
    numbers = {row: classes.number(row.label, row.where) for row in rows if row.label and model.classes}
    columns = ["label", *(["right"] if model.classes else [])] if labelled else []
    lines: list[list[object]] = [["image", "predicted", *columns, *(f"p({name})" for name in model.classes)]]
    together = at_once(torch.empty(1, task.channels, task.size, task.size), 256, model)
    faults: list[str] = [] if left_out is None else left_out
    for start in range(0, len(rows), together):
        images, faulty = readable(partial(read_image, task=task), rows[start : start + together])
        faults += faulty.values()
        if not images or (faults and left_out is None):
            continue
        x_BCHW = torch.from_numpy(np.stack([image for _, image in images]))
        with torch.inference_mode():
            outputs = model(x_BCHW)
        for (row, _), output in zip(images, outputs.tolist(), strict=True):
            name = row.file.relative_to(base) if row.file.is_relative_to(base) else row.file
            if model.classes:
                best = max(range(len(output)), key=output.__getitem__)
                number = numbers.get(row)
                cells: list[object] = ["", ""] if number is None else [classes.names[number], int(number == best)]
                lines.append([name, model.classes[best], *cells[: len(columns)], *(f"{share:.6g}" for share in output)])
            else:
                lines.append([name, f"{output:.6g}", *([row.label] if labelled else [])])
    if faults and (left_out is None or len(faults) == len(rows)):
        more = f"; {len(faults) - 1:,} more of {len(rows):,} images cannot be used" if len(faults) > 1 else ""
        raise DataError(f"{faults[0]}{more}" + "; --skip-bad leaves such images out" * (len(faults) < len(rows)))
    return csv_text(lines)


def rows_of(text: str) -> list[dict[str, str]]:
    """Return the rows that `predictions` wrote."""
    return list(csv.DictReader(io.StringIO(text)))


def right_in(text: str) -> str:
    """Say how many predictions are right, if `predictions` knew the labels: `, 7 of 9 right`."""
    rows = rows_of(text)
    rights = [int(row["right"]) for row in rows if row.get("right")]
    without = f", {len(rows) - len(rights):,} without a label" if len(rights) < len(rows) else ""
    return f", {sum(rights):,} of {len(rights):,} right{without}" if rights else ""
