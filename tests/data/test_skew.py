"""KS and total variation against scipy and against what they must be."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import ks_2samp

from flwr_replay.data.skew import ks_matrix, label_groups, label_histogram, mean_pairwise, tv_matrix
from flwr_replay.errors import DataError

CLASSES = st.lists(st.lists(st.integers(-3, 6), min_size=1, max_size=30), min_size=1, max_size=5)
SCALES = st.lists(st.lists(st.floats(-9, 9, width=32), min_size=1, max_size=30), min_size=2, max_size=4)


def arrays(labels: list[list[float]], dtype: type) -> list[NDArray[np.generic]]:
    return [np.asarray(own, dtype) for own in labels]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # scipy's p-value, which is not used
@settings(max_examples=60)
@given(CLASSES | SCALES)
def test_ks_is_scipys(labels: list[list[float]]) -> None:
    shards = arrays(labels, np.float32)
    matrix = ks_matrix(shards)
    for i, j in combinations(range(len(shards)), 2):
        assert matrix[i, j] == pytest.approx(ks_2samp(shards[i], shards[j]).statistic)
    pairs = [matrix[i, j] for i, j in combinations(range(len(shards)), 2)]
    assert mean_pairwise(matrix) == pytest.approx(np.mean(pairs) if pairs else 0)


@settings(max_examples=60)
@given(CLASSES)
def test_matrices_are_distances_and_tv_is_at_least_ks(labels: list[list[float]]) -> None:
    shards = arrays(labels, np.int64)
    ks, tv = ks_matrix(shards), tv_matrix(shards)
    for matrix in (ks, tv):
        np.testing.assert_array_equal(matrix, matrix.T)
        np.testing.assert_array_equal(matrix.diagonal(), 0)
        assert ((matrix >= 0) & (matrix <= 1 + 1e-12)).all()
    assert (tv >= ks - 1e-12).all()


@settings(max_examples=40)
@given(CLASSES, st.permutations(range(-3, 7)))
def test_tv_ignores_the_order_of_the_classes(labels: list[list[float]], renamed: list[int]) -> None:
    shards = arrays(labels, np.int64)
    other = [np.asarray([renamed[label + 3] for label in own]) for own in shards]
    np.testing.assert_allclose(tv_matrix(shards), tv_matrix(other), atol=1e-12)


def test_order_matters_to_ks_only() -> None:
    apart = [np.array([0, 2]), np.array([1, 3])]
    assert mean_pairwise(ks_matrix(apart)) == 0.5
    assert mean_pairwise(tv_matrix(apart)) == 1


def test_histogram_of_classes_and_of_continuous_labels() -> None:
    values, counts = label_histogram([np.array([5, 2, 5]), np.array([2])])
    assert values.tolist() == [2, 5]
    assert counts.tolist() == [[1, 2], [1, 0]]
    scale = np.arange(100, dtype=np.float32)
    values, counts = label_histogram([scale[:50], scale[50:]])
    assert values.tolist() == list(range(0, 100, 10))
    assert counts.tolist() == [[10] * 5 + [0] * 5, [0] * 5 + [10] * 5]
    assert mean_pairwise(tv_matrix([scale[:50], scale[50:]])) == 1


def test_groups_are_classes_or_deciles_of_the_reference() -> None:
    assert label_groups(np.array([3, 1]), np.array([7])).tolist() == [3, 1]
    reference = np.arange(100, dtype=np.float32)
    assert label_groups(np.float32([-5, 0, 15, 99, 1000]), reference).tolist() == [0, 0, 1, 9, 9]


@pytest.mark.parametrize("measure", [ks_matrix, tv_matrix, label_histogram])
def test_an_institution_without_labels_is_an_error(measure) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match="institution 2 has none"):
        measure([np.array([1]), np.array([], np.int64)])
