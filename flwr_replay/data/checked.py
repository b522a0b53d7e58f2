"""A folder of images looked at as a whole, before anything is trained: all that is wrong with it, at once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from hashlib import file_digest
from pathlib import Path
from typing import NamedTuple

from flwr_replay.data.folder import folder_rows, readable
from flwr_replay.data.manifest import ManifestRow
from flwr_replay.data.picture import picture

__all__ = ["checked"]

MOST = 5  # sizes, modes, or groups of equal files that are named
LEAKS = (
    "WARNING: nothing says which images are of one patient, so the same patient may be trained on and tested: metrics "
    "are then too good. Write a manifest.csv with a column patient."
)


class Seen(NamedTuple):
    """One file: its form and its digest."""

    size: str  # height x width, pixels
    mode: str
    digest: str


def checked(folder: Path) -> tuple[list[str], bool]:
    """Read every image of a folder, laid out as in `flwr_replay.data.folder`; return lines, and whether it is sound.

    It is not if a file cannot be read, equal files have different labels or splits, or a patient is in two splits.

    Raises
    ------
    DataError
        If the layout or the manifest is wrong, so that it is not clear which images there are.
    """
    rows = folder_rows(folder)
    seen, faults = readable(_look, rows)
    classes = Counter(row.label for row in rows)
    lines = [f"{len(rows):,} images: {', '.join(f'{label} {count:,}' for label, count in sorted(classes.items()))}"]
    wrong = [f"cannot be read: {fault}" for fault in faults]
    same: dict[str, list[ManifestRow]] = defaultdict(list)
    for row, found in seen:
        same[found.digest].append(row)
    equal = [group for group in same.values() if len(group) > 1]
    for group in equal:
        if len({(row.label, row.split) for row in group}) > 1:
            wrong.append(f"the same image with other labels or splits: {_named(group)}")
    splits: dict[tuple[str | None, str], set[str | None]] = defaultdict(set)
    for row in rows:
        splits[row.site, row.patient].add(row.split)
    wrong += [f"in several splits: patient {who}" for (_, who), among in splits.items() if who and len(among) > 1]
    if equal:
        lines.append(f"{len(equal):,} images are there twice or more: {_listed(map(_named, equal))}")
    for what, values in (("height x width", (s.size for _, s in seen)), ("mode", (s.mode for _, s in seen))):
        counted = Counter(values)
        lines.append(f"{what}: {_listed(f'{value} ({count:,})' for value, count in counted.most_common())}")
    known = sum(bool(row.patient) for row in rows)
    patients = len({(row.site, row.patient) for row in rows if row.patient})
    lines.append(f"{patients:,} patients; {len(rows) - known:,} images without one" if known else LEAKS)
    return [*lines, *(wrong or ["nothing is wrong"])], not wrong


def _look(row: ManifestRow) -> Seen:
    from PIL import Image, UnidentifiedImageError

    shown = picture(row.file, "RGB", row.where)
    with open(row.file, "rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
        try:
            mode = Image.open(file).mode
        except UnidentifiedImageError:
            mode = "DICOM"
    return Seen(f"{shown.height} x {shown.width}", mode, digest)


def _named(group: Iterable[ManifestRow]) -> str:
    return " = ".join(f"{row.file.parent.name}/{row.file.name}" for row in group)


def _listed(values: Iterable[str]) -> str:
    names = list(values)
    return ", ".join(names[:MOST]) + f" and {len(names) - MOST} more" * (len(names) > MOST)
