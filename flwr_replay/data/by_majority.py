"""A partition in which one class makes up most of an institution's data (Kalra et al. 2023, section 4.1)."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.sections import PartitionConfig, require
from flwr_replay.data.skew import is_continuous
from flwr_replay.rng import derived_rng

__all__ = ["deal_by_majority"]

Indices = NDArray[np.int64]


def deal_by_majority(y: NDArray[Any], config: PartitionConfig, nodes: int, seed: int) -> list[Indices]:
    """Deal each institution a share p of one class, and the rest of its examples from the other classes at random.

    Parameters
    ----------
    y : ndarray, shape (N,)
        Labels, classes.
    config : PartitionConfig
        `p` is the share of the major class; `majors` says whether two institutions may have the same one; `size` is the
        number of examples per institution, 0 for as many as possible.
    nodes : int
        The number of institutions, K.
    seed : int
        The run's seed.

    Returns
    -------
    list of K int64 arrays
        Indices into `y`, as many for each institution.

    Raises
    ------
    ConfigError
        For continuous labels, more distinct majors than classes, or a size without enough examples.
    """
    require(not is_continuous(y), "partition=majority needs classes; got continuous labels: choose partition=ks")
    rng = derived_rng(seed, "partition", "majority")
    classes, codes, counts_C = np.unique(y, return_inverse=True, return_counts=True)
    distinct = config.majors == "distinct"
    require(
        not distinct or nodes <= len(classes),
        f"partition.majors=distinct gives every institution a class of its own; got nodes={nodes} and {len(classes)} "
        "classes: take fewer nodes, or partition.majors=random",
    )
    majors_K = rng.permutation(len(classes))[:nodes] if distinct else rng.integers(len(classes), size=nodes)
    largest = _largest(counts_C, majors_K, config.p)
    size = config.size or largest
    require(
        1 <= size <= largest,
        f"partition=majority with p={config.p} and {nodes} institutions has room for {largest} examples each in "
        f"{len(y)}; got partition.size={config.size}: "
        + (f"at most partition.size={largest}" if largest else "take fewer nodes or another partition.p"),
    )
    major, rest = _sizes(size, config.p)
    held: list[list[Indices]] = [[] for _ in range(nodes)]
    left = []
    for c in range(len(classes)):
        members, used = rng.permutation(np.flatnonzero(codes == c)), 0
        for k in np.flatnonzero(majors_K == c):
            held[k].append(members[used : used + major])
            used += major
        left.append(members[used:])
    pool = rng.permutation(np.concatenate(left))
    # Deal the rest at random. Then swap the examples that an institution got of its own major class.
    owner = np.full(len(pool), -1)
    owner[: nodes * rest] = np.repeat(np.arange(nodes), rest)
    major_of = np.where(owner >= 0, majors_K[owner], -1)
    for c in range(len(classes)):
        wrong = np.flatnonzero((codes[pool] == c) & (major_of == c))
        # At least as many as `wrong`, or `_largest` would have refused the size.
        partners = rng.choice(np.flatnonzero((codes[pool] != c) & (major_of != c)), len(wrong), replace=False)
        pool[wrong], pool[partners] = pool[partners], pool[wrong]
    return [np.concatenate([*held[k], pool[owner == k]]) for k in range(nodes)]


def _sizes(size: int, p: float) -> tuple[int, int]:
    major = int(p * size + 0.5)
    return major, size - major


def _largest(counts_C: Indices, majors_K: Indices, p: float) -> int:
    """Find the largest size at which majors and rest can be dealt without using an example twice."""
    N, K = int(counts_C.sum()), len(majors_K)
    owners_C = np.bincount(majors_K, minlength=len(counts_C))

    def too_large(size: int) -> bool:
        major, rest = _sizes(size, p)
        left_C = counts_C - owners_C * major
        # Hall's condition: each class has enough for its owners' majors; what remains has enough for all institutions'
        # rest; without class c, it has enough for the rest of c's owners.
        others = left_C.sum() - left_C
        return bool((left_C < 0).any() or left_C.sum() < K * rest or (others < owners_C * rest).any())

    return bisect_left(range(1, N // K + 1), True, key=too_large)
