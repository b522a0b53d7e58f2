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
from flwr_replay.convert.listings import boneage_rows, isic_rows, tuberculosis_rows
from flwr_replay.convert.retina import retina_rows
from flwr_replay.data.folder import folder_rows
from flwr_replay.data.manifest import MISSING, SHORTENED, ManifestRow, some
from flwr_replay.data.picture import SUFFIXES
from flwr_replay.data.readers import csv_rows
from flwr_replay.errors import DataError, one_line
from flwr_replay.files.atomic import SURROGATE, write_atomic
from flwr_replay.files.table import csv_text

__all__ = ["convert", "link", "patient_rows"]

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
    manifest = _new_manifest(folder)
    _write(manifest, CONVERTERS[name](folder))
    return manifest


def link(folder: Path, table: Path, id_column: str, file_column: str) -> list[str]:
    """Write the manifest of a folder of class folders, with patients from a table (`patient_rows`).

    Returns lines on what does not fit; if there are any, nothing is written.

    Raises
    ------
    DataError
        If the layout or the table is wrong, or if there is a manifest already. Then nothing is written.
    RunError
        If it cannot be written.
    """
    manifest = _new_manifest(folder)
    rows, lines = patient_rows(folder, table, id_column, file_column)
    if not lines:
        _write(manifest, rows)
    return lines


def _new_manifest(folder: Path) -> Path:
    if not folder.is_dir():
        raise DataError(f"FOLDER must be the folder of the images; {folder} is none")
    if (manifest := folder / "manifest.csv").exists():
        raise DataError(f"{manifest} is there already: remove it to write another")
    return manifest


def _write(manifest: Path, rows: list[ManifestRow]) -> None:
    about: dict[str, list[str | None]] = {
        "image": [row.file.relative_to(manifest.parent).as_posix() for row in rows],
        "label": [row.label for row in rows],
        "patient": [row.patient for row in rows],
        "site": [row.site for row in rows],
        "split": [row.split for row in rows],
    }
    columns = {column: cells for column, cells in about.items() if any(cells)}
    write_atomic(manifest, csv_text([columns, *zip(*columns.values(), strict=True)]))


Tail = tuple[str, ...]  # the last parts of a path


def patient_rows(folder: Path, table: Path, id_column: str, file_column: str) -> tuple[list[ManifestRow], list[str]]:
    r"""List a folder's images with their patients; return these, and a line on all that does not fit, kind by kind.

    A cell of `file_column` is a file's name or path, of which the last parts count. `C:\scans\A.PNG`, `scans/a.png` and
    `a` name `a.png`; where several folders have one, the cell must say which.

    Raises
    ------
    DataError
        If the folder's layout or the table is wrong.
    """
    images = folder_rows(folder)
    named: dict[Tail, list[ManifestRow]] = defaultdict(list)
    for row in images:
        *above, name = _parts(str(row.file.relative_to(folder)))
        for called in {name, PurePath(name).stem if PurePath(name).suffix in SUFFIXES else name}:
            for n in range(len(above) + 1):
                named[(*above[n:], called)].append(row)
    folders = {part for tail in named for part in tail[:-1]}
    wrong: dict[str, list[str]] = defaultdict(list)
    patients: dict[ManifestRow, set[str]] = defaultdict(set)
    spellings: dict[str, str] = {}
    for where, cells in csv_rows(table, [file_column, id_column]):
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
                wrong["patients must differ by more than spelling"].append(f"{line}: {patient} and {other}")
    names = {row: row.file.relative_to(folder).as_posix() for row in images}
    wrong[f"every image must have a row in {table}"] = [name for row, name in names.items() if row not in patients]
    wrong["an image must have one patient"] = [
        f"{names[row]}: {', '.join(sorted(several))}" for row, several in patients.items() if len(several) > 1
    ]
    wrong["names must be UTF-8, without spaces at their ends"] = [name for name in names.values() if _unfit(name)]
    lines = [one_line(f"{rule}; {len(bad):,} wrong: {some(bad)}") for rule, bad in wrong.items() if bad]
    return [replace(row, patient=next(iter(patients[row]), "")) for row in images], lines


def _parts(path: str) -> Tail:
    return tuple(unicodedata.normalize("NFC", part).casefold() for part in PureWindowsPath(path).parts)


def _meant(cell: str, named: Mapping[Tail, list[ManifestRow]], folders: set[str]) -> Sequence[ManifestRow]:
    """Return the images that the longest end of a path can mean; one in a folder of ours is there or nowhere."""
    parts = _parts(cell)
    for n in range(len(parts)):
        if rows := named.get(parts[n:]):
            return [row for row in rows if row.file.name == PureWindowsPath(cell).name] or rows
        if parts[n] in folders:
            break
    return []


def _unfit(name: str) -> bool:
    """Say whether a CSV file would not give a path or its class back."""
    return bool(SURROGATE.search(name)) or any(part != part.strip() for part in name.split("/"))
