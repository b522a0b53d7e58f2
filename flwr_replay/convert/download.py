"""What a download holds, its tables and images, and a folder for what a converter makes of them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from flwr_replay.data.folder import images_below
from flwr_replay.data.manifest import ManifestRow
from flwr_replay.data.readers import csv_rows
from flwr_replay.errors import DataError
from flwr_replay.files.atomic import new_folder
from flwr_replay.files.disk import writing

__all__ = ["keyed_rows", "located", "whole"]


def keyed_rows(path: Path, key: str, columns: Sequence[str]) -> dict[str, dict[str, str]]:
    """Read a CSV file as rows by the value of one column, which must differ from row to row.

    Raises
    ------
    DataError
        As `csv_rows`, and for a row without a key, or with the same key as another row.
    """
    by_key: dict[str, dict[str, str]] = {}
    for where, row in csv_rows(path, [key, *columns]):
        if not row[key]:
            raise DataError(f"every row must have a value for {key!r}; {where} has none")
        if row[key] in by_key:
            raise DataError(f"every {key!r} must be listed once; {where} has {row[key]!r} again")
        by_key[row[key]] = row
    return by_key


def located(rows: Sequence[ManifestRow]) -> list[ManifestRow]:
    """Find each row's image by its name: it may have another suffix, or lie in a folder within its folder.

    Raises
    ------
    DataError
        If a row has no image, or several and none where it is expected.
    """
    images: dict[tuple[Path, str], list[Path]] = {}
    for folder in filter(Path.is_dir, {row.file.parent for row in rows}):
        for file in images_below(folder, Counter()):
            images.setdefault((folder, file.stem), []).append(file)
    files = []
    for row in rows:
        paths = images.get((row.file.parent, row.file.stem), [])
        if not paths:
            raise DataError(f"image {row.file} ({row.where}) does not exist: add it, or leave out its row")
        if len(paths) > 1 and row.file not in paths:
            raise DataError(f"image {row.file} must be one file; got {paths[0]} and {paths[1]}: remove one")
        files.append(row.file if row.file in paths else paths[0])
    return [replace(row, file=file) for row, file in zip(rows, files, strict=True)]


@contextmanager
def whole(folder: Path) -> Iterator[Path]:
    """Make a folder completely or not at all: yield another one, which gets its name at the end.

    Raises
    ------
    DataError
        If it is there already.
    RunError
        If it cannot be written.
    """
    if folder.exists():
        raise DataError(f"{folder} is there already: remove it to convert the set again")
    with writing(folder), new_folder(folder) as new:
        new.mkdir(0o700)
        yield new
