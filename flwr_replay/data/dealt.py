"""A data set and how it is dealt to simulated institutions, read once per process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flwr_replay.config.sections import PartitionConfig, TaskConfig
from flwr_replay.data import Dataset, Examples, Partition, load, partition
from flwr_replay.memory import remembered

__all__ = ["dealt", "loaded", "pooled"]


@remembered(maxsize=2)
def loaded(task: TaskConfig) -> Dataset:
    """Read a data set, once per process."""
    return load(task)


@remembered(maxsize=2)
def dealt(task: TaskConfig, how: PartitionConfig, nodes: int, seed: int) -> Partition:
    """Deal a data set to simulated institutions, once per process."""
    return partition(loaded(task), how, nodes, seed)


@remembered(maxsize=1)  # one copy, however many institutions ask how many examples there are
def pooled(task: TaskConfig, how: PartitionConfig, nodes: int, seed: int) -> Dataset:
    """Return the union of all institutions' training examples, as strategy=central owns it."""
    part, dataset = dealt(task, how, nodes, seed), loaded(task)
    owned = [part.examples(dataset, k).train for k in range(nodes)]
    return replace(
        dataset, train=Examples(np.concatenate([own.x for own in owned]), np.concatenate([own.y for own in owned]))
    )
