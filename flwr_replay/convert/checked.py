"""A folder of images as a whole: all that is wrong with it, at once; and its manifest, without what cannot be read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from hashlib import file_digest
from pathlib import Path
from typing import NamedTuple

from flwr_replay.data.folder import folder_rows, readable
from flwr_replay.data.manifest import ManifestRow, words_of
from flwr_replay.data.picture import is_picture, picture
from flwr_replay.data.readers import csv_rows
from flwr_replay.errors import DataError, refuse_all
from flwr_replay.files.atomic import write_atomic
from flwr_replay.files.table import csv_text

__all__ = ["Checked", "checked", "write_manifest"]

LEFT_OUT = "left-out.csv"  # beside a manifest: what it leaves out, and why
MOST = 5  # sizes, modes, or groups of equal files that are named
LEAKS = (
    "WARNING: nothing says whose images without a patient are, so the same patient may be trained on and tested: "
    "metrics are then too good. Write a manifest.csv with a column patient."
)


class ImageFile(NamedTuple):
    """One file: its form and its digest."""

    size: str  # height x width, pixels
    mode: str
    digest: str


class Checked(NamedTuple):
    """What a folder is."""

    sound: bool
    lines: list[str]
    unreadable: dict[str, str]  # why, by file


def checked(folder: Path, skip: bool = False) -> Checked:
    """Read every image of a folder, laid out as in `flwr_replay.data.folder`.

    It is not sound if the manifest or a file cannot be read, an image is in no class's folder, labels differ by
    spelling only, equal files have different labels, splits or patients, or a patient is in two splits. To `skip`,
    files that cannot be read are left out of the folder's manifest, as `write_manifest` does, and are wrong no more.

    Raises
    ------
    DataError
        If the layout or the manifest's columns are wrong, so that it is not clear which images there are; if files
        cannot be left out.
    """
    wrong: list[str] = []
    rows = folder_rows(folder, faults=wrong)
    if not rows:
        refuse_all(wrong, DataError)
    above = {Path(row.where.removeprefix("folder ")).parent for row in rows if row.where.startswith("folder ")}
    loose = (file for place in sorted({folder, *above} if above else ()) for file in sorted(place.iterdir()))
    wrong += [f"in no class's folder: {file}" for file in loose if is_picture(file) and not file.name.startswith(".")]
    seen, why = readable(_look, rows)
    unreadable = {str(row.file): fault for row, fault in why.items()}
    skip = skip and bool(seen and unreadable)
    if skip:
        write_manifest(folder, rows, unreadable)
        rows = [row for row, _ in seen]
    classes = Counter(row.label for row in rows)
    lines = [f"{len(rows):,} images: {', '.join(f'{label} {count:,}' for label, count in sorted(classes.items()))}"]
    (lines if skip else wrong).extend(
        f"{'left out' if skip else 'cannot be read'}: {why}" for why in unreadable.values()
    )
    if unreadable and not skip:
        wrong.append(f"--skip-bad writes a manifest.csv without these {len(unreadable):,} files, and lists them")
    try:
        words_of(rows)
    except DataError as error:
        wrong += error.args
    equal = [group for group in _grouped(seen, "digest").values() if len(group) > 1]
    for group in equal:
        if len({(row.label, row.split, row.site, row.patient) for row in group}) > 1:
            wrong.append(f"the same image with other labels, splits or patients: {_named(group)}")
    splits: dict[tuple[str | None, str], set[str | None]] = defaultdict(set)
    for row in rows:
        splits[row.site, row.patient].add(row.split)
    wrong += [f"in several splits: patient {who}" for (_, who), among in splits.items() if who and len(among) > 1]
    if equal:
        lines.append(f"there more than once: {len(equal):,} ({_listed(map(_named, equal))})")
    for what, part in (("height x width", "size"), ("mode", "mode")):
        groups = sorted(_grouped(seen, part).items(), key=lambda group: -len(group[1]))
        only = {value: f": {_named(group)}" for value, group in groups[1:] if len(group) == 1}
        counted = (f"{value} ({len(group):,}{only.get(value, '')})" for value, group in groups)
        lines.append(f"{what}: {_listed(counted)}")
    listed = {row.file for row in rows}
    if not above and (beside := [str(of) for of in sorted(folder.rglob("*")) if is_picture(of) and of not in listed]):
        lines.append(f"not in the manifest: {len(beside):,} ({_listed(beside)})")
    known = sum(bool(row.patient) for row in rows)
    patients = len({(row.site, row.patient) for row in rows if row.patient})
    if known:
        lines.append(f"{patients:,} patients; {len(rows) - known:,} images without one")
    if 2 * known < len(rows):
        lines.append(LEAKS)
    return Checked(not wrong, [*lines, *(wrong or ["nothing is wrong"])], unreadable)


def _look(row: ManifestRow) -> ImageFile:
    from PIL import Image, UnidentifiedImageError

    shown = picture(row.file, "RGB", row.where)
    with open(row.file, "rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
        try:
            mode = Image.open(file).mode
        except UnidentifiedImageError:
            mode = "DICOM"
    return ImageFile(f"{shown.height} x {shown.width}", mode, digest)


def _grouped(seen: Iterable[tuple[ManifestRow, ImageFile]], part: str) -> dict[str, list[ManifestRow]]:
    groups: dict[str, list[ManifestRow]] = defaultdict(list)
    for row, image in seen:
        groups[getattr(image, part)].append(row)
    return groups


def _named(group: Iterable[ManifestRow]) -> str:
    return " = ".join(f"{row.file.parent.name}/{row.file.name}" for row in group)


def _listed(values: Iterable[str]) -> str:
    names = list(values)
    return ", ".join(names[:MOST]) + f" and {len(names) - MOST} more" * (len(names) > MOST)


def write_manifest(folder: Path, rows: Iterable[ManifestRow], left_out: Mapping[str, str]) -> Path:
    """Write FOLDER/manifest.csv, or write it again without some files; FOLDER/left-out.csv has their rows, and why.

    That list goes on where a manifest is written again.

    Parameters
    ----------
    rows : iterable of ManifestRow
        All images; where there is a manifest, its own rows count, with all their columns.
    left_out : mapping of str to str
        Why, by file.

    Raises
    ------
    DataError
        If the list there has other columns.
    RunError
        If a file cannot be written.
    """
    manifest, listed = folder / "manifest.csv", folder / LEFT_OUT
    before = []
    if manifest.exists():
        table: list[dict[str, str | None]] = [{**cells} for _, cells in csv_rows(manifest, ["image"])]
        before = [cells for _, cells in csv_rows(listed, [])] if left_out and listed.exists() else []
    else:
        table = [
            {
                "image": row.file.relative_to(folder).as_posix(),
                "label": row.label,
                "patient": row.patient,
                "site": row.site,
                "split": row.split,
            }
            for row in rows
        ]
        used = [column for column in table[0] if any(row[column] for row in table)]
        table = [{column: row[column] for column in used} for row in table]
    why = [left_out.get(str(folder / (row["image"] or ""))) for row in table]
    if left_out:
        columns = [*table[0], "why"]
        if before and [*before[0]] != columns:
            raise DataError(f"{listed} has other columns than {manifest}: move it elsewhere")
        gone = [[*row.values(), fault] for row, fault in zip(table, why, strict=True) if fault]
        write_atomic(listed, csv_text([columns, *(row.values() for row in before), *gone]))
    kept = [row.values() for row, fault in zip(table, why, strict=True) if not fault]
    write_atomic(manifest, csv_text([table[0], *kept]))
    return manifest
