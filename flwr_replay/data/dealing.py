"""What a dealer returns: who gets which examples, and what a run tells about it; and the dealers of others.

`partition=dirichlet` deals shares of each class drawn from a Dirichlet distribution: flwr-datasets'
`DirichletPartitioner`. `partition=mypkg.data:deal` is a partition of the user's own:

    def deal(labels: ndarray, nodes: int, seed: int) -> list of `nodes` index arrays, or a `Dealt`

Labels are of examples, or of patients where the data name them, who are dealt as a whole.
"""

import importlib
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.own_code import import_own, users_code
from flwr_replay.config.sections import PartitionConfig, require
from flwr_replay.data.class_counts import ClassCounts
from flwr_replay.data.skew import is_continuous
from flwr_replay.errors import ConfigError
from flwr_replay.rng import derived_seed
from flwr_replay.terminal import installing

__all__ = ["Dealt", "Indices", "LabelDealer", "deal_by_dirichlet", "deal_by_function"]

Indices = NDArray[np.int64]


class Dealt(NamedTuple):
    """One data set, dealt."""

    shards: Sequence[Indices]  # K arrays of indices into what is dealt; no index is in two of them
    names: tuple[str, ...] = ()  # of the institutions; empty: they are numbered
    dropped: int = 0  # examples left out to reach a target
    classes: ClassCounts | None = None  # of each institution, where the partition is about classes
    test: Sequence[Indices] | None = None  # the same of test examples; None: as `partition.test` says
    val: Sequence[Indices] | None = None


class LabelDealer(Protocol):
    """Deals labels to institutions; the same seed deals alike."""

    def __call__(
        self, y: NDArray[Any], config: PartitionConfig, nodes: int, seed: int, classes: Sequence[str], /
    ) -> Dealt:
        """Deal labels (N,), classes or continuous, to K institutions, `nodes`.

        They are of patients, where the data name them, else of examples. `classes` are the classes' names; empty: they
        are called by their numbers.
        """


def deal_by_dirichlet(
    y: NDArray[Any], config: PartitionConfig, nodes: int, seed: int, classes: Sequence[str] = ()
) -> Dealt:
    """Deal by `config.alpha`, the concentration of each class over the institutions; sizes differ.

    Raises
    ------
    ConfigError
        For continuous labels, without flwr-datasets, or if an institution would get too few examples.
    """
    require(not is_continuous(y), "partition=dirichlet needs classes; got continuous labels: choose partition=ks")
    try:
        partitioners = importlib.import_module("flwr_datasets.partitioner")
        tables = importlib.import_module("datasets")
    except ModuleNotFoundError:
        raise ConfigError(f"partition=dirichlet needs flwr-datasets: {installing('dirichlet')}") from None
    least = max(config.size, 1)
    dealer = partitioners.DirichletPartitioner(
        num_partitions=nodes,
        partition_by="label",
        alpha=config.alpha,
        min_partition_size=least,
        shuffle=True,
        seed=derived_seed(seed, "partition", "dirichlet"),
    )
    dealer.dataset = tables.Dataset.from_dict({"label": y, "index": np.arange(len(y))})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns at each new draw; the error below says it once
            shards = [np.asarray(dealer.load_partition(k)["index"][:], np.int64) for k in range(nodes)]
    except ValueError:
        raise ConfigError(
            f"every one of {nodes} institutions must get at least {least} of {len(y)} examples; ten draws with "
            f"partition.alpha={config.alpha} gave one less: raise alpha, lower partition.size or take fewer nodes"
        ) from None
    return Dealt([shard[: config.size or None] for shard in shards])


def deal_by_function(
    y: NDArray[Any], config: PartitionConfig, nodes: int, seed: int, classes: Sequence[str] = ()
) -> Dealt:
    """Deal as the user's function does.

    Raises
    ------
    ConfigError
        If the function cannot be imported, fails, or returns no such arrays: of another number, with indices that are
        no integers, out of range, or dealt twice; or no such names, counts or number of those left out.
    """
    option, deal = f"partition={config.deal}", import_own("partition", config.deal)
    with users_code(ConfigError, f"{option}, called with {len(y)} labels, nodes={nodes} and seed={seed}, failed"):
        own = deal(y.copy(), nodes, seed)
        own = own if isinstance(own, Dealt) else Dealt(own)
        shards, names = [np.asarray(shard) for shard in own.shards], tuple(map(str, own.names))
        dropped, counts = int(own.dropped), own.classes and own.classes.counts_KC.shape[0]
    require(len(shards) == nodes, f"{option} must return {nodes} arrays, one for each institution; got {len(shards)}")
    for shard in shards:
        if shard.ndim != 1 or (shard.size and not np.issubdtype(shard.dtype, np.integer)):
            raise ConfigError(
                f"{option} must return arrays of indices, integers in one dimension; got {shard.dtype} of shape "
                f"{shard.shape}: of a mask, return np.flatnonzero(mask)"
            )
    dealt = [shard.astype(np.int64) for shard in shards]
    indices, times = np.unique(np.concatenate(dealt), return_counts=True)
    wrong = indices[(indices < 0) | (indices >= len(y))]
    require(not len(wrong), f"{option} deals indices from 0 to {len(y) - 1}; got {wrong[:1]}: count from 0")
    twice = indices[times > 1]
    require(not len(twice), f"{option} must deal an example once; index {twice[:1]} came twice: leave one out")
    left = len(y) - len(indices)
    require(0 <= dropped <= left, f"{option} must drop no more than it leaves out, {left}; got dropped={dropped}")
    require(counts in (None, nodes), f"{option} must count the classes of {nodes} institutions; got {counts}")
    require(own.test is None is own.val, f"{option} deals training examples: leave test and val out")
    return Dealt(dealt, names, dropped, own.classes)
