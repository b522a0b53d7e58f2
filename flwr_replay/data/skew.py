"""How much the labels of institutions differ: Kolmogorov-Smirnov and total variation.

Letters: K institutions, C label values (or ten decile groups of continuous labels), n labels of one institution.

The KS statistic depends on the order of the labels, which classes do not always have: two institutions with classes
{0, 2} and {1, 3} have KS 0.5 though they share no class. Total variation ignores the order, so both are reported.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.errors import DataError

__all__ = [
    "is_continuous",
    "ks_matrix",
    "ks_of_counts",
    "label_groups",
    "label_histogram",
    "mean_pairwise",
    "tv_matrix",
]

GROUPS = 10  # continuous labels are compared and dealt by deciles


def is_continuous(labels: NDArray[Any]) -> bool:
    """Say whether labels are numbers on a scale (floating point) rather than classes (integers)."""
    return bool(np.issubdtype(labels.dtype, np.floating))


def label_groups(labels: NDArray[Any], reference: NDArray[Any]) -> NDArray[np.int64]:
    """Group labels: each class is a group; continuous labels are grouped by the deciles of a reference.

    Parameters
    ----------
    labels : ndarray, shape (n,)
        Integers (classes) or floats (continuous).
    reference : ndarray, shape (m,)
        The labels whose deciles bound the groups; unused for classes.

    Returns
    -------
    ndarray of int64, shape (n,)
        The class itself, or the decile 0..9.
    """
    if not is_continuous(labels):
        return labels.astype(np.int64)
    edges = np.quantile(reference, np.linspace(0, 1, GROUPS + 1)[1:-1])
    return np.searchsorted(edges, labels, side="right").astype(np.int64)


def label_histogram(labels: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Count the labels of each institution.

    Parameters
    ----------
    labels : sequence of K ndarrays, shape (n_k,)
        Each institution's labels.

    Returns
    -------
    values : ndarray, shape (C,)
        The classes, ascending; for continuous labels the smallest label of each decile group of the union.
    counts_KC : ndarray of int64, shape (K, C)
        Examples of each institution and value.

    Raises
    ------
    DataError
        If an institution has no labels.
    """
    union = _union(labels)
    groups = label_groups(union, union)
    _, first, codes = np.unique(groups, return_index=True, return_inverse=True)
    if is_continuous(union):
        values = np.asarray([union[codes == code].min() for code in range(len(first))])
    else:
        values = union[first]
    return values, _counts(codes, [len(own) for own in labels])


def ks_matrix(labels: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """Compute the two-sample Kolmogorov-Smirnov statistic between any two institutions.

    KS_ij = max over v of |F_i(v) - F_j(v)|, with F_k the share of institution k's labels that are at most v.

    Parameters
    ----------
    labels : sequence of K ndarrays, shape (n_k,)
        Each institution's labels; classes are ordered by their number.

    Returns
    -------
    ndarray of float64, shape (K, K)
        Symmetric, zero on the diagonal, within [0, 1].

    Raises
    ------
    DataError
        If an institution has no labels.
    """
    _, codes = np.unique(_union(labels), return_inverse=True)
    return ks_of_counts(_counts(codes, [len(own) for own in labels]))


def ks_of_counts(counts_KC: NDArray[np.int64]) -> NDArray[np.float64]:
    """Compute KS between any two institutions from their counts (K, C) over ascending label values."""
    shares_KC = np.cumsum(counts_KC, axis=1) / counts_KC.sum(axis=1, keepdims=True)
    return np.stack([np.abs(shares_KC - row_C).max(axis=1) for row_C in shares_KC])


def tv_matrix(labels: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
    """Compute the total variation distance between the labels of any two institutions.

    TV_ij = 1/2 sum over c of |p_i(c) - p_j(c)|, which does not depend on the order of the classes. Continuous labels
    are compared over the deciles of the union. Parameters, shape, range and errors are those of `ks_matrix`.
    """
    _, counts_KC = label_histogram(labels)
    p_KC = counts_KC / counts_KC.sum(axis=1, keepdims=True)
    return np.stack([np.abs(p_KC - row_C).sum(axis=1) / 2 for row_C in p_KC])


def mean_pairwise(matrix_KK: NDArray[np.float64]) -> float:
    """Average a symmetric matrix, such as KS (Qu et al. 2022, section 4.1), over the K(K-1)/2 pairs; 0 for K = 1."""
    pairs = np.triu_indices(len(matrix_KK), k=1)
    return float(matrix_KK[pairs].mean()) if len(pairs[0]) else 0.0


def _union(labels: Sequence[NDArray[Any]]) -> NDArray[Any]:
    for k, own in enumerate(labels):
        if not len(own):
            raise DataError(f"every institution must hold labels to be compared; institution {k + 1} has none")
    return np.concatenate(labels)


def _counts(codes: NDArray[np.int64], sizes: Sequence[int]) -> NDArray[np.int64]:
    """Count codes 0..C-1 by institution; `codes` holds the institutions one after another."""
    K, C = len(sizes), int(codes.max()) + 1
    owner = np.repeat(np.arange(K), sizes)
    return np.bincount(owner * C + codes, minlength=K * C).reshape(K, C)
