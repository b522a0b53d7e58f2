"""Reader of the two sets of chest radiographs with tuberculosis of Jaeger et al. 2014 (National Library of Medicine).

    <data-dir>/MontgomerySet/CXR_png/MCUCXR_0001_0.png …            138 images
    <data-dir>/MontgomerySet/ClinicalReadings/MCUCXR_0001_0.txt …
    <data-dir>/ChinaSet_AllFiles/CXR_png/CHNCXR_0001_0.png …        662 images
    <data-dir>/ChinaSet_AllFiles/ClinicalReadings/CHNCXR_0001_0.txt …

There are two institutions, montgomery and shenzhen. One of the two folders is enough; each institution has its own. The
last digit of a name is the label: 0 normal, 1 with manifestations of tuberculosis. The readings only serve to notice a
missing image. They may be left out, and so may the Montgomery set's lung masks.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.sections import TaskConfig, require
from flwr_replay.data.clinical.subjects import Case, root_of, splits_of
from flwr_replay.data.decoded import DecodedImages
from flwr_replay.data.picture import picture
from flwr_replay.data.readers import Raw
from flwr_replay.errors import DataError

__all__ = ["read_tuberculosis"]

SETS = {"montgomery": ("MontgomerySet", "MCUCXR"), "shenzhen": ("ChinaSet_AllFiles", "CHNCXR")}


def read_tuberculosis(task: TaskConfig, kept: DecodedImages | None = None) -> dict[str, Raw]:
    """Read radiographs, laid out as in the module's docstring: grey, resized to a square.

    Raises
    ------
    ConfigError
        Without `task.data_dir`, or with `task.channels` other than 1.
    DataError
        If both folders are missing; for an unreadable image, a name without a label, or a reading without its image.
    """
    require(task.channels == 1, f"task={task.name} has grey images, task.channels=1; got {task.channels}")
    root = root_of(task, "MontgomerySet/ or ChinaSet_AllFiles/")
    cases = [case for site in SETS for case in _cases(root, site)]
    if not cases:
        folders = " and ".join(f"{folder}/CXR_png" for folder, _ in SETS.values())
        raise DataError(f"task={task.name} needs PNG images; got none in {folders} of {root}: set task.data-dir")
    return splits_of(cases, partial(_read, size=task.size), task, root, kept)


def _cases(root: Path, site: str) -> list[Case]:
    folder, prefix = SETS[site]
    images = sorted((root / folder / "CXR_png").glob("*.png"))
    readings = {path.stem for path in (root / folder / "ClinicalReadings").glob("*.txt")}
    if missing := sorted(readings - {path.stem for path in images}):
        raise DataError(f"every reading needs its image; {root / folder / 'CXR_png' / missing[0]}.png does not exist")
    cases = []
    for path in images:
        parts = re.fullmatch(rf"({prefix}_\d+)_([01])", path.stem)
        if parts is None:
            raise DataError(f"an image is named {prefix}_<number>_<0 or 1>.png, the last its label; got {path}")
        cases.append(Case(path, int(parts[2]), parts[1], site))
    return cases


def _read(path: Path, size: int) -> NDArray[np.uint8]:
    return np.asarray(picture(path, "L").resize((size, size)))[None]
