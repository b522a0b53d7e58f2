"""Kaggle's diabetic retinopathy photographs (2015, EyePACS), as Qu et al. 2022, section 4.1.

    FOLDER/trainLabels.csv                   image,level
    FOLDER/train/10_left.jpeg …
    FOLDER/retinopathy_solution.csv          image,level,Usage: the test set's grades, published afterwards
    FOLDER/test/1_left.jpeg …

The train or the test set may be missing; both are pooled. The grade (level) is 0 none, 1 mild, 2 moderate, 3 severe or
4 proliferative. Labels: 0 healthy (grade 0), 1 diseased (grades 2 to 4). Grade 1 is left out. Right eyes are left out,
so there is one image for each patient. The paper calls healthy "positive"; here the AUC is that of diseased.

Images are preprocessed as by Graham (2015) and written to `FOLDER/prepared/`, with 540 x 540 pixels. An institution
with its own images has a `trainLabels.csv` with its own rows, and a folder `train/` with its own images.
"""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_replay.convert.download import keyed_rows, located, whole
from flwr_replay.data.decoded import each
from flwr_replay.data.manifest import ManifestRow
from flwr_replay.data.picture import picture
from flwr_replay.errors import DataError

__all__ = ["graham", "retina_rows"]

TABLES = {"trainLabels.csv": "train", "retinopathy_solution.csv": "test"}
IMAGE = re.compile(r"(.+)_(left|right)")
LEFT_OUT = "1"
LABELS = {"0": "0", LEFT_OUT: None, "2": "1", "3": "1", "4": "1"}

# Graham 2015, competition report: the constants of his preprocessing.
RADIUS = 300  # pixels of the rescaled eye
SIGMA = RADIUS / 30  # of the Gaussian that gives the local average colour, pixels
GAIN, GREY = 4, 128  # factor of the difference to the local average, and the grey that it is added to
KEPT = 0.9  # share of the radius that is kept; the rim is grey
DARK = 10  # a column of the middle row shows the eye if brighter than a tenth of that row's mean
SMALLEST = 8  # an eye is at least an eighth as wide as the image's shorter side


def retina_rows(root: Path) -> list[ManifestRow]:
    """List left eyes, preprocessed as Graham 2015; a DataError names a wrong row, or an image without an eye."""
    rows = [row for table, folder in TABLES.items() if (root / table).is_file() for row in _rows(root / table, folder)]
    if not rows:
        raise DataError(f"retina needs trainLabels.csv with left eyes; got none in {root}: give the folder that has it")
    with whole(root / "prepared") as place:
        each(partial(_prepare, place), located(rows))
    return [replace(row, file=root / "prepared" / f"{row.patient}.png") for row in rows]


def _rows(table: Path, folder: str) -> list[ManifestRow]:
    rows = []
    for name, row in keyed_rows(table, "image", ["level"]).items():
        matched = IMAGE.fullmatch(name)
        if matched is None:
            raise DataError(f"an image of {table} is named <patient>_left or <patient>_right; got {name!r}: correct it")
        if row["level"] not in LABELS:
            raise DataError(f"level must be 0 to 4; got {row['level']!r} for {name} in {table}: correct it")
        label = LABELS[row["level"]]
        if matched[2] == "left" and label is not None:
            image = table.with_name(folder) / f"{name}.jpeg"
            rows.append(ManifestRow(image, label, str(table), patient=f"{folder}/{matched[1]}"))
    return rows


def _prepare(place: Path, row: ManifestRow) -> None:
    from PIL import Image

    pixels = graham(np.asarray(picture(row.file, "RGB")), round(2 * KEPT * RADIUS))
    if pixels is None:
        raise DataError(f"{row.file} must show an eye; its middle row is dark: leave its row out of the table")
    path = place / f"{row.patient}.png"
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(pixels.transpose(1, 2, 0)).save(path)


def graham(pixels_HWC: NDArray[np.uint8], size: int) -> NDArray[np.uint8] | None:
    """Preprocess a photograph of an eye as Graham 2015, cropped to the kept disc.

    The eye is rescaled to a radius of 300 pixels. Pixels become 4 (image - local average) + 128, and 128 if they are
    more than 270 pixels from the centre. The square around this disc is resized.

    Parameters
    ----------
    pixels_HWC : uint8 array, shape (H, W, 3)
        The photograph, with the eye in the centre of a dark background.
    size : int
        Height and width of the result, pixels.

    Returns
    -------
    uint8 array, shape (3, size, size), or None if the middle row shows no eye.
    """
    from PIL import Image
    from scipy.ndimage import gaussian_filter

    height, width = pixels_HWC.shape[:2]
    middle_W = pixels_HWC[height // 2].sum(axis=1, dtype=np.int64)
    radius = np.count_nonzero(middle_W > middle_W.mean() / DARK) / 2
    if radius * 2 * SMALLEST < min(height, width):
        return None
    scaled = tuple(round(side * RADIUS / radius) for side in (width, height))
    eye = np.asarray(Image.fromarray(pixels_HWC).resize(scaled, Image.Resampling.BILINEAR), np.float32)
    average = gaussian_filter(eye, (SIGMA, SIGMA, 0), mode="nearest", truncate=3)
    eye = np.clip(np.rint(GAIN * (eye - average) + GREY), 0, 255)
    half = round(KEPT * RADIUS)
    rows, columns = np.ogrid[: eye.shape[0], : eye.shape[1]]
    centre_row, centre_column = (eye.shape[0] - 1) / 2, (eye.shape[1] - 1) / 2
    eye[(rows - centre_row) ** 2 + (columns - centre_column) ** 2 > half**2] = GREY
    padded = np.pad(eye.astype(np.uint8), ((half, half), (half, half), (0, 0)), constant_values=GREY)
    top, left = (padded.shape[0] - 2 * half) // 2, (padded.shape[1] - 2 * half) // 2
    square = Image.fromarray(padded[top : top + 2 * half, left : left + 2 * half])
    return np.asarray(square.resize((size, size), Image.Resampling.BILINEAR)).transpose(2, 0, 1)
