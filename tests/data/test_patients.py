"""Patients with several examples: nobody's examples lie at two institutions, or in two splits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flwr_replay.config.sections import PartitionConfig, TaskConfig
from flwr_replay.data import Dataset, Examples, load, partition
from flwr_replay.data.partitions import patients_of
from flwr_replay.data.skew import ks_matrix, mean_pairwise
from flwr_replay.errors import ConfigError, DataError


def examples(patients: int, continuous: bool = False) -> Examples:
    """One to three examples of each patient in a random order, most with the patient's own label."""
    rng = np.random.default_rng(patients)
    owner = rng.permutation(np.repeat(np.arange(patients), rng.integers(1, 4, patients)))
    y = np.where(rng.random(len(owner)) < 0.9, owner % 4, rng.integers(0, 4, len(owner)))
    x = rng.integers(0, 256, (len(owner), 1, 2, 2), np.uint8)
    return Examples(x, y.astype(np.float32 if continuous else np.int64), None, owner.astype(np.str_))


DATASET = Dataset("seen", examples(300), examples(61), examples(40))
SHARES = ("0.7 0.1 0.1 0.1", "0.1 0.7 0.1 0.1", "0.1 0.1 0.4 0.4")


@pytest.mark.parametrize("test", ["iid", "mirror"])
@pytest.mark.parametrize(
    "config",
    [
        PartitionConfig(name="iid"),
        PartitionConfig(name="ks", ks=0.6),
        PartitionConfig(name="dirichlet", alpha=0.5),
        PartitionConfig(name="shares", shares=SHARES),
    ],
    ids=lambda config: config.name,
)
def test_a_patients_examples_lie_at_one_institution(config, test):
    dealing = partition(DATASET, PartitionConfig(**{**vars(config), "test": test}), 3, 0)
    assert DATASET.val is not None
    assert dealing.val is not None
    for held, shards in ((DATASET.train, dealing.train), (DATASET.test, dealing.test), (DATASET.val, dealing.val)):
        assert held.patients is not None
        owners = [set(held.patients[shard]) for shard in shards]
        assert not owners[0] & owners[1] | owners[0] & owners[2] | owners[1] & owners[2]
        whole = np.concatenate(shards)
        assert len(np.unique(whole)) == len(whole) == np.isin(held.patients, [*set.union(*owners)]).sum()


def test_the_skew_is_near_the_one_asked_for():
    dealing = partition(DATASET, PartitionConfig(name="ks", ks=0.6), 3, 0)
    skew = mean_pairwise(ks_matrix([DATASET.train.labels[own] for own in dealing.train]))
    assert dealing.ks == skew
    assert abs(skew - 0.6) < 0.08  # 300 patients, one label in ten is not the patient's own


def test_sizes_count_patients():
    dealing = partition(DATASET, PartitionConfig(name="iid", size=50), 3, 0)
    assert DATASET.train.patients is not None
    assert [len(set(DATASET.train.patients[own])) for own in dealing.train] == [50, 50, 50]
    assert [len(own) for own in dealing.train] != [50, 50, 50]


def test_continuous_labels_are_dealt_by_their_means():
    held = examples(90, continuous=True)
    assert held.patients is not None
    patients = patients_of(held)
    for label, own in zip(patients.labels, patients.members, strict=True):
        assert len(set(held.patients[own])) == 1
        assert label == held.y[own].mean()
    dataset = Dataset("seen", held, examples(30, continuous=True))
    dealing = partition(dataset, PartitionConfig(name="ks", ks=0.5), 2, 0)
    assert not {*held.patients[dealing.train[0]]} & {*held.patients[dealing.train[1]]}


def test_one_example_of_each_patient_is_dealt_as_without_patients():
    held = examples(80)
    named = Examples(held.x, held.y, None, np.arange(len(held)).astype(np.str_))
    plain = Examples(held.x, held.y)
    config = PartitionConfig(name="ks", ks=0.5)
    both = [partition(Dataset("seen", shown, shown), config, 3, 0) for shown in (named, plain)]
    for row, other in zip(both[0].train, both[1].train, strict=True):
        np.testing.assert_array_equal(row, other)


@pytest.mark.parametrize(
    "config", [PartitionConfig(name="majority", p=0.5), PartitionConfig(name="ks", ks=0.5, drop=True)]
)
def test_what_counts_single_examples_is_refused(config):
    with pytest.raises(ConfigError, match="counts single examples; these data name patients with several"):
        partition(DATASET, config, 2, 0)


def folder_of(root: Path, split: str) -> TaskConfig:
    """Four patients with two images each, of which the last is in the split train, and in another one."""
    rows = ["image,label,patient,split"]
    for n in range(8):
        Image.fromarray(np.full((4, 4), n, np.uint8)).save(root / f"{n}.png")
        splits = ["train", split if n == 7 else "train"]
        rows.append(f"{n}.png,{n // 2 % 2},P{n // 2},{'test' if n < 4 else splits[n % 2]}")
    (root / "manifest.csv").write_text("\n".join(rows))
    return TaskConfig(name="folder", format="folder", data_dir=str(root), channels=1, size=4, classes=2)


def test_a_manifest_names_patients(tmp_path):
    dataset = load(folder_of(tmp_path, "train"))
    assert dataset.train.patients is not None
    assert [*dataset.train.patients] == ["/P2", "/P2", "/P3", "/P3"]


def test_a_patient_in_two_splits_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"one split; 'P3' is in train and in test \(.*line 9\): correct the column"):
        load(folder_of(tmp_path, "test"))
