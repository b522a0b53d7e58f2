"""Converters of public clinical data sets: from the folder of the unpacked original download to a `manifest.csv` in it.

`flwr-replay data convert retina FOLDER` writes it, and `task=retina task.data-dir=FOLDER` reads it. An institution that
has only its own rows and images of such a folder converts that.

`flwr-replay data manifest` makes the manifest of a folder of class folders, with patients from a table of files. A
wrong join is worse than none: patients of two splits would be taken for others. So whatever does not fit is told.
"""

import unicodedata
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath, PureWindowsPath

from flwr_replay.config.sections import one_of, spelled
from flwr_replay.convert.brats import brats_rows
from flwr_replay.convert.checked import write_manifest
from flwr_replay.convert.listings import boneage_rows, isic_rows, tuberculosis_rows
from flwr_replay.convert.retina import retina_rows
from flwr_replay.data.folder import folder_rows
from flwr_replay.data.manifest import MISSING, SHORTENED, ManifestRow
from flwr_replay.data.picture import SUFFIXES
from flwr_replay.data.readers import csv_rows
from flwr_replay.errors import DataError, refuse_all
from flwr_replay.files.atomic import SURROGATE

__all__ = ["convert", "link", "patient_rows"]

ALIKE = "patients must differ by more than spelling"
NAMES = "names must be UTF-8, without spaces at their ends"
CONVERTERS: dict[str, Callable[[Path], list[ManifestRow]]] = {
    "retina": retina_rows,
    "boneage": boneage_rows,
    "brats": brats_rows,
    "isic": isic_rows,
    "tuberculosis": tuberculosis_rows,
}


def convert(name: str, folder: Path) -> Path:
    """Write the manifest of a clinical set, and return its path.

    Raises
    ------
    ConfigError
        For an unknown set, or without a package that it needs.
    DataError
        If files or values are missing or wrong, or if there is a manifest already. Then nothing is written.
    RunError
        If it cannot be written.
    """
    one_of("NAME", name, tuple(CONVERTERS))
    _new_manifest(folder)
    return write_manifest(folder, CONVERTERS[name](folder), {})


def link(
    folder: Path, table: Path, id_column: str, file_column: str, skip: bool = False
) -> tuple[dict[str, list[str]], Path | None]:
    """Write the manifest of a folder of class folders, with patients from a table (`patient_rows`).

    Returns by rule what does not fit, and the manifest. If anything does not, nothing is written, unless to `skip` it:
    then images without one patient are left out, as `write_manifest` does.

    Raises
    ------
    DataError
        If the layout or the table is wrong, or if there is a manifest already. Then nothing is written.
    RunError
        If it cannot be written.
    """
    _new_manifest(folder)
    rows, faults = patient_rows(folder, table, id_column, file_column)
    left_out = {str(row.file): f"without one patient in {table}" for row in rows if not row.patient}
    able = skip and not {ALIKE, NAMES} & faults.keys() and len(left_out) < len(rows)
    return faults, write_manifest(folder, rows, left_out) if able or not faults else None


def _new_manifest(folder: Path) -> None:
    if not folder.is_dir():
        raise DataError(f"FOLDER must be the folder of the images; {folder} is none")
    if (manifest := folder / "manifest.csv").exists():
        raise DataError(f"{manifest} is there already: remove it to write another")


Tail = tuple[str, ...]  # the last names of a path


def patient_rows(
    folder: Path, table: Path, id_column: str, file_column: str
) -> tuple[list[ManifestRow], dict[str, list[str]]]:
    r"""List a folder's images, each with its patient if it has one; return these, and by rule what does not fit.

    A cell of `file_column` is a file's name or path, of which the last names count. `C:\scans\A.PNG`, `scans/a.png` and
    `a` name `a.png`; where several folders have one, the cell must say which.

    Raises
    ------
    DataError
        If the folder's layout or the table is wrong.
    """
    images = folder_rows(folder)
    named: dict[Tail, list[ManifestRow]] = defaultdict(list)
    for row in images:
        *above, name = _tail(str(row.file.relative_to(folder)))
        for called in {name, PurePath(name).stem if PurePath(name).suffix in SUFFIXES else name}:
            for n in range(len(above) + 1):
                named[(*above[n:], called)].append(row)
    folders = {level for tail in named for level in tail[:-1]}
    wrong: dict[str, list[str]] = defaultdict(list)
    patients: dict[ManifestRow, set[str]] = defaultdict(set)
    spellings: dict[str, str] = {}
    lacking: list[str] = []
    lines = csv_rows(table, [file_column, id_column], lacking)
    refuse_all([f"{fault}; --file and --id say which to read" for fault in lacking], DataError)
    for where, cells in lines:
        cell, patient, line = cells[file_column], cells[id_column], where.removeprefix(f"{table} ")
        meant = _meant(cell, named, folders)
        if not meant:
            wrong[f"every row of {table} must name an image in {folder}"].append(f"{line}: {cell}")
        elif len(meant) > 1:
            wrong[f"a row of {table} must name the folder, too, where several have the file"].append(f"{line}: {cell}")
        else:
            mine = patients[meant[0]]  # known to have a row, whatever that says
            if patient.casefold() in MISSING or SHORTENED.fullmatch(patient):
                wrong[f"every row of {table} must have a whole value for {id_column!r}"].append(f"{line}: {patient}")
                continue
            mine.add(patient)
            if (other := spellings.setdefault(spelled(patient).casefold(), patient)) != patient:
                wrong[ALIKE].append(f"{line}: {patient} and {other}")
    names = {row: row.file.relative_to(folder).as_posix() for row in images}
    wrong[f"every image must have a row in {table}"] = [name for row, name in names.items() if row not in patients]
    wrong["an image must have one patient"] = [
        f"{names[row]}: {', '.join(sorted(several))}" for row, several in patients.items() if len(several) > 1
    ]
    wrong[NAMES] = [  # what a CSV file would not give back, path or class
        name
        for name in names.values()
        if SURROGATE.search(name) or any(level != level.strip() for level in name.split("/"))
    ]
    whose = {row: own.copy().pop() if len(own := patients[row]) == 1 else "" for row in images}
    return [replace(row, patient=whose[row]) for row in images], {rule: bad for rule, bad in wrong.items() if bad}


def _tail(path: str) -> Tail:
    return tuple(unicodedata.normalize("NFC", level).casefold() for level in PureWindowsPath(path).parts)


def _meant(cell: str, named: Mapping[Tail, list[ManifestRow]], folders: set[str]) -> Sequence[ManifestRow]:
    """Return the images that the longest end of a path can mean; one in a folder of ours is there or nowhere."""
    names = _tail(cell)
    for n in range(len(names)):
        if rows := named.get(names[n:]):
            return [row for row in rows if row.file.name == PureWindowsPath(cell).name] or rows
        if names[n] in folders:
            break
    return []
