"""Converters of public clinical data sets: from the folder of the unpacked original download to a `manifest.csv` in it.

`flwr-replay data convert retina FOLDER` writes it, and `task=retina task.data-dir=FOLDER` reads it. An institution that
has only its own rows and images of such a folder converts that.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flwr_replay.config.sections import one_of
from flwr_replay.convert.brats import brats_rows
from flwr_replay.convert.listings import boneage_rows, isic_rows, tuberculosis_rows
from flwr_replay.convert.patients import patient_rows
from flwr_replay.convert.retina import retina_rows
from flwr_replay.data.manifest import ManifestRow
from flwr_replay.errors import DataError
from flwr_replay.files.atomic import write_atomic
from flwr_replay.files.table import csv_text

__all__ = ["convert", "link"]

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
