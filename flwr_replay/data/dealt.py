"""A data set and its partition among simulated institutions, read once per process."""

from dataclasses import replace

import numpy as np

from flwr_replay.config.sections import PartitionConfig, TaskConfig
from flwr_replay.data import Dataset, Examples, Partition, institution_names, load, partition
from flwr_replay.memory import remembered

__all__ = ["dealt", "loaded", "names_of", "pooled"]


@remembered(maxsize=2)
def loaded(task: TaskConfig) -> Dataset:
    """Read a data set, once per process."""
    return load(task)


@remembered(maxsize=2)
def dealt(task: TaskConfig, how: PartitionConfig, nodes: int, seed: int) -> Partition:
    """Split a data set among simulated institutions, once per process."""
    return partition(loaded(task), how, nodes, seed)


def names_of(task: TaskConfig, how: PartitionConfig, nodes: int, seed: int) -> tuple[str, ...]:
    """Name the simulated institutions; data are read only if they, a table or a function may name these."""
    named = how.name in ("natural", "own") or how.file
    return dealt(task, how, nodes, seed).names if named else institution_names(nodes)


@remembered(maxsize=1)  # one copy, although every institution asks for the number of examples
def pooled(task: TaskConfig, how: PartitionConfig, nodes: int, seed: int, dataset: Dataset) -> Dataset:
    """Return the union of all institutions' training examples, for strategy=central; `dataset` has these."""
    partition = dealt(task, how, nodes, seed)
    owned = [partition.examples(dataset, k).train for k in range(nodes)]
    x, y = np.concatenate([own.x for own in owned]), np.concatenate([own.y for own in owned])
    return replace(dataset, train=Examples(x, y, image_bytes=dataset.train.image_bytes))
