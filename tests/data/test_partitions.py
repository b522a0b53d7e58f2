"""Partitions: nobody's example twice, sizes as said, the skew as asked, the same again with the same seed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flwr_replay.config.sections import PartitionConfig, TaskConfig
from flwr_replay.data import Dataset, Examples, Partition, institution_name, ks_matrix, load, partition
from flwr_replay.data.skew import mean_pairwise
from flwr_replay.errors import ConfigError, DataError

Make = Callable[..., Any]
quick = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])

CONFIGS = st.one_of(
    st.builds(PartitionConfig, name=st.just("iid"), test=st.sampled_from(["iid", "mirror"])),
    st.builds(
        PartitionConfig,
        name=st.just("majority"),
        p=st.floats(0.1, 1),
        majors=st.sampled_from(["distinct", "random"]),
        test=st.sampled_from(["iid", "mirror"]),
    ),
    st.builds(
        PartitionConfig,
        name=st.just("ks"),
        ks=st.floats(0.25, 0.8),
        size=st.sampled_from([0, 40]),
        test=st.sampled_from(["iid", "mirror"]),
    ),
)


def check_owners(dataset: Dataset, dealing: Partition) -> None:
    """No example twice; every test example once, and every validation example if all train; nobody empty."""
    train, test = np.concatenate(dealing.train), np.concatenate(dealing.test)
    assert dealing.val is not None
    assert dataset.val is not None
    val = np.concatenate(dealing.val)
    assert all(len(np.unique(dealt)) == len(dealt) for dealt in (train, test, val))
    assert len(test) == len(dataset.test)
    assert len(val) == len(dataset.val) or len(train) < len(dataset.train)
    for shards in (dealing.train, dealing.test, dealing.val):
        assert all(len(shard) and shard.dtype == np.int64 and (np.diff(shard) > 0).all() for shard in shards)
    assert list(dealing.names) == sorted(dealing.names)
    assert dealing.ks == pytest.approx(mean_pairwise(ks_matrix([dataset.train.y[shard] for shard in dealing.train])))


def same(a: Partition, b: Partition) -> bool:
    shards = [(*p.train, *p.test, *(p.val or ())) for p in (a, b)]
    return a.names == b.names and all(np.array_equal(x, y) for x, y in zip(*shards, strict=True))


@quick
@given(config=CONFIGS, nodes=st.integers(2, 5), seed=st.integers(0, 99))
def test_invariants_of_every_partition(dataset: Make, config: PartitionConfig, nodes: int, seed: int) -> None:
    data = dataset(600, seed=seed)
    dealing = partition(data, config, nodes, seed)
    check_owners(data, dealing)
    sizes = [len(shard) for shard in dealing.train]
    assert max(sizes) - min(sizes) <= (config.name != "majority")
    if config.size:
        assert sizes == [config.size] * nodes
    elif config.name != "majority":
        assert sum(sizes) == 600
    if config.test == "iid":
        assert np.ptp([len(shard) for shard in dealing.test]) <= 1
    assert same(dealing, partition(data, config, nodes, seed))
    assert not same(dealing, partition(data, config, nodes, seed + 100))


def test_sorted_names_are_in_numeric_order(dataset: Make) -> None:
    names = partition(dataset(), PartitionConfig(name="iid"), 12, 0).names
    assert names == tuple(institution_name(k, 12) for k in range(12))
    assert names == tuple(sorted(names))
    assert names[0] == "institution-01"
    assert partition(dataset(), PartitionConfig(name="iid"), 9, 0).names[8] == "institution-9"


def test_examples_of_an_institution(dataset: Make) -> None:
    data = dataset()
    dealing = partition(data, PartitionConfig(name="iid"), 3, 0)
    own = dealing.examples(data, 1)
    assert own.name == "institution-2"
    np.testing.assert_array_equal(own.train.x, data.train.x[dealing.train[1]])
    np.testing.assert_array_equal(own.test.y, data.test.y[dealing.test[1]])
    assert own.val is not None
    assert dealing.examples(replace(data, val=None), 1).val is None
    assert partition(dataset(val=False), PartitionConfig(name="iid"), 3, 0).val is None


def test_iid_test_shards_do_not_depend_on_how_the_training_examples_are_dealt(dataset: Make) -> None:
    data = dataset()
    iid, skewed = (partition(data, PartitionConfig(name=name), 4, 0) for name in ("iid", "ks"))
    assert all(np.array_equal(a, b) for a, b in zip(iid.test, skewed.test, strict=True))


def test_size_is_refused_where_there_are_too_few(dataset: Make) -> None:
    with pytest.raises(ConfigError, match=r"at most partition\.size=100"):
        partition(dataset(400), PartitionConfig(name="iid", size=101), 4, 0)
    with pytest.raises(ConfigError, match=r"at most partition\.size=100"):
        partition(dataset(400), PartitionConfig(name="ks", size=101), 4, 0)


@pytest.mark.parametrize("name", ["iid", "majority"])
def test_an_institution_left_empty_is_an_error(dataset: Make, name: str) -> None:
    data = dataset(12, classes=2)
    config = PartitionConfig(name=name, majors="random")
    with pytest.raises((DataError, ConfigError), match="fewer nodes"):
        partition(data, config, 13, 0)
    with pytest.raises(DataError, match="must hold test examples"):
        partition(data, config, 7, 0)


# --------------------------------------------------------------------------------------------------------- majority


@quick
@given(p=st.floats(0.05, 1), nodes=st.integers(1, 10), seed=st.integers(0, 99), size=st.integers(1, 30))
def test_majority_gives_each_its_own_major(dataset: Make, p: float, nodes: int, seed: int, size: int) -> None:
    data = dataset(500)
    dealing = partition(data, PartitionConfig(name="majority", p=p, size=size), nodes, seed)
    wanted = int(p * size + 0.5)
    counts_KC = np.stack([np.bincount(data.train.y[shard], minlength=10) for shard in dealing.train])
    assert (counts_KC.sum(1) == size).all()
    majors = [set(np.flatnonzero(row == wanted)) for row in counts_KC]
    assert all(majors)
    if wanted > size - wanted:
        assert len(set.union(*majors)) == nodes


@quick
@given(
    counts=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    p=st.floats(0.01, 1),
    nodes=st.integers(1, 6),
    majors=st.sampled_from(["distinct", "random"]),
    seed=st.integers(0, 99),
)
def test_the_largest_size_works_and_one_more_does_not(
    examples: Make, counts: list[int], p: float, nodes: int, majors: str, seed: int
) -> None:
    y = np.repeat(np.arange(len(counts)), counts)
    data = Dataset("made", examples(y), examples(np.zeros(50, np.int64)))
    config = PartitionConfig(name="majority", p=p, majors=majors)
    try:
        dealing = partition(data, config, nodes, seed)
    except ConfigError as error:
        assert "room for 0" in str(error) or nodes > len(counts)  # noqa: PT017
        return
    largest = len(dealing.train[0])
    assert len(np.unique(np.concatenate(dealing.train))) == largest * nodes
    with pytest.raises(ConfigError, match=rf"at most partition\.size={largest}$"):
        partition(data, replace(config, size=largest + 1), nodes, seed)


def test_the_rest_is_drawn_evenly_from_the_other_classes(dataset: Make) -> None:
    data = dataset(4000)
    dealing = partition(data, PartitionConfig(name="majority", p=0.5, size=360), 4, 0)
    for shard in dealing.train:
        others = np.sort(np.bincount(data.train.y[shard], minlength=10))[:-1]
        assert others.min() > 5  # 20 are expected, fewer of the classes that others have as major
        assert others.max() < 40


def test_more_nodes_than_classes_need_random_majors(dataset: Make) -> None:
    data = dataset(classes=3)
    with pytest.raises(ConfigError, match="nodes=4 and 3 classes"):
        partition(data, PartitionConfig(name="majority"), 4, 0)
    assert len(partition(data, PartitionConfig(name="majority", majors="random"), 4, 0).train) == 4


# --------------------------------------------------------------------------------------------------------------- KS


@quick
@given(ks=st.floats(0.2, 1), nodes=st.integers(2, 6), seed=st.integers(0, 99), test=st.sampled_from(["iid", "mirror"]))
def test_ks_of_continuous_labels_is_reached(dataset: Make, ks: float, nodes: int, seed: int, test: str) -> None:
    data = dataset(800, continuous=True, seed=seed)
    dealing = partition(data, PartitionConfig(name="ks", ks=ks, test=test), nodes, seed)
    assert dealing.ks == pytest.approx(ks, abs=0.02)
    check_owners(data, dealing)


@quick
@given(
    counts=st.lists(st.integers(20, 300), min_size=2, max_size=6),
    ks=st.floats(0, 1),
    nodes=st.integers(2, 5),
    drop=st.booleans(),
)
def test_ks_is_reached_or_refused_with_the_range(
    examples: Make, counts: list[int], ks: float, nodes: int, drop: bool
) -> None:
    y = np.repeat(np.arange(len(counts)), counts)
    data = Dataset("made", examples(y), examples(y))
    config = PartitionConfig(name="ks", ks=ks, drop=drop)
    try:
        dealing = partition(data, config, nodes, 0)
    except ConfigError as error:
        low, high = map(float, str(error).split("lies in ")[1].split(" here")[0].split("-"))
        assert not low <= ks <= high or "come no nearer" in str(error)  # noqa: PT017
        return
    assert dealing.ks == pytest.approx(ks, abs=0.02)
    assert sum(map(len, dealing.train)) + dealing.dropped == len(y)
    assert np.ptp([len(shard) for shard in dealing.train]) <= 1
    assert drop or not dealing.dropped


def test_drop_leaves_out_the_most_frequent_class_only_and_as_few_as_needed(examples: Make) -> None:
    y = np.repeat([0, 1], [100, 900])
    data = Dataset("made", examples(y), examples(y))
    with pytest.raises(ConfigError, match=r"in 0\.0\d-0\.20 here.*drop=true, which reaches 0\.50 .* 600 of 1000"):
        partition(data, PartitionConfig(name="ks", ks=0.5), 4, 0)
    dealing = partition(data, PartitionConfig(name="ks", ks=0.5, drop=True), 4, 0)
    # A quarter of the examples left must be of class 0, so that it fills one block of four: 3 of 6 pairs differ.
    assert dealing.dropped == 600
    assert dealing.ks == pytest.approx(0.5)
    assert np.count_nonzero(y[np.concatenate(dealing.train)] == 0) == 100
    assert partition(data, PartitionConfig(name="ks", ks=0.2, drop=True), 4, 0).dropped == 0


def test_ks_needs_two_institutions_and_drop_needs_classes(dataset: Make) -> None:
    with pytest.raises(ConfigError, match="nodes=1"):
        partition(dataset(), PartitionConfig(name="ks"), 1, 0)
    with pytest.raises(ConfigError, match="continuous"):
        partition(dataset(continuous=True), PartitionConfig(name="ks", drop=True), 4, 0)
    for name in ("majority", "dirichlet"):
        with pytest.raises(ConfigError, match="partition=ks"):
            partition(dataset(continuous=True), PartitionConfig(name=name), 4, 0)


@pytest.mark.parametrize(("nodes", "most"), [(2, 1.0), (3, 2 / 3), (4, 2 / 3), (8, 4 / 7)])
def test_most_that_a_balanced_binary_label_allows(examples: Make, nodes: int, most: float) -> None:
    y = np.arange(960) % 2
    dealing = partition(
        Dataset("made", examples(y), examples(y)), PartitionConfig(name="ks", ks=round(most, 3)), nodes, 0
    )
    assert dealing.ks == pytest.approx(most, abs=0.02)
    if nodes > 2:
        with pytest.raises(ConfigError, match=f"-{most:.2f} here"):
            partition(Dataset("made", examples(y), examples(y)), PartitionConfig(name="ks", ks=0.9), nodes, 0)


# ----------------------------------------------------------------------------------------------- natural, dirichlet


def test_natural_deals_by_site(examples: Make) -> None:
    train = examples(np.arange(6) % 2, ["b", "a", "b", "c", "a", "c"])
    data = Dataset("made", train, examples([0, 1, 1], ["c", "b", "a"]), examples([0], ["b"]))
    dealing = partition(data, PartitionConfig(name="natural"), 3, 0)
    assert dealing.names == ("b", "a", "c")  # as the data have them
    assert [shard.tolist() for shard in dealing.train] == [[0, 2], [1, 4], [3, 5]]
    assert [shard.tolist() for shard in dealing.test] == [[1], [2], [0]]
    assert dealing.val is not None
    assert [len(shard) for shard in dealing.val] == [1, 0, 0]
    with pytest.raises(ConfigError, match=r"sites, 3; got nodes=4"):
        partition(data, PartitionConfig(name="natural"), 4, 0)
    with pytest.raises(ConfigError, match=r"partition\.size=2"):
        partition(data, PartitionConfig(name="natural", size=2), 3, 0)
    with pytest.raises(DataError, match="c of 3 got none"):
        partition(replace(data, test=examples([1, 1], ["b", "a"])), PartitionConfig(name="natural"), 3, 0)
    with pytest.raises(ConfigError, match="site-column"):
        partition(replace(data, train=examples([0])), PartitionConfig(name="natural"), 3, 0)


def test_dirichlet(dataset: Make) -> None:
    pytest.importorskip("flwr_datasets", reason="flwr-datasets is an extra")
    data = dataset(2000)
    skewed, even = (partition(data, PartitionConfig(name="dirichlet", alpha=alpha), 4, 0) for alpha in (0.1, 1000.0))
    for dealing in (skewed, even):
        check_owners(data, dealing)
        assert sum(map(len, dealing.train)) == 2000
    assert even.tv < 0.15 < 0.5 < skewed.tv
    assert same(even, partition(data, PartitionConfig(name="dirichlet", alpha=1000.0), 4, 0))
    cut = partition(data, PartitionConfig(name="dirichlet", alpha=10.0, size=300), 4, 0)
    assert [len(shard) for shard in cut.train] == [300] * 4
    with pytest.raises(ConfigError, match="at least 501 of 2000"):
        partition(data, PartitionConfig(name="dirichlet", size=501), 4, 0)


def test_dirichlet_without_its_package(dataset: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", None)
    with pytest.raises(ConfigError, match=r"\[dirichlet\]|--extra dirichlet"):
        partition(dataset(), PartitionConfig(name="dirichlet"), 4, 0)


# ----------------------------------------------------------------------------------------------------------- mirror


@quick
@given(nodes=st.integers(2, 6), seed=st.integers(0, 99), p=st.floats(0.2, 1))
def test_mirrored_test_examples_have_their_institutions_mix(dataset: Make, nodes: int, seed: int, p: float) -> None:
    data = dataset(600)
    dealing = partition(data, PartitionConfig(name="majority", p=p, test="mirror"), nodes, seed)
    check_owners(data, dealing)
    train_KC, test_KC = (
        np.stack([np.bincount(split.y[shard], minlength=10) for shard in shards])
        for split, shards in ((data.train, dealing.train), (data.test, dealing.test))
    )
    held_C = train_KC.sum(0)
    shares_KC = np.where(held_C > 0, train_KC / np.maximum(held_C, 1), 1 / nodes)
    assert np.abs(test_KC - shares_KC * test_KC.sum(0)).max() < 1


@quick
@given(config=CONFIGS, nodes=st.integers(2, 6), seed=st.integers(0, 99), size=st.sampled_from([0, 40]))
def test_validation_examples_have_their_institutions_mix(
    dataset: Make, config: PartitionConfig, nodes: int, seed: int, size: int
) -> None:
    """Also where most training examples are nobody's: a class without a major has no more than it would have had."""
    data = dataset(4000)
    dealing = partition(data, replace(config, size=size), nodes, seed)
    assert data.val is not None
    assert dealing.val is not None
    train_KC, val_KC = (
        np.stack([np.bincount(split.y[shard], minlength=10) for shard in shards])
        for split, shards in ((data.train, dealing.train), (data.val, dealing.val))
    )
    rate = len(data.val) / len(data.train)  # the same in every class of these data
    assert np.abs(val_KC.sum(0) - rate * train_KC.sum(0)).max() < 1
    assert np.abs(val_KC - val_KC.sum(0) * train_KC / np.maximum(train_KC.sum(0), 1)).max() < 1


