"""A `manifest.csv` lists the files in a folder, with their labels, sites and splits.

If no splits are given, about one in five patients is for testing. A hash decides: of the column `patient` if a row has
one, else of the file's bytes. So all examples of a patient are in one split. The hash does not depend on other
patients. So an additional patient moves no other from training to testing, which differential privacy requires, and an
institution with its own rows gets the same bits as a simulation over all rows.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import file_digest
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from flwr_replay.config.sections import WHOLE, TaskConfig, bare, spelled
from flwr_replay.data.classes import Classes
from flwr_replay.data.decoded import DecodedImages, ImageSource, decoded, each
from flwr_replay.data.picture import fitted, picture
from flwr_replay.data.readers import SPLIT_SEED, Raw, csv_rows, shortened
from flwr_replay.errors import DataError, refuse_all, refuse_each
from flwr_replay.rng import derived_seed

__all__ = [
    "MISSING",
    "SHORTENED",
    "SPLITS",
    "VALIDATED",
    "ManifestRow",
    "manifest_rows",
    "parted",
    "raws_of",
    "some",
    "words_of",
]

SPLITS = ("train", "test", "val")
TESTED = 0.2  # share of the patients to test on, if no split is given
# What tables write for no value, as pandas reads them; None is a class, such as no tumour.
MISSING = {"", "nan", "-nan", "na", "n/a", "n.a.", "<na>", "#n/a", "#na", "#n/a n/a", "null", "nat", "?"}
MISSING |= {"#ref!", "#value!", "#div/0!", "#name?", "#null!", "#num!"}  # a spreadsheet's errors
SHORTENED = re.compile(r"\d([.,]\d+)?E\+\d+", re.I)  # what a spreadsheet makes of a long number
COPY = re.compile(r"([\s_-]+\(?copy\)?(\s*\d+)?)?(\s*\(\d+\))?$", re.I)  # at the end of a copied folder's name
VALIDATED = 0.1  # with split=validation, share of the patients to train on that are held out, if no split is given


@dataclass(frozen=True)
class ManifestRow:
    """One example."""

    file: Path
    label: str
    where: str  # for error lines
    site: str | None = None
    split: str | None = None
    patient: str = ""  # empty: not known


def manifest_rows(
    path: Path, site_column: str, column: str, known: Sequence[str] = SPLITS, faults: list[str] | None = None
) -> list[ManifestRow]:
    """Read a manifest.

    File names, in `column`, are relative to its folder. `site_column` names the institution, and may be missing if it
    is `site`. `known` are the allowed values of the column `split`. Given a list, faults are added to it instead, and
    rows without a needed cell are left out.

    Raises
    ------
    DataError
        With all faults: a missing column, an empty cell, an unknown split, a file that is listed twice, even under two
        spellings, a column that is named nearly as one that is read, such as `PatientID`, or two sites or patients
        that are.
    """
    wanted = [column, "label", *([site_column] if site_column != "site" else [])]
    wrong = [] if faults is None else faults
    lines = csv_rows(path, wanted, wrong)
    present = list(lines[0][1]) if lines else []
    for name in (site_column, "split", "patient"):
        if name not in {*present, *wanted} and (
            other := next((it for it in present if _plain(it) == _plain(name)), "")
        ):
            wrong.append(f"column {other!r} of {path} would not be read: call it {name!r}, or something else")
    used = [name for name in sorted({*wanted, site_column, "split"}) if name in present]
    empty: set[str] = set()
    for name in used:
        none = {""} if name == "label" else MISSING  # a class may be called NA
        if lacking := {where: cells[name] for where, cells in lines if cells[name].casefold() in none}:
            first, value = next(iter(lacking.items()))
            wrong.append(
                f"every row must have a value for {name!r}; {len(lacking):,} of {len(lines):,} have none, the first is "
                f"{f'{value} ({first})'.strip()}: fill it in, or remove the row"
            )
            empty |= lacking.keys()
    rows, listed, written = [], {}, {}  # type: list[ManifestRow], dict[Path, str], dict[tuple[str, str], str]
    splits = [*known]
    for where, cells in lines if {*wanted} <= {*present} else ():
        if where in empty:
            continue
        values = {name: cells[name] for name in used}
        if "split" in values and values["split"] not in splits:
            splits.append(values["split"])
            wrong.append(f"split must be one of {', '.join(known)}; got {values['split']!r} in {where}")
        file, patient = path.parent / values[column], cells.get("patient", "")
        if (earlier := listed.setdefault(file.resolve(), where)) != where:
            wrong.append(f"a file must be listed once; {file} is in {earlier} and in {where}")
        patient = "" if patient.casefold() in MISSING else patient
        if SHORTENED.fullmatch(patient):
            wrong.append(f"a patient must have a whole value; got {patient} ({where}): format the column as text")
        if (
            other := written.setdefault((values.get(site_column, ""), spelled(patient).casefold()), patient)
        ) != patient:
            wrong.append(
                f"patients must differ by more than spelling; got {shortened(other)} and {shortened(patient)} "
                f"({where}): write them alike, or rename one"
            )
        rows.append(ManifestRow(file, values["label"], where, values.get(site_column), values.get("split"), patient))
    try:
        _refuse_alike({row.site: row.where for row in reversed(rows) if row.site is not None}, "sites")
    except DataError as error:
        wrong += error.args
    if faults is None:
        more = [f"`flwr-replay data check` tells each fault in {path}"] * (len(wrong) > 1)
        refuse_all(wrong + more, DataError)
    return rows


def _plain(name: str) -> str:
    """Write a column's name without capitals, marks, and what tables often add: `Patient_ID` is `patient`."""
    letters = re.sub(r"[\W_]", "", name.casefold())
    return letters if letters in ("", "id") else re.sub(r"(id|s)$", "", letters)


