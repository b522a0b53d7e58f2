"""Divide a clinical set that `flwr-replay data convert` has listed: sizes and splits count subjects.

A subject is a patient or a lesion. All images of one are in one split. If a column `split` names the set's own test
images, they are the test split. With `task.test_size` other images are, and the set's own are left out.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.sections import TaskConfig, require
from flwr_replay.data.manifest import VALIDATED, ManifestRow
from flwr_replay.data.readers import SPLIT_SEED
from flwr_replay.errors import DataError
from flwr_replay.rng import derived_seed

__all__ = ["TEST_SHARE", "by_subjects", "divide"]

TEST_SHARE = 0.2  # of the subjects of every stratum, if `task.test_size` is 0

Indices = NDArray[np.int64]


def by_subjects(rows: Sequence[ManifestRow], task: TaskConfig, source: Path) -> dict[str, Indices]:
    """Divide rows in the same proportion for every class of every site.

    Raises
    ------
    ConfigError
        With `task.test_size` where tests are balanced at every site.
    DataError
        If there are fewer subjects than `task` asks for, or no test images where the set has its own.
    """
    rows = [row if row.patient else replace(row, patient=row.where) for row in rows]
    tests = np.asarray([row.split == "test" for row in rows])
    rest, fixed = ~tests, rows[0].split is not None and not task.test_size
    if fixed and not tests.any():
        raise DataError(
            f"task={task.name} tests on the set's own test images; {source} lists none: convert the whole set, or set "
            "task.test-size to the number of training images to test on"
        )
    if task.balanced and any(row.site for row in rows):
        tests = _balanced_tests(rows, task, source)
        rest, fixed, task = ~tests, True, replace(task, balanced=False)
    places = np.flatnonzero(rest)
    among = [rows[n] for n in places.tolist()]
    strata = [(row.site, row.label if task.kind == "classification" else "") for row in among]
    members_of = divide([row.patient for row in among], strata, task, source, 0.0 if fixed else TEST_SHARE)
    splits = {split: places[members] for split, members in members_of.items()}
    return splits | {"test": np.flatnonzero(tests)} if fixed else splits


def divide(
    subjects: Sequence[str], strata: Sequence[object], task: TaskConfig, source: Path, test_share: float = TEST_SHARE
) -> dict[str, Indices]:
    """Divide examples into train, val and test, so that no subject is in two of them.

    Within a stratum, subjects are ranked by a hash of their name. The ranking does not depend on the run's seed, the
    order of the files or other subjects. The first subjects are for testing, the next for validation, the next for
    training, in the same proportion in every stratum.

    Parameters
    ----------
    subjects, strata : sequence of N str, sequence of N hashable
        The subject of each example, and its institution or class; a subject has that of its first example.
    task : TaskConfig
        Its sizes count subjects. With `balanced`, numbers of subjects per stratum differ by at most one in a split.
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
    hashes = {subject: derived_seed(SPLIT_SEED, task.name, subject) for subject in strata_of}
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


def _balanced_tests(rows: Sequence[ManifestRow], task: TaskConfig, source: Path) -> NDArray[np.bool_]:
    """Say which rows are for testing, so that every site tests on as many subjects of each class.

    Source: Pennisi et al. 2023, section IV-A: 20 % of each data set, balanced, are the test set.
    """
    require(not task.test_size, "task.balanced=true tests on a fifth of every site's: leave task.test-size out")
    sites: dict[str | None, dict[str, dict[str, None]]] = {}
    for row in rows:
        sites.setdefault(row.site, {}).setdefault(row.label, {})[row.patient] = None
    tested: set[str] = set()
    for site, classes in sites.items():
        wanted = round(TEST_SHARE * sum(map(len, classes.values())) / len(classes))
        number = min(max(wanted, 1), min(map(len, classes.values())) - 1)
        if number < 1:
            raise DataError(f"task.balanced=true needs two subjects of every class at {site}; {source} has fewer")
        for subjects in classes.values():
            tested |= set(sorted(subjects, key=lambda subject: derived_seed(SPLIT_SEED, task.name, subject))[:number])
    return np.asarray([row.patient in tested for row in rows])
