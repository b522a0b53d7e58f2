"""Reader of ISBI 2012: one volume of 30 electron microscopy slices with their masks (Arganda-Carreras et al. 2015).

    <data-dir>/image_00.png … image_29.png      grey, 512 x 512 pixels
    <data-dir>/label_00.png … label_29.png      0 = membrane, 255 = inside a cell

A pixel's label is 1 on a membrane. Four in five pixels are inside a cell, so the Dice score of cells would be high for
any model.

Neighbouring slices look alike. A random split would test on near-copies of training examples. So the last slices
are for testing, and a gap of slices before them is unused.
"""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.sections import TaskConfig
from flwr_replay.data.picture import picture
from flwr_replay.data.readers import Raw, data_root
from flwr_replay.errors import ConfigError, DataError

__all__ = ["read_isbi2012"]

TEST_SHARE = 0.2  # of the slices, the last ones
GAP = 2  # slices between the last one for training and the first one for testing


def read_isbi2012(task: TaskConfig) -> dict[str, Raw]:
    """Cut the slices into patches of `task.size` pixels that do not overlap.

    Raises
    ------
    ConfigError
        Without `task.data_dir`, or if patches of this size do not fill a slice.
    DataError
        For a slice without its mask, an unreadable image or one of another size, or a mask with other values.
    """
    if not task.data_dir:
        raise ConfigError(f"task={task.name} reads PNG slices: set task.data-dir to the folder of image_00.png …")
    root = data_root(task)
    images = sorted(root.glob("image_*.png"))
    if len(images) < GAP + 2:
        raise DataError(
            f"task={task.name} needs at least {GAP + 2} slices image_NN.png; got {len(images)} in {root}: set "
            "task.data-dir"
        )
    for label in sorted(root.glob("label_*.png")):
        image = label.with_name(label.name.replace("label", "image"))
        if image not in images:
            raise DataError(f"a mask needs its slice; got {label} without {image.name}: add it")
    tested = math.ceil(TEST_SHARE * len(images))
    by_split = {"train": images[: -tested - GAP], "test": images[-tested:]}
    return {split: _patches(slices, task.size) for split, slices in by_split.items()}


def _patches(slices: list[Path], size: int) -> Raw:
    x, y = [], []
    for path in slices:
        label = path.with_name(path.name.replace("image", "label"))
        image, mask = np.asarray(picture(path, "L")), np.asarray(picture(label, "L"))
        if image.shape != mask.shape:
            raise DataError(f"a slice and its mask must have one size; {path} is {image.shape}, its mask {mask.shape}")
        if not np.isin(mask, (0, 255)).all():
            raise DataError(f"a mask holds 0 (membrane) and 255 (cell) only; {label} holds {np.unique(mask)[:4]} …")
        if any(side % size for side in image.shape):
            raise ConfigError(f"task.size must divide a slice's {image.shape} pixels; got {size}: choose 128 or 256")
        x.append(_cut(image, size))
        y.append(_cut((mask == 0).astype(np.uint8), size))
    where = str(slices[0].parent)
    return Raw(np.concatenate(x)[:, None], np.concatenate(y), where, where)


def _cut(pixels: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    height, width = pixels.shape
    tiles = pixels.reshape(height // size, size, width // size, size)
    return tiles.transpose(0, 2, 1, 3).reshape(-1, size, size)
