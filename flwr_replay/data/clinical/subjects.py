"""Shared by the clinical readers: tables of cases, splits by subject, and decoding of the chosen images only.

Letters: N examples, C channels, H and W height and width in pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.sections import TaskConfig, require
from flwr_replay.data.decoded import DecodedImages, Source, decoded
from flwr_replay.data.manifest import VALIDATED
from flwr_replay.data.readers import SPLIT_SEED, Raw, csv_rows, data_root
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.rng import derived_seed

__all__ = ["TEST_SHARE", "Case", "divide", "keyed_rows", "pictures", "root_of", "splits_of"]

TEST_SHARE = 0.2  # of the subjects of every stratum, if `task.test_size` is 0

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    """One image, before it is read: its file, label, subject and, if known, institution."""

    image: Path
    label: float
    subject: str
    site: str = ""


def root_of(task: TaskConfig, holds: str) -> Path:
    """Return the data folder; `holds` is what it must contain, for error lines."""
    if not task.data_dir:
        raise ConfigError(f"task={task.name} reads a folder: set task.data-dir to the folder that holds {holds}")
    root = data_root(task)
    if not root.is_dir():
        raise DataError(f"task.data-dir must be the folder that holds {holds}; got {root}: there is none")
    return root


def keyed_rows(path: Path, key: str, columns: Sequence[str]) -> dict[str, dict[str, str]]:
    """Read a CSV file as rows by the value of one column, which must differ from row to row.

    Raises
    ------
    DataError
        As `csv_rows`, and for a row without a key, or with the same key as another row.
    """
    found: dict[str, dict[str, str]] = {}
    for where, row in csv_rows(path, [key, *columns]):
        if not row[key]:
            raise DataError(f"every row must have a value for {key!r}; {where} has none")
        if row[key] in found:
            raise DataError(f"every {key!r} must be listed once; {where} has {row[key]!r} again")
        found[row[key]] = row
    return found


def divide(
    subjects: Sequence[str], strata: Sequence[object], task: TaskConfig, source: Path, test_share: float = TEST_SHARE
) -> dict[str, Indices]:
    """Divide examples into train, val and test, so that no subject is in two of them.

    Within a stratum, subjects are ranked by a hash of their name. The ranking does not depend on the run's seed, the
    order of the files or other subjects. The first subjects are for testing, the next for validation, the next for
    training, in the same proportion in every stratum.

    Parameters
    ----------
    subjects : sequence of N str
        The subject of each example.
    strata : sequence of N hashable
        The institution or class of each example; a subject has that of its first example.
    task : TaskConfig
        Its sizes count subjects. With `balanced`, numbers of subjects per stratum differ by at most one in a split.
    source : Path
        The list of examples, for the error line.
    test_share : float
        Share of every stratum to test on if `task.test_size` is 0. Then the split of a subject depends on its own
        stratum only.

    Returns
    -------
    dict of str to int64 array
        Ascending indices of the examples of each split.

    Raises
    ------
    DataError
        If there are fewer subjects than the sizes ask for, or none remains to train on.
    """
    strata_of: dict[str, object] = {}
    for subject, stratum in zip(subjects, strata, strict=True):
        strata_of.setdefault(subject, stratum)
    groups: dict[object, list[str]] = {}
    for subject, stratum in strata_of.items():
        groups.setdefault(stratum, []).append(subject)
    fewest = min(map(len, groups.values()), default=0)
    places: dict[str, float] = {}
    hashes = {subject: derived_seed(SPLIT_SEED, task.format, subject) for subject in strata_of}
    for group in groups.values():
        used = fewest if task.balanced else len(group)
        for rank, subject in enumerate(sorted(group, key=hashes.__getitem__)[:used]):
            places[subject] = (rank + 0.5) / used
    order = sorted(places, key=lambda subject: (places[subject], hashes[subject]))
    test = task.test_size or sum(place < test_share for place in places.values())
    share = test / len(order) if task.test_size else test_share
    below = sum(place < share + VALIDATED * (1 - share) for place in places.values())
    validated = task.val_size or (max(below - test, 1) if task.validation else 0)
    held = test + validated
    train = task.train_size or max(len(order) - held, 1)
    if held + train > len(order):
        kind = f" in {len(groups)} classes of equal size" if task.balanced else ""
        raise DataError(
            f"task={task.name} must train on {train}, validate on {validated} and test on {test} subjects; got "
            f"{len(order)}{kind} in {source}: lower task.train-size, task.val-size or task.test-size, or add data"
        )
    chosen = {"test": order[:test], "val": order[test:held], "train": order[held : held + train]}
    splits = {subject: split for split, names in chosen.items() for subject in names}
    of_row = np.asarray([splits.get(subject, "") for subject in subjects])
    return {split: np.flatnonzero(of_row == split) for split in ("train", "val", "test")}


def pictures(
    cases: Sequence[Case],
    splits: Mapping[str, Indices],
    read: Callable[[Path], NDArray[np.uint8]],
    task: TaskConfig,
    source: Path,
    kept: DecodedImages | None,
) -> dict[str, Raw]:
    """Decode the cases of each split, or find them in `kept`.

    `read` returns one image, (C, H, W) with H = W = `task.size`.
    """
    chosen = np.concatenate(list(splits.values()))
    places = np.split(np.arange(len(chosen)), np.cumsum([len(rows) for rows in splits.values()])[:-1])
    files, divided = [cases[n].image for n in chosen], dict(zip(splits, places, strict=True))
    about = [(split, len(rows)) for split, rows in splits.items()]
    found = decoded(Source(task, files, about, lambda: divided, lambda n: read(files[n])), kept)
    raws = {}
    for split, rows in splits.items():
        own = [cases[n] for n in rows]
        y: NDArray[Any] = np.asarray(
            [case.label for case in own], np.float32 if task.kind == "regression" else np.int64
        )
        sites = np.asarray([case.site for case in own], np.str_)
        named = sites if sites.all() and len(own) else None
        patients = np.asarray([case.subject for case in own], np.str_)
        raws[split] = Raw(found[split][1], y, str(source), str(source), named, patients)
    return raws


def _divided(cases: Sequence[Case], task: TaskConfig, source: Path, **options: float) -> dict[str, Indices]:
    strata = [(case.site, case.label) for case in cases]
    return divide([case.subject for case in cases], strata, task, source, **options)


def with_balanced_tests(cases: Sequence[Case], task: TaskConfig, source: Path) -> dict[str, Indices]:
    """Divide cases so that every site tests on as many subjects of each class; all others are for training.

    Source: Pennisi et al. 2023, section IV-A: 20 % of each data set, balanced, are the test set.

    Raises
    ------
    ConfigError
        With `task.test_size`.
    DataError
        As `divide`, and if a class of a site has fewer than two subjects.
    """
    require(not task.test_size, "task.balanced=true tests on a fifth of every site's: leave task.test-size out")
    sites: dict[str, dict[float, dict[str, None]]] = {}
    for case in cases:
        sites.setdefault(case.site, {}).setdefault(case.label, {})[case.subject] = None
    tested: set[str] = set()
    for site, classes in sites.items():
        wanted = round(TEST_SHARE * sum(map(len, classes.values())) / len(classes))
        number = min(max(wanted, 1), min(map(len, classes.values())) - 1)
        if number < 1:
            raise DataError(f"task.balanced=true needs two subjects of every class at {site}; {source} has fewer")
        for subjects in classes.values():
            tested |= set(sorted(subjects, key=lambda subject: derived_seed(SPLIT_SEED, task.format, subject))[:number])
    rest = [row for row, case in enumerate(cases) if case.subject not in tested]
    found = _divided([cases[row] for row in rest], replace(task, balanced=False), source, test_share=0.0)
    test = np.asarray([row for row, case in enumerate(cases) if case.subject in tested], np.int64)
    return {split: test if split == "test" else np.asarray(rest, np.int64)[rows] for split, rows in found.items()}


def splits_of(
    cases: Sequence[Case],
    read: Callable[[Path], NDArray[np.uint8]],
    task: TaskConfig,
    source: Path,
    kept: DecodedImages | None,
) -> dict[str, Raw]:
    """Divide cases in the same proportion for every class of every site, and decode the chosen ones."""
    balance = task.balanced and any(case.site for case in cases)
    splits = with_balanced_tests(cases, task, source) if balance else _divided(cases, task, source)
    return pictures(cases, splits, read, task, source, kept)
