"""Reader of the RSNA bone age radiographs (Halabi et al. 2019), as Qu et al. 2022, section 4.1: male hands.

    <data-dir>/boneage-training-dataset.csv              id,boneage,male: months; True or False
    <data-dir>/boneage-training-dataset/1377.png …
    <data-dir>/Bone age ground truth.csv                 Case ID,Sex,Ground truth bone age (months): M or F
    <data-dir>/boneage-test-dataset/4360.png …

The ground truth of the test images is a spreadsheet, `Bone age ground truth.xlsx`: save it as CSV. In Kaggle's copy
each folder is inside another of the same name, which works too. Girls' hands are left out, and their images may be
missing. RSNA's validation images are not used.

`task.test_size=0` tests on the set's own test images; any other number is taken from the training images. An
institution with its own part has the same files with its own rows and images.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.quoting import digits
from flwr_replay.config.sections import TaskConfig, require
from flwr_replay.data.clinical.subjects import Case, divide, keyed_rows, pictures, root_of
from flwr_replay.data.decoded import DecodedImages
from flwr_replay.data.picture import picture
from flwr_replay.data.readers import Raw
from flwr_replay.errors import DataError

__all__ = ["read_boneage"]

TRAINING, TEST = "boneage-training-dataset", "boneage-test-dataset"
TRUTH = "Bone age ground truth.csv"
MALE = {"true": True, "false": False, "m": True, "f": False}
MONTHS = 300  # the oldest age examined for bone age


def read_boneage(task: TaskConfig, kept: DecodedImages | None = None) -> dict[str, Raw]:
    """Read male hands, laid out as in the module's docstring: grey, resized to a square; the label is in months.

    Raises
    ------
    ConfigError
        Without `task.data_dir`, or with `task.channels` other than 1.
    DataError
        For a missing or unreadable file, an invalid sex or age, or fewer images than `task` asks for.
    """
    require(task.channels == 1, f"task={task.name} has grey images, task.channels=1; got {task.channels}")
    root = root_of(task, f"{TRAINING}.csv and {TRAINING}/")
    table, truth = root / f"{TRAINING}.csv", root / TRUTH
    cases = _cases(table, "id", "male", "boneage", root / TRAINING)
    if not task.test_size and not truth.is_file():
        raise DataError(
            f"task={task.name} tests on the set's own test images; {truth} does not exist: save RSNA's spreadsheet as "
            "CSV, or set task.test-size to the number of training images to test on"
        )
    own_test = [] if task.test_size else _cases(truth, "Case ID", "Sex", "Ground truth bone age (months)", root / TEST)
    # No strata: they would need classes, and ages are continuous.
    splits = divide([case.subject for case in cases], [""] * len(cases), task, table, test_share=0)
    read = partial(_read, size=task.size)
    if task.test_size:
        return pictures(cases, splits, read, task, table, kept)
    splits["test"] = np.arange(len(cases), len(cases) + len(own_test))
    raws = pictures([*cases, *own_test], splits, read, task, table, kept)
    return raws | {"test": replace(raws["test"], images=str(truth), labels=str(truth))}


def _cases(table: Path, name: str, sex: str, age: str, folder: Path) -> list[Case]:
    folder = folder / folder.name if (folder / folder.name).is_dir() else folder
    cases = []
    for key, row in keyed_rows(table, name, [sex, age]).items():
        male = MALE.get(row[sex].lower())
        if male is None:
            raise DataError(f"{sex!r} must be True or False, M or F; got {row[sex]!r} for {key} in {table}: correct it")
        try:
            months = float(digits(row[age]))
        except ValueError:
            months = math.nan
        if not 0 <= months <= MONTHS:
            raise DataError(f"{age!r} must be in months, 0 to {MONTHS}; got {row[age]!r} for {key} in {table}")
        if male:
            cases.append(Case(folder / f"{key}.png", months, key))
    return cases


def _read(path: Path, size: int) -> NDArray[np.uint8]:
    return np.asarray(picture(path, "L").resize((size, size)))[None]