def raws_of(
    rows: list[ManifestRow],
    task: TaskConfig,
    source: str,
    read: Callable[[ManifestRow, TaskConfig], NDArray[Any]],
    dtype: DTypeLike = np.uint8,
    known: Sequence[str] = SPLITS,
    kept: DecodedImages | None = None,
    divide: Callable[[], dict[str, NDArray[np.int64]]] | None = None,
) -> dict[str, Raw]:
    """Read all files, split by split.

    Labels are the task's `class_names`; without these, numbers. Those of a segmentation are files, white where 1.

    Parameters
    ----------
    source : str
        The origin of the rows, for error lines.
    read, dtype : Callable, dtype
        Reads a row's file as (C, H, W) of this dtype.
    known : sequence of str
        The splits.
    divide : Callable, or None
        Returns the indices of the rows in each split; None: by the column `split`, else by the hash.

    Raises
    ------
    DataError
        For a wrong label, or if there are no rows.
    """
    if not rows:
        raise DataError(f"task={task.name} needs examples; got none in {source}")
    y = _labels(rows, task, source)
    sites = None if rows[0].site is None else np.asarray([row.site for row in rows], dtype=np.str_)
    patients: NDArray[np.str_] | None = None
    if any(row.patient for row in rows):  # a site's own name of one, or nobody else's
        patients = np.asarray([f"{row.site or ''}/{row.patient or row.where}" for row in rows], np.str_)

    def divided() -> dict[str, NDArray[np.int64]]:
        if divide:
            members = divide()
        else:  # keep the rows' order within a split, so that a site's examples are in the order of its own folder
            splits = _splits(rows, sites, task.validation)
            members = {split: np.flatnonzero(splits == split) for split in known}
        if patients is not None:
            _refuse_shared(rows, patients, members)
        return members

    files, about = [row.file for row in rows], [(row.site, row.split, row.patient) for row in rows]
    by_label = [row.label for row in rows] if divide else []  # as a division of one's own may be
    splits = decoded(ImageSource(task, files, [*about, *by_label], divided, lambda n: read(rows[n], task), dtype), kept)
    return {
        split: Raw(x, y[members], source, source, *(None if of is None else of[members] for of in (sites, patients)))
        for split, (members, x) in splits.items()
    }


def _labels(rows: list[ManifestRow], task: TaskConfig, source: str) -> NDArray[Any]:
    """Turn labels into class numbers, numbers or masks; a wrong one is reported with its row."""
    _refuse_missing(rows, task.class_names)
    if task.kind == "segmentation":
        return np.stack(each(lambda row: _mask(row, task, Path(source).parent), rows))
    if task.kind == "regression":
        return np.asarray([_number(row) for row in rows], np.float32)
    if not task.class_names and (words := words_of(rows)):
        # An institution numbers names as all others do, though it may lack a class or call one otherwise.
        raise DataError(
            f"labels in {source} are names ({some(words)}): set task.class-names to all of them, in one order "
            f"everywhere, and task.classes to their number; it is {task.classes}"
        )
    classes = Classes(task)
    return np.asarray([classes.number(row.label, row.where) for row in rows], np.int64)


def _number(row: ManifestRow) -> float:
    try:
        return float(row.label)
    except ValueError:
        raise DataError(f"labels must be numbers; got {shortened(row.label)} ({row.where}): correct it") from None


def _mask(row: ManifestRow, task: TaskConfig, folder: Path) -> NDArray[np.uint8]:
    """Read a mask, and fit it as its image is."""
    grey = fitted(picture(folder / row.label, "L", row.where), task.size, task.fit, mask=True)
    return (np.asarray(grey) > 127).astype(np.uint8)


