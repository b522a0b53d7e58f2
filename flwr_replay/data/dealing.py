"""What a dealer returns: who gets which examples, and what a run tells about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.sections import PartitionConfig
from flwr_replay.data.class_counts import ClassCounts

__all__ = ["Dealer", "Dealt", "Indices"]

Indices = NDArray[np.int64]


class Dealt(NamedTuple):
    """One data set, dealt."""

    parts: Sequence[Indices]  # K arrays of indices into the labels; no index is in two of them
    names: tuple[str, ...] = ()  # of the institutions; empty: they are numbered
    dropped: int = 0  # examples left out to reach a target
    classes: ClassCounts | None = None  # of each institution, where the partition is about classes


class Dealer(Protocol):
    """Deals labels to institutions; the same seed deals alike."""

    def __call__(
        self, y: NDArray[Any], config: PartitionConfig, nodes: int, seed: int, classes: Sequence[str], /
    ) -> Dealt:
        """Deal.

        Parameters
        ----------
        y : ndarray, shape (N,)
            Labels, classes or continuous: of patients, where the data name them, else of examples.
        config : PartitionConfig
            The partition's options.
        nodes : int
            The number of institutions, K.
        seed : int
            The run's seed.
        classes : sequence of str
            The classes' names; empty: they are called by their numbers.
        """
