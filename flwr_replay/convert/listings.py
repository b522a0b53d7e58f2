"""Sets whose images are used as they are; their manifests list them.

**boneage**: the RSNA bone age radiographs (Halabi et al. 2019), as Qu et al. 2022, section 4.1; labels in months.

    FOLDER/boneage-training-dataset.csv              id,boneage,male: months; True or False
    FOLDER/boneage-training-dataset/1377.png …
    FOLDER/Bone age ground truth.csv                 Case ID,Sex,Ground truth bone age (months): M or F
    FOLDER/boneage-test-dataset/4360.png …

The ground truth of the test images is a spreadsheet, `Bone age ground truth.xlsx`: save it as CSV. Without it, tests
are on training images, `task.test_size` of them. Girls' hands are left out, and their images may be missing. RSNA's
validation images are not used.

**isic**: ISIC 2019's training photographs of skin lesions: melanoma (1), or any other lesion (0).

    FOLDER/ISIC_2019_Training_Input/ISIC_0000000.jpg …
    FOLDER/ISIC_2019_Training_GroundTruth.csv        image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK: one of them is 1
    FOLDER/ISIC_2019_Training_Metadata.csv           image,…,lesion_id,…

The lesion's id says where an image was taken: BCN (Hospital Clínic de Barcelona), HAM (Medical University of Vienna,
HAM10000), MSK4 (Memorial Sloan Kettering). Images without a lesion id, 2,084 of 25,331, are left out: their source is
unknown, and two of them may show the same lesion. All images of a lesion are in one split.

**tuberculosis**: the two sets of chest radiographs of Jaeger et al. 2014 (National Library of Medicine).

    FOLDER/MontgomerySet/CXR_png/MCUCXR_0001_0.png …            138 images
    FOLDER/MontgomerySet/ClinicalReadings/MCUCXR_0001_0.txt …
    FOLDER/ChinaSet_AllFiles/CXR_png/CHNCXR_0001_0.png …        662 images
    FOLDER/ChinaSet_AllFiles/ClinicalReadings/CHNCXR_0001_0.txt …

There are two institutions, montgomery and shenzhen. One of the two folders is enough; each institution has its own. The
last digit of a name is the label: 0 normal, 1 with manifestations of tuberculosis. The readings only serve to notice a
missing image. They may be left out, and so may the Montgomery set's lung masks.
"""

import math
import re
from collections import Counter
from pathlib import Path

from flwr_replay.config.quoting import digits
from flwr_replay.convert.download import keyed_rows, located
from flwr_replay.data.folder import images_below
from flwr_replay.data.manifest import ManifestRow
from flwr_replay.errors import DataError

__all__ = ["boneage_rows", "isic_rows", "tuberculosis_rows"]

HANDS, TESTS = "boneage-training-dataset", "boneage-test-dataset"
TRUTH = "Bone age ground truth.csv"
MALE = {"true": True, "false": False, "m": True, "f": False}
MONTHS = 300  # the oldest age examined for bone age

SKIN = "ISIC_2019_Training"
DIAGNOSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC", "UNK")
WHOLE = {"0": "0", "0.0": "0", "1": "1", "1.0": "1"}
LESION = re.compile(r"(BCN|HAM|MSK4)_\w+")

CHESTS = {"montgomery": ("MontgomerySet", "MCUCXR"), "shenzhen": ("ChinaSet_AllFiles", "CHNCXR")}


def boneage_rows(root: Path) -> list[ManifestRow]:
    """List male hands; a DataError names an invalid sex or age, a missing image, or a truth not saved as CSV."""
    rows = _hands(root / f"{HANDS}.csv", ("id", "male", "boneage"), root / HANDS, "train")
    truth = root / TRUTH
    if truth.is_file():
        rows += _hands(truth, ("Case ID", "Sex", "Ground truth bone age (months)"), root / TESTS, "test")
    elif (sheet := truth.with_suffix(".xlsx")).is_file():
        raise DataError(f"{sheet} must be saved as CSV, too; {truth} does not exist: save it there, or remove both")
    return located(rows)


def _hands(table: Path, columns: tuple[str, str, str], folder: Path, split: str) -> list[ManifestRow]:
    name, sex, age = columns
    rows = []
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
            rows.append(ManifestRow(folder / f"{key}.png", str(months), str(table), split=split, patient=key))
    return rows


def isic_rows(root: Path) -> list[ManifestRow]:
    """List photographs; a DataError names one that is missing or without metadata, a wrong diagnosis or lesion id."""
    table, metadata = root / f"{SKIN}_GroundTruth.csv", root / f"{SKIN}_Metadata.csv"
    lesions = keyed_rows(metadata, "image", ["lesion_id"])
    rows = []
    for name, row in keyed_rows(table, "image", DIAGNOSES).items():
        if name not in lesions:
            raise DataError(
                f"every image of {table} needs a row in {metadata}; {name} has none: are both files complete?"
            )
        values = [row[diagnosis] for diagnosis in DIAGNOSES]
        if sorted(WHOLE.get(value, "") for value in values) != ["0"] * 8 + ["1"]:
            raise DataError(
                f"exactly one diagnosis must be 1, the others 0; got {','.join(values)} for {name} in {table}"
            )
        lesion = lesions[name]["lesion_id"]
        if not lesion:
            continue
        source = LESION.fullmatch(lesion)
        if source is None:
            raise DataError(f"a lesion id begins with BCN_, HAM_ or MSK4_; got {lesion!r} for {name} in {metadata}")
        image = root / f"{SKIN}_Input" / f"{name}.jpg"
        rows.append(ManifestRow(image, WHOLE[row["MEL"]], str(table), source[1], patient=lesion))
    return located(rows)


def tuberculosis_rows(root: Path) -> list[ManifestRow]:
    """List radiographs; a DataError names one without a label, or a reading without its image."""
    if rows := [row for site in CHESTS for row in _chests(root, site)]:
        return rows
    folders = " and ".join(f"{folder}/CXR_png" for folder, _ in CHESTS.values())
    raise DataError(f"tuberculosis needs PNG images; got none in {folders} of {root}: give the folder that holds them")


def _chests(root: Path, site: str) -> list[ManifestRow]:
    folder, prefix = CHESTS[site]
    place = root / folder / "CXR_png"
    images = images_below(place, Counter()) if place.is_dir() else []
    readings = {path.stem for path in (root / folder / "ClinicalReadings").glob(f"{prefix}*.txt")}
    if missing := sorted(readings - {path.stem for path in images}):
        raise DataError(f"every reading needs its image; {place / missing[0]}.png does not exist: add it")
    rows = []
    for path in images:
        matched = re.fullmatch(rf"({prefix}_\d+)_([01])", path.stem)
        if matched is None:
            raise DataError(f"an image is named {prefix}_<number>_<0 or 1>.png, the last its label; got {path}")
        rows.append(ManifestRow(path, matched[2], str(place), site, patient=matched[1]))
    return rows
