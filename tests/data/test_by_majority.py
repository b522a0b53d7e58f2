"""partition=majority: the two rules for the rest, and the warning where classes starve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flwr_replay.config.sections import PartitionConfig, TaskConfig
from flwr_replay.data import Dataset, Partition, load, partition, show
from flwr_replay.data.by_majority import _even_counts, _largest, _sizes
from flwr_replay.data.class_counts import extremes, summary, warnings
from flwr_replay.errors import ConfigError
from flwr_replay.report.texts import notes

Make = Callable[..., Any]
quick = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
MAJORS = st.sampled_from(["distinct", "random"])


def majority(**options: Any) -> PartitionConfig:
    return PartitionConfig(name="majority", **options)


def count(data: Dataset, dealing: Partition) -> Any:
    classes = int(data.train.y.max()) + 1
    return np.stack([np.bincount(data.train.y[own], minlength=classes) for own in dealing.train])


# ------------------------------------------------------------------------------------------------------- the rules


@pytest.mark.parametrize(
    ("rest", "majors", "dealt"),
    [
        # as-left: what was dealt before there was a choice
        ("as-left", "distinct", [[0, 8, 9, 11, 16], [1, 3, 14, 17, 21], [2, 10, 15, 18, 19]]),
        ("as-left", "random", [[0, 1, 8, 17, 21], [5, 9, 13, 14, 20], [2, 7, 10, 18, 19]]),
        ("uniform", "distinct", [[0, 4, 8, 13, 15], [1, 5, 6, 17, 20], [10, 11, 16, 18, 22]]),
        ("uniform", "random", [[1, 8, 13, 15, 17], [0, 5, 6, 9, 21], [4, 10, 11, 18, 22]]),
    ],
)
def test_the_dealing_stays_as_it_is_bit_for_bit(examples: Make, rest: str, majors: str, dealt: Any) -> None:
    data = Dataset("made", examples(np.arange(24) % 4), examples(np.arange(24) % 4))
    config = majority(p=0.6, majors=majors, size=5, rest=rest)
    assert majority().rest == "as-left"
    assert [own.tolist() for own in partition(data, config, 3, 7).train] == dealt


@quick
@given(
    counts=st.lists(st.integers(1, 60), min_size=2, max_size=6),
    p=st.floats(0.01, 1),
    nodes=st.integers(1, 6),
    majors=MAJORS,
    seed=st.integers(0, 99),
    share=st.floats(0, 1),
)
def test_a_uniform_rest_has_as_many_of_every_other_class(
    examples: Make, counts: list[int], p: float, nodes: int, majors: str, seed: int, share: float
) -> None:
    y = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    data = Dataset("made", examples(y), examples(np.zeros(50, np.int64)))
    config = majority(p=p, majors=majors, rest="uniform")
    try:
        largest = len(partition(data, config, nodes, seed).train[0])
    except ConfigError as error:
        assert "room for 0" in str(error) or nodes > len(counts)  # noqa: PT017
        return
    for size in {largest, max(1, int(share * largest))}:
        dealing = partition(data, replace(config, size=size), nodes, seed)
        assert len(np.unique(np.concatenate(dealing.train))) == size * nodes
        major, rest = _sizes(size, p)
        assert dealing.classes is not None
        for counts_C, own in zip(count(data, dealing), dealing.classes.majors_K, strict=True):
            others = np.delete(counts_C, own)
            assert counts_C[own] == major
            assert others.sum() == rest
            assert np.ptp(others) <= 1
        assert warnings(dealing.skew) == []
    with pytest.raises(ConfigError, match=rf"rest=uniform .* at most partition\.size={largest}(, or |$)"):
        partition(data, replace(config, size=largest + 1), nodes, seed)


@quick
@given(
    counts=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    p=st.floats(0.01, 0.9),
    nodes=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_the_largest_uniform_size_is_the_one_that_trying_everything_finds(
    counts: list[int], p: float, nodes: int, seed: int
) -> None:
    majors = np.random.default_rng(seed).integers(len(counts), size=nodes)

    def fits(size: int) -> bool:
        major, rest = _sizes(size, p)
        each, more = divmod(rest, len(counts) - 1)
        owners = Counter(majors.tolist())
        spare = [n - owners[c] * major - (nodes - owners[c]) * each for c, n in enumerate(counts)]

        @cache
        def rest_fits(k: int, spare: tuple[int, ...]) -> bool:
            if min(spare) < 0:
                return False
            others = [c for c in range(len(counts)) if k < nodes and c != majors[k]]
            return k == nodes or any(
                rest_fits(k + 1, tuple(n - (c in chosen) for c, n in enumerate(spare)))
                for chosen in combinations(others, more)
            )

        return rest_fits(0, tuple(spare))

    sizes = [size for size in range(1, sum(counts) // nodes + 1) if fits(size)]
    largest = _largest(np.asarray(counts), majors, p, "uniform")
    assert sizes == list(range(1, largest + 1))
    for size in sizes:  # whatever is drawn, the last one finds enough
        wanted_KC = _even_counts(np.asarray(counts), majors, *_sizes(size, p), np.random.default_rng(seed))
        assert (wanted_KC.sum(axis=0) <= counts).all()
    assert largest <= _largest(np.asarray(counts), majors, p, "as-left")


def test_who_gets_one_more_is_drawn_and_majors_are_those_of_as_left(dataset: Make) -> None:
    data, config = dataset(4000), majority(p=0.8, size=100, rest="uniform")  # 20 of 9 classes: three of two classes
    more = set()
    for seed in range(5):
        dealing, left = (partition(data, replace(config, rest=rest), 8, seed) for rest in ("uniform", "as-left"))
        assert dealing.classes is not None
        assert left.classes is not None
        assert dealing.classes.majors_K.tolist() == left.classes.majors_K.tolist()
        more |= {tuple(np.flatnonzero(row == 3)) for row in count(data, dealing)}
    assert len(more) > 20  # of 45 pairs, 40 draws
    assert {c for pair in more for c in pair} == set(range(10))


@pytest.mark.parametrize("majors", ["distinct", "random"])
def test_of_two_classes_the_rest_is_the_other_one(dataset: Make, majors: str) -> None:
    data = dataset(400, classes=2)
    dealing = partition(data, majority(p=0.7, majors=majors, rest="uniform", size=50), 2, 1)
    assert np.sort(count(data, dealing)).tolist() == [[15, 35]] * 2
    assert partition(data, majority(p=1, majors=majors, rest="uniform", size=50), 2, 1).classes.equal == 0


def test_refusals_name_the_largest_size_and_as_left_only_where_it_works(examples: Make) -> None:
    data = Dataset("made", examples(np.repeat([0, 1, 2], [40, 40, 3])), examples(np.zeros(9, np.int64)))
    config = majority(p=0.5, rest="uniform")
    with pytest.raises(ConfigError, match=r"rest=uniform with p=0.5 and 2 .*; got partition\.size=20: ") as refused:
        partition(data, replace(config, size=20), 2, 2)
    largest = len(partition(data, config, 2, 2).train[0])
    assert str(refused.value).endswith(f"at most partition.size={largest}, or partition.rest=as-left")
    assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match=rf"at most partition\.size={largest}$"):
        partition(data, replace(config, size=42), 2, 2)
    with pytest.raises(ConfigError, match=r"partition\.rest must be one of as-left, uniform; got 'unifrom'"):
        majority(rest="unifrom")


# ------------------------------------------------------------------------------------------------------ the warning


def scarce(examples: Make, size: int = 0, **options: Any) -> tuple[Dataset, Partition]:
    """Three institutions whose majors use up three of four classes, of 100 each."""
    data = Dataset("made", examples(np.arange(400) % 4), examples(np.arange(40) % 4))
    return data, partition(data, majority(size=size, **options), 3, 0)


def test_classes_that_starve_are_said_in_one_line(examples: Make, tmp_path: Path) -> None:
    data, dealing = scarce(examples, 120)
    skew, counts_KC = dealing.skew, count(data, dealing)
    for k, name in enumerate(dealing.names):
        classes, own = skew["classes"]["institutions"][name], dealing.classes.majors_K[k]
        assert classes["largest"] == {"class": own, "examples": 96}
        assert classes["smallest"]["examples"] == counts_KC[k].min() == counts_KC[k, classes["smallest"]["class"]]
        assert classes["starved"] == {str(c): n for c, n in enumerate(counts_KC[k]) if n < 2 and c != own}  # of 8
    (warning,) = warnings(skew)
    assert "less than a quarter of an equal remainder's 8 examples" in warning
    assert "\n" not in warning
    (told,) = [line for line in summary(skew) if "most 96 of class" in line]
    text = show(data, dealing, tmp_path)
    assert all(line in text.splitlines() for line in [*extremes(skew), warning])
    assert len(extremes(skew)) == 3

    largest = int(warning.split("partition.size=")[1].split()[0])
    assert scarce(examples, rest="uniform")[1].train[0].size == largest
    for remedy in ({"rest": "uniform", "size": largest}, {"size": 60}):
        assert "warning" not in show(*scarce(examples, **remedy), tmp_path)

    report = {
        "seeds": [3, 4],
        "strategies": {},
        "higher-is-better": True,
        "cells": [{"label": "a", "seed": 3, "options": [], "result": {"skew": scarce(examples, 60)[1].skew}}],
    }
    assert not [note for note in notes(cells(report)) if "warning" in note]
    report["cells"].append({"label": "a", "seed": 4, "options": [], "result": {"skew": skew}})
    notes_found = notes(cells(report))
    assert f"seed 4: {told}" in notes_found
    assert f"seed 4: {warning}" in notes_found


def cells(report: dict[str, Any]) -> dict[str, Any]:
    for cell in report["cells"]:
        cell["result"]["versions"] = {}
    return report


def test_what_is_meant_or_chance_does_not_starve(dataset: Make, examples: Make) -> None:
    data = dataset(400)
    assert warnings(partition(data, majority(size=40), 8, 0).skew) == []  # an equal remainder has less than one
    two = Dataset("two", examples(np.arange(400) % 2), examples(np.arange(40) % 2))
    assert warnings(partition(two, majority(p=0.1, size=100), 2, 0).skew) == []  # ten of the major class are meant
    iid = partition(data, PartitionConfig(name="iid"), 4, 0).skew
    assert [*extremes(iid), *summary(iid), *warnings(iid)] == []
    assert "classes" not in iid


# -------------------------------------------------------------------------------------------------------- real data


@pytest.mark.parametrize("rest", ["as-left", "uniform"])
def test_all_of_mnist_as_kalra_et_al_have_it(shared: Path, task: Callable[..., TaskConfig], rest: str) -> None:
    folder = shared / "mnist-full"
    if not folder.is_dir():
        pytest.skip("no folder shared/data/mnist-full beside the repository: all of MNIST is not here")
    mnist = load(task("mnist", data_dir=str(folder)))
    assert (len(mnist.train), len(mnist.test)) == (60_000, 10_000)
    dealing = partition(mnist, majority(p=0.8, majors="random", size=1000, rest=rest), 8, 0)
    counts_KC = np.sort(count(mnist, dealing))
    assert (counts_KC.sum(axis=1) == 1000).all()
    assert (counts_KC[:, -1] == 800).all()
    assert len(np.unique(np.concatenate(dealing.train))) == 8000
    assert warnings(dealing.skew) == []
    if rest == "uniform":
        assert counts_KC[:, :-1].tolist() == [[22] * 7 + [23] * 2] * 8


def test_mnists_test_files_starve_eight_institutions_of_900(shared: Path, task: Callable[..., TaskConfig]) -> None:
    mnist = load(task("mnist", data_dir=str(shared / "mnist")))
    dealing = partition(mnist, majority(size=900), 8, 0)
    (warning,) = warnings(dealing.skew)
    assert "at 8 of 8 institutions" in warning
    assert dealing.classes is not None
    nobodys = np.setdiff1d(np.arange(10), dealing.classes.majors_K)
    assert 0.7 < count(mnist, dealing)[:, nobodys].sum() / (8 * 180) < 0.8
    with pytest.raises(ConfigError, match=r"at most partition\.size=\d+, or partition\.rest=as-left$"):
        partition(mnist, majority(size=900, rest="uniform"), 8, 0)
