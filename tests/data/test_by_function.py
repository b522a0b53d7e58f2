"""Partitions of the user's own: a function deals, and what it returns is checked before anybody trains."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from flwr_replay.check import check_partition
from flwr_replay.config.compose import compose
from flwr_replay.config.own_code import VARIABLE
from flwr_replay.data import ClassCounts, Dealt
from flwr_replay.data.class_counts import warnings
from flwr_replay.data.dealt import dealt
from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import ConfigError, RefusedError
from flwr_replay.lab.evidence import Evidence
from flwr_replay.lab.registry import trial_of
from flwr_replay.report.progress import Display

Y = np.repeat(np.arange(10), 60)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module that `partition=handed:deal` names."""
    made: Any = ModuleType("handed")
    monkeypatch.setitem(sys.modules, "handed", made)
    monkeypatch.setenv(VARIABLE, "handed:deal")
    return made


def test_institutions_get_what_the_function_deals(module: Any) -> None:
    module.deal = lambda labels, nodes, seed: [np.flatnonzero(labels % nodes == k)[seed:] for k in range(nodes)]
    config = compose(["task=digits", "partition=handed:deal", "nodes=3", "seed=2"])
    dealing = dealt(config.task, config.partition, config.nodes, config.seed)
    assert dealing.names == ("institution-1", "institution-2", "institution-3")
    assert dealing.ks > 0.2
    check_partition("handed:deal")


def test_names_drops_and_classes_of_the_function_reach_the_run(module: Any, tmp_path: Any) -> None:
    def deal(labels: Any, nodes: int, seed: int) -> Dealt:
        shards = [np.flatnonzero((labels % nodes == k) & (labels > 0))[:40] for k in range(nodes)]
        counts_KC = np.stack([np.bincount(labels[shard], minlength=10) for shard in shards])
        classes = ClassCounts(np.arange(10), counts_KC, counts_KC.argmax(1), equal=100)
        return Dealt(shards, [f"ward {k}" for k in "cab"[:nodes]], int((labels == 0).sum()), classes)

    module.deal = deal
    words = [
        "strategy=fedavg",
        "task=digits",
        "partition=handed:deal",
        "nodes=3",
        "rounds=1",
        "model=mlp",
        "record=all",
    ]
    result, folder = run_inline([*words, "training.batch-sizes=[4,5,8]", f"runs_dir={tmp_path}"], Display())
    assert [*result["final"]["institutions"]] == ["ward c", "ward a", "ward b"]
    assert result["skew"]["dropped"] == 123
    assert result["skew"]["classes"]["institutions"]["ward b"]["largest"]["class"] == 8
    assert warnings(result["skew"])[0].endswith(": deal more evenly")
    sizes = [trial_of(exhibit, Evidence.of(folder)).batch_size for exhibit in Evidence.of(folder).exhibits]
    assert sizes == [5, 8, 4]  # of wards a, b and c


@pytest.mark.parametrize(
    ("deal", "message"),
    [
        (lambda y, nodes, seed: Dealt(np.array_split(np.arange(9), nodes), ["a"]), "name each of 2 institutions"),
        (lambda y, nodes, seed: Dealt(np.array_split(np.arange(9), nodes), ["a"] * nodes), "or none; got a, a"),
        (lambda y, nodes, seed: Dealt(np.array_split(np.arange(9), nodes), ["../a", "b"]), "an institution's name"),
        (lambda y, nodes, seed: Dealt(np.array_split(np.arange(9), nodes), dropped=600), "drop no more .* 591; got"),
        (lambda y, nodes, seed: Dealt(np.array_split(np.arange(9), nodes), test=[]), "leave test and val out"),
        (lambda y, nodes, seed: Dealt(np.array_split(np.arange(9), nodes), classes="few"), "'str' object"),
        (lambda y, nodes, seed: np.array_split(np.arange(len(y)), nodes + 1), "must return 2 arrays"),
        (lambda y, nodes, seed: [y == 0, y > 0], "of a mask, return np.flatnonzero"),
        (lambda y, nodes, seed: [[0.5], [1]], "integers in one dimension; got float64"),
        (lambda y, nodes, seed: [[[]], [1]], r"integers in one dimension; got float64 of shape \(1, 0\)"),
        (lambda y, nodes, seed: [[[0]], [1]], r"of shape \(1, 1\)"),
        (lambda y, nodes, seed: [["a"], [1]], "got <U1"),
        (lambda y, nodes, seed: [[0, 1], [1, 2]], r"index \[1\] came twice"),
        (lambda y, nodes, seed: [[0, 0], [1]], r"index \[0\] came twice"),
        (lambda y, nodes, seed: [[-1], [0]], r"from 0 to 599; got \[-1\]"),
        (lambda y, nodes, seed: [[600], [0]], r"from 0 to 599; got \[600\]"),
        (lambda y, nodes, seed: 1 / 0, "ZeroDivisionError.*test_by_function"),
        (lambda y, nodes, seed: None, "NoneType"),
        (lambda y: [], "takes 1 positional argument"),
    ],
)
def test_what_deals_no_examples_is_one_line(module: Any, deal: Any, message: str) -> None:
    module.deal = deal
    with pytest.raises(ConfigError, match=message):
        check_partition("handed:deal")


@pytest.mark.parametrize(
    ("deal", "message"),
    [
        (lambda y, nodes, seed: np.array_split(np.random.permutation(len(y)), nodes), "one seed must deal alike"),  # noqa: NPY002
        (lambda y, nodes, seed: [np.arange(len(y)), *[np.arange(0)] * (nodes - 1)], "must get examples"),
        (lambda y, nodes, seed: Dealt(np.array_split(np.arange(9), nodes), np.random.random(nodes)), "deal alike"),  # noqa: NPY002
    ],
)
def test_a_broken_contract_is_found(module: Any, deal: Any, message: str) -> None:
    module.deal = deal
    with pytest.raises(AssertionError, match=message):
        check_partition("handed:deal")


def test_it_is_imported_where_it_is_allowed_and_needs_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="partition=own needs its function"):
        compose(["partition=own"])
    config = compose(["partition=handed:deal", "task=digits"])
    assert config.own_code == ("handed:deal",)
    monkeypatch.setenv(VARIABLE, "")
    with pytest.raises(RefusedError, match="handed:deal, which has not been allowed here"):
        dealt(config.task, config.partition, 2, 0)
