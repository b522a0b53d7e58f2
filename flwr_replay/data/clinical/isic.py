"""Reader of ISIC 2019's training photographs of skin lesions: melanoma, or any other lesion.

    <data-dir>/ISIC_2019_Training_Input/ISIC_0000000.jpg …
    <data-dir>/ISIC_2019_Training_GroundTruth.csv        image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK: one of them is 1
    <data-dir>/ISIC_2019_Training_Metadata.csv           image,…,lesion_id,…

The lesion's id says where an image was taken: BCN (Hospital Clínic de Barcelona), HAM (Medical University of Vienna,
HAM10000), MSK4 (Memorial Sloan Kettering). Images without a lesion id, 2,084 of 25,331, are left out: their source is
unknown, and two of them may show the same lesion. All images of a lesion are in one split.

An institution with its own part has the same three, with its own rows and images.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.sections import TaskConfig, require
from flwr_replay.data.clinical.subjects import Case, keyed_rows, root_of, splits_of
from flwr_replay.data.decoded import DecodedImages
from flwr_replay.data.picture import picture
from flwr_replay.data.readers import Raw
from flwr_replay.errors import DataError

__all__ = ["read_isic"]

SET = "ISIC_2019_Training"
DIAGNOSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC", "UNK")
NUMBERS = {"0": 0, "0.0": 0, "1": 1, "1.0": 1}
LESION = re.compile(r"(BCN|HAM|MSK4)_\w+")


def read_isic(task: TaskConfig, kept: DecodedImages | None = None) -> dict[str, Raw]:
    """Read lesions, laid out as in the module's docstring; the shorter side is resized, and the central square kept.

    Raises
    ------
    ConfigError
        Without `task.data_dir`, or with `task.channels` other than 3.
    DataError
        For a missing or unreadable file, an image without metadata, a row without exactly one diagnosis, or a lesion
        id from an unknown source.
    """
    require(task.channels == 3, f"task={task.name} has colour images, task.channels=3; got {task.channels}")
    root = root_of(task, f"{SET}_Input/, {SET}_GroundTruth.csv and {SET}_Metadata.csv")
    table, metadata = root / f"{SET}_GroundTruth.csv", root / f"{SET}_Metadata.csv"
    lesions = keyed_rows(metadata, "image", ["lesion_id"])
    cases = []
    for name, row in keyed_rows(table, "image", DIAGNOSES).items():
        if name not in lesions:
            raise DataError(
                f"every image of {table} needs a row in {metadata}; {name} has none: are both files complete?"
            )
        values = [row[diagnosis] for diagnosis in DIAGNOSES]
        if not set(values) <= set(NUMBERS) or sum(NUMBERS[value] for value in values) != 1:
            raise DataError(
                f"exactly one diagnosis must be 1, the others 0; got {','.join(values)} for {name} in {table}"
            )
        lesion = lesions[name]["lesion_id"]
        if not lesion:
            continue
        source = LESION.fullmatch(lesion)
        if source is None:
            raise DataError(f"a lesion id begins with BCN_, HAM_ or MSK4_; got {lesion!r} for {name} in {metadata}")
        cases.append(Case(root / f"{SET}_Input" / f"{name}.jpg", NUMBERS[row["MEL"]], lesion, source[1]))
    return splits_of(cases, partial(_read, size=task.size), task, table, kept)


def _read(path: Path, size: int) -> NDArray[np.uint8]:
    from PIL import ImageOps

    return np.asarray(ImageOps.fit(picture(path, "RGB"), (size, size))).transpose(2, 0, 1)
