"""Readers of tables: a row is one patient, an example of shape (features, 1, 1).

Constants in this file bring every feature to about zero mean and unit spread. They come from no institution's data, so
they reveal nothing about patients.
"""

import csv
import importlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.quoting import digits
from flwr_replay.config.sections import TaskConfig
from flwr_replay.data.readers import SPLIT_SEED, Raw, data_root, shortened
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.rng import derived_rng

__all__ = ["read_diabetes", "read_heart_disease"]


def read_diabetes(task: TaskConfig) -> dict[str, Raw]:
    """Read scikit-learn's 442 diabetes patients (Efron et al. 2004), in a fixed random order.

    There are ten features, which scikit-learn has standardised over all patients. The label is a measure of the
    disease's progression one year later, 25 to 346.
    """
    bunch = importlib.import_module("sklearn.datasets").load_diabetes()
    x = (bunch.data * np.sqrt(len(bunch.data))).astype(np.float32)[:, :, None, None]
    order = derived_rng(SPLIT_SEED, "diabetes", "split").permutation(len(x))
    source = "scikit-learn's diabetes"
    return {"all": Raw(x[order], bunch.target[order], source, source)}


# -------------------------------------------------------------------------------------------------- heart disease

# Columns of the UCI files: numbers have (name, centre, spread), categories (name, codes). The constants are round
# numbers typical of adults examined for chest pain; they come from none of the files.
NUMBERS = {
    0: ("age", 54, 9),
    1: ("sex", 0.5, 0.5),
    3: ("trestbps", 130, 18),
    4: ("chol", 240, 55),
    5: ("fbs", 0.5, 0.5),
    7: ("thalach", 140, 25),
    8: ("exang", 0.5, 0.5),
    9: ("oldpeak", 1, 1),
    11: ("ca", 1, 1),
}
CATEGORIES = {2: ("cp", (1, 2, 3, 4)), 6: ("restecg", (0, 1, 2)), 10: ("slope", (1, 2, 3)), 12: ("thal", (3, 6, 7))}
LABEL, COLUMNS = 13, 14
MISSING = ("?", "-9", "-9.0", "")
ZERO_IS_MISSING = (3, 4, 12)  # blood pressure and cholesterol are never 0, and thal has no code 0


def read_heart_disease(task: TaskConfig) -> dict[str, Raw]:
    """Read UCI's heart disease files, `processed.<hospital>.data`; every file is a site.

    The label is binary: 0, or any of 1 to 4. One in five patients of every hospital is for testing, by a fixed shuffle
    of the hospital's rows. Missing values are imputed from the hospital's training patients: by the median of numbers,
    and by the most frequent category. A feature that a hospital never measured is 0, the centre.

    Raises
    ------
    ConfigError
        Without `task.data_dir`.
    DataError
        If there is no such file, or for a wrong row, which the error names.
    """
    if not task.data_dir:
        raise ConfigError(f"task={task.name} reads UCI's files: set task.data-dir to the folder of processed.*.data")
    root = data_root(task)
    files = sorted(root.glob("processed.*.data"))
    if not files:
        raise DataError(f"task={task.name} needs processed.<hospital>.data; not found in {root}: set task.data-dir")
    by_split: dict[str, list[tuple[Any, ...]]] = {"train": [], "test": []}
    for path in files:
        table = _read_table(path)
        order = derived_rng(SPLIT_SEED, "heart-disease", len(table)).permutation(len(table))
        tested = round(len(table) / 5)
        rows = {"test": np.sort(order[:tested]), "train": np.sort(order[tested:])}
        features = _features(table, rows["train"])
        for split, chosen in rows.items():
            y = (table[chosen, LABEL] > 0).astype(np.int64)
            by_split[split].append((features[chosen], y, np.full(len(chosen), path.name.split(".")[1])))
    raws = {}
    for split, of_files in by_split.items():
        x, y, sites = zip(*of_files, strict=True)
        features = np.concatenate(x)[:, :, None, None]
        raws[split] = Raw(features, np.concatenate(y), str(root), str(root), np.concatenate(sites))
    return raws


def _read_table(path: Path) -> NDArray[np.float64]:
    """Read one hospital's rows; missing values are NaN."""
    rows = []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} must be a table of numbers in UTF-8; it cannot be read ({error})") from None
    for number, cells in enumerate(lines, 1):
        if not cells or (number == 1 and cells[0].strip().upper() == "X1"):
            continue
        if len(cells) != COLUMNS:
            raise DataError(f"every row of {path} must have {COLUMNS} values; line {number} has {len(cells)}")
        values = [_number(cell, f"{path} line {number}") for cell in cells]
        values = [np.nan if c in ZERO_IS_MISSING and value == 0 else value for c, value in enumerate(values)]
        if values[LABEL] not in (0, 1, 2, 3, 4):
            raise DataError(f"labels of {path} must be 0 to 4; line {number} has {shortened(cells[LABEL])}")
        for column, (name, codes) in CATEGORIES.items():
            if not np.isnan(values[column]) and values[column] not in codes:
                raise DataError(
                    f"{name} in {path} must be one of {codes}; line {number} has {shortened(cells[column])}"
                )
        rows.append(values)
    if not rows:
        raise DataError(f"{path} must hold patients; got none: is it truncated?")
    return np.asarray(rows)


def _number(cell: str, where: str) -> float:
    """Read a value; NaN if the file marks it as missing."""
    if cell.strip() in MISSING:
        return np.nan
    try:
        value = float(digits(cell))
    except ValueError:
        value = np.nan
    if not np.isfinite(value):
        raise DataError(f"values must be finite numbers, or ? where they are missing; got {shortened(cell)} in {where}")
    return value


def _features(table: NDArray[np.float64], train: NDArray[np.int64]) -> NDArray[np.float32]:
    """Impute from the training rows, standardise numbers, and encode every category as a column."""
    columns = []
    for column, (_, centre, spread) in NUMBERS.items():
        known = table[train, column][~np.isnan(table[train, column])]
        filled = np.where(np.isnan(table[:, column]), np.median(known) if len(known) else centre, table[:, column])
        columns.append((filled - centre) / spread)
    for column, (_, codes) in CATEGORIES.items():
        counts = [np.count_nonzero(table[train, column] == code) for code in codes]
        usual = codes[int(np.argmax(counts))] if any(counts) else np.nan  # never measured: no column is 1
        filled = np.where(np.isnan(table[:, column]), usual, table[:, column])
        columns += [(filled == code).astype(np.float64) for code in codes]
    return np.stack(columns, axis=1).astype(np.float32)
