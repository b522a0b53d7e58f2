"""A partition: each institution has neighbouring classes, and some examples of all."""

import numpy as np
from numpy.typing import NDArray

__all__ = ["deal"]

COMMON = 0.2  # of all examples, which are dealt at random


def deal(labels: NDArray[np.int64], nodes: int, seed: int) -> list[NDArray[np.int64]]:
    """Return an array of indices into `labels` for each institution; an index is in one of them at most."""
    order = np.random.default_rng(seed).permutation(len(labels))
    common, rest = np.split(order, [int(COMMON * len(labels))])
    own = np.array_split(rest[np.argsort(labels[rest], kind="stable")], nodes)
    return [np.concatenate(shard) for shard in zip(own, np.array_split(common, nodes), strict=True)]
