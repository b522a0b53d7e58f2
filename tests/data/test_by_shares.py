"""Stated label shares: Qu et al.'s tables, counts by largest remainders, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flwr_replay.config.sections import PartitionConfig
from flwr_replay.data import Dataset, Examples, Partition, partition
from flwr_replay.errors import ConfigError, DataError

TABLE_1 = ("0.96 0.04", "0.83 0.17", "0.23 0.77", "0.09 0.91")


def data(*counts: int) -> Dataset:
    y = np.repeat(np.arange(len(counts)), counts)
    x = np.arange(len(y), dtype=np.float32).reshape(-1, 1, 1, 1)
    return Dataset("made", Examples(x, y), Examples(x[:20], y[:20]))


def dealt(dataset: Dataset, nodes: int, seed: int = 0, **options: object) -> Partition:
    return partition(dataset, PartitionConfig(name="shares", **options), nodes, seed)  # type: ignore[arg-type]


def counts(dataset: Dataset, partition: Partition) -> list[list[int]]:
    return [np.bincount(dataset.train.y[shard], minlength=2).tolist() for shard in partition.train]


def table(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def test_table_1_of_qu_et_al() -> None:
    dataset = data(3000, 3000)
    partition = dealt(dataset, 4, shares=TABLE_1, size=1000)
    assert counts(dataset, partition) == [[960, 40], [830, 170], [230, 770], [90, 910]]
    assert partition.ks == pytest.approx(np.mean([0.13, 0.73, 0.87, 0.60, 0.74, 0.14]), abs=1e-9)  # 0.535, as published
    assert len(np.unique(np.concatenate(partition.train))) == 4000
    again, other = dealt(dataset, 4, shares=TABLE_1, size=1000), dealt(dataset, 4, 1, shares=TABLE_1, size=1000)
    assert all(map(np.array_equal, partition.train, again.train))
    assert not np.array_equal(partition.train[0], other.train[0])


def test_a_files_columns_are_the_classes_names(tmp_path: Path) -> None:
    named = replace(data(50, 50), classes=("2", "1"))
    file = table(tmp_path / "s.csv", "institution,1,2,size", "a,0.9,0.1,10", "b,0.5,0.5,10")
    assert counts(named, dealt(named, 2, file=file)) == [[1, 9], [5, 5]]
    with pytest.raises(DataError, match="must have a column '2'"):
        dealt(named, 2, file=table(tmp_path / "s.csv", "institution,0,1", "a,0.9,0.1", "b,0.5,0.5"))


def test_as_many_as_there_are(tmp_path: Path) -> None:
    dataset = data(300, 400)
    partition = dealt(dataset, 4, shares=TABLE_1)
    size = len(partition.train[0])
    assert {len(shard) for shard in partition.train} == {size}
    with pytest.raises(ConfigError, match=f"at most partition.size={size}"):
        dealt(dataset, 4, shares=TABLE_1, size=size + 1)


def test_counts_are_by_largest_remainders() -> None:
    dataset = data(50, 50, 50)
    partition = dealt(dataset, 2, shares=("0.333 0.333 0.334", "0.5 0.25 0.25"), size=10)
    assert [np.bincount(dataset.train.y[shard]).tolist() for shard in partition.train] == [[3, 3, 4], [5, 3, 2]]


def test_a_table_names_institutions_and_sizes(tmp_path: Path) -> None:
    file = table(tmp_path / "s.csv", "institution,1,0,size", "south,0.1,0.9,20", "north,1,0,5")
    dataset = data(100, 100)
    partition = dealt(dataset, 2, file=file)
    assert partition.names == ("south", "north")
    assert counts(dataset, partition) == [[18, 2], [0, 5]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "set one of them"),
        ({"shares": TABLE_1, "file": "s.csv"}, "set one of them"),
        ({"shares": TABLE_1[:3]}, "nodes=3"),
        ({"shares": ("1 0 0",) * 4}, "each of 2 classes; got 3"),
        ({"shares": ("0.96 0.04", "a b", "1 0", "1 0")}, "numbers with spaces"),
        ({"shares": ("0.96 0.04", "1_0 0", "1 0", "1 0")}, "numbers with spaces"),
        ({"shares": ("0.9 0.2", *TABLE_1[1:])}, "sum to 1; got 0.9 0.2"),
        ({"shares": ("1.5 -0.5", *TABLE_1[1:])}, "must not be negative"),
        ({"shares": ("nan 1", *TABLE_1[1:])}, "must not be negative"),
        ({"shares": ("1", *TABLE_1[1:])}, "as many classes"),
    ],
)
def test_what_is_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        dealt(data(100, 100), 4, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["institution,0", "a,1"], "must have a column '1'"),
        (["institution,0,1,sise", "a,1,0,5"], "unknown column 'sise'"),
        (["institution,0,1", "a,1,0", "a,0,1"], "another institution; got 'a'"),
        (["institution,0,1", "a,x,0"], "must be numbers"),
        (["institution,0,1,size", "a,1,0,\u0663"], "sizes whole ones"),
        (["institution,0,1,size", "a,1,0,0"], "1 to 200, the training examples; got 0"),
        (["institution,0,1,size", f"a,1,0,{10**30}"], "the training examples; got 1000"),
        (["institution,0,1", "a,0.7,0"], "sum to 1"),
        (["institution,0,1"], "a row for each institution"),
    ],
)
def test_a_table_with_a_mistake(tmp_path: Path, lines: list[str], words: str) -> None:
    with pytest.raises(DataError, match=words):
        dealt(data(100, 100), 2, file=table(tmp_path / "s.csv", *lines))


def test_a_class_that_nobody_has_enough_of() -> None:
    with pytest.raises(ConfigError, match=r"class 1 has 1 examples"):
        dealt(data(100, 1), 4, shares=TABLE_1)