def test_mirror_of_continuous_labels_goes_by_deciles(dataset: Make) -> None:
    data = dataset(800, continuous=True)
    dealing = partition(data, PartitionConfig(name="ks", ks=1.0, test="mirror"), 4, 0)
    assert data.val is not None
    assert dealing.val is not None
    for held, shards in ((data.test, dealing.test), (data.val, dealing.val)):
        means = [held.y[shard].mean() for shard in shards]
        assert all(a < b for a, b in pairwise(means))


# -------------------------------------------------------------------------------------------------------- real data


@pytest.fixture(scope="module")
def pneumonia(shared: Any, task: Callable[..., TaskConfig]) -> Dataset:
    return load(task("medmnist", data_dir=str(shared / "pneumoniamnist.npz")))


@pytest.mark.parametrize(("nodes", "most"), [(2, 1.0), (3, 2 / 3), (4, 2 / 3), (8, 4 / 7)])
def test_pneumonia_allows_little_without_and_more_with_drop(pneumonia: Dataset, nodes: int, most: float) -> None:
    with pytest.raises(ConfigError, match=r"-0\.20 here"):
        partition(pneumonia, PartitionConfig(name="ks", ks=0.5), nodes, 0)
    dealing = partition(pneumonia, PartitionConfig(name="ks", ks=round(most, 3), drop=True), nodes, 0)
    assert dealing.ks == pytest.approx(most, abs=0.02)
    assert 2700 < dealing.dropped <= 3106  # 3,494 - 388 at the most: both classes alike; two to one suffices for three
    assert dealing.dropped + sum(map(len, dealing.train)) == 3882