def words_of(rows: Sequence[ManifestRow]) -> list[str]:
    """Return the labels, each once and sorted, if they are names; nothing if they are whole numbers.

    Raises
    ------
    DataError
        If some are missing, some are names and some numbers, or two differ by case or spaces only.
    """
    none = _missing(rows)
    labelled = [row for row in rows if row.label not in none]
    words = sorted({label for row in labelled if not WHOLE.fullmatch(label := spelled(row.label))})

    def of_one_form() -> None:
        if words and (numbered := next((row for row in labelled if WHOLE.fullmatch(spelled(row.label))), None)):
            raise DataError(
                f"labels must be all numbers or all names; got {shortened(words[0])} and {shortened(numbered.label)} "
                f"({numbered.where}): use one form only, or set task.class-names"
            )

    alike = partial(_refuse_alike, {spelled(row.label): row.where for row in reversed(labelled)}, "labels")
    refuse_each(partial(_refuse_missing, rows), alike, of_one_form)
    return words


def _missing(rows: Sequence[ManifestRow], names: Sequence[str] = ()) -> set[str]:
    """Return the labels that say that there is none, unless a class is called so."""
    none = {label for label in {row.label for row in rows} if spelled(label).casefold() in MISSING}
    return {label for label in none if spelled(label) not in map(spelled, names)}


def _refuse_missing(rows: Sequence[ManifestRow], names: Sequence[str] = ()) -> None:
    """Refuse rows without a label."""
    none = _missing(rows, names)
    if missing := [row for row in rows if row.label in none]:
        raise DataError(
            f"every example must have a label; {len(missing):,} of {len(rows):,} have none, the first is "
            f"{shortened(missing[0].label)} ({missing[0].where}): label them or leave them out; a class that is called "
            "so stands in task.class-names"
        )


def _refuse_alike(places: Mapping[str, str], what: str) -> None:
    """Refuse names that differ by case, spaces, hyphens or invisible characters only, labels by a copy's mark, too."""
    first: dict[str, str] = {}
    pairs = [(first.setdefault(bare(name), name), name, "spelling") for name in places]
    if what == "labels":
        pairs += [(first.get(bare(COPY.sub("", name)), name), name, "a copy's mark") for name in places]
    for other, name, rule in pairs:
        if other != name:
            also = ", or set task.class-names to all of them" if what == "labels" else ""
            raise DataError(
                f"{what} must differ by more than {rule}; got {shortened(other)} ({places[other]}) and "
                f"{shortened(name)} ({places[name]}): write them alike{also}"
            )


def _splits(rows: list[ManifestRow], sites: NDArray[np.str_] | None, validates: bool) -> NDArray[np.str_]:
    """Return each row's split. A site's depend on its own rows only."""
    given = rows[0].split is not None
    splits = np.asarray([row.split or "train" for row in rows], dtype="<U8")
    if given and not validates:
        return splits
    places = np.asarray([_place(row) for row in rows])
    for site in [None] if sites is None else np.unique(sites):
        members = np.arange(len(rows)) if sites is None else np.flatnonzero(sites == site)
        if not given:
            splits[members[places[members] < TESTED]] = "test"
            # All of a few patients may fall into one split, but both need some; a single patient is for training.
            for split, end in (("test", places[members].min()), ("train", places[members].max())):
                if not (splits[members] == split).any():
                    splits[members[places[members] == end]] = split
        trained = members[splits[members] == "train"]
        if validates and len(trained) and "val" not in splits[members]:
            low = 0.0 if given else TESTED  # where a hash has chosen who trains, it lies above
            splits[trained[parted(places[trained], low + (1 - low) * VALIDATED)[0]]] = "val"
    return splits


def _refuse_shared(
    rows: list[ManifestRow], patients: NDArray[np.str_], members: Mapping[str, NDArray[np.int64]]
) -> None:
    """Refuse a patient whose examples are in two splits: testing on somebody known by training is no test."""
    splits_of: dict[str, str] = {}
    for number, split in sorted((number, split) for split, chosen in members.items() for number in chosen.tolist()):
        if (other := splits_of.setdefault(patients[number], split)) != split:
            raise DataError(
                f"all examples of a patient must be in one split; {shortened(rows[number].patient)} is in {other} and "
                f"in {split} ({rows[number].where}): correct the column split"
            )


def parted(places: NDArray[np.float64], share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of places below a share, and the others; one at least of both, if there are two places."""
    low = places < share
    if len(np.unique(places)) > 1:
        low |= places == places.min()
        low &= places != places.max()
    elif low.all():
        low[:] = False
    return np.flatnonzero(low), np.flatnonzero(~low)


def _place(row: ManifestRow) -> float:
    """Return a number in [0, 1) for a row's patient: a hash that depends on no other row, and on no folder."""
    if row.patient:
        return derived_seed(SPLIT_SEED, "patient", row.patient) / 2**63
    try:
        with open(row.file, "rb") as file:
            return derived_seed(SPLIT_SEED, "file", file_digest(file, "sha256").hexdigest()) / 2**63
    except OSError:  # reading it as an image says what is wrong
        return 0.0


def some(names: Sequence[str]) -> str:
    """Write a few names as a list."""
    return ", ".join(shortened(name)[1:-1] for name in names[:5]) + (", ..." if len(names) > 5 else "")