def test_mnist_reaches_what_ten_classes_in_four_blocks_allow(shared: Any, task: Callable[..., TaskConfig]) -> None:
    mnist = load(task("mnist", data_dir=str(shared / "mnist")))
    dealing = partition(mnist, PartitionConfig(name="ks", ks=0.93), 4, 0)
    assert dealing.ks == pytest.approx(0.93, abs=0.005)
    with pytest.raises(ConfigError, match=r"-0\.93 here"):
        partition(mnist, PartitionConfig(name="ks", ks=1.0), 4, 0)
    dealing = partition(mnist, PartitionConfig(name="majority", size=900), 8, 0)
    assert [len(shard) for shard in dealing.train] == [900] * 8
    assert len(partition(mnist, PartitionConfig(name="majority"), 8, 0).train[0]) < 910


def test_examples_are_checked(examples: Make) -> None:
    good = examples([0, 1])
    with pytest.raises(DataError, match="needs a label"):
        Examples(good.x, good.y[:1])
    with pytest.raises(DataError, match="float64"):
        Examples(good.x.astype(float), good.y)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="int32"):
        Examples(good.x, good.y.astype(np.int32))  # type: ignore[arg-type]
    assert good.nbytes == 2 * (4 + 8)


def test_more_institutions_than_examples_and_one_class_only_are_refused(dataset: Callable[..., Dataset]) -> None:
    data = dataset(40)
    few = len(data.train)
    for name in ("iid", "ks", "majority", "dirichlet"):
        with pytest.raises(ConfigError, match=f"examples of its own; got nodes=5000 for {few} of made: take fewer"):
            partition(data, PartitionConfig(name=name), 5000, 0)
    with pytest.raises(DataError, match="at least two classes; all have label 0"):
        partition(dataset(40, classes=1), PartitionConfig(name="iid"), 2, 0)
