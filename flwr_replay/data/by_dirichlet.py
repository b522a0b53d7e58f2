"""Shares of each class drawn from a Dirichlet distribution: flwr-datasets' `DirichletPartitioner`."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.sections import PartitionConfig, require
from flwr_replay.data.dealing import Dealt
from flwr_replay.data.skew import is_continuous
from flwr_replay.errors import ConfigError
from flwr_replay.rng import derived_seed
from flwr_replay.terminal import installing

__all__ = ["deal_by_dirichlet"]


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
            parts = [np.asarray(dealer.load_partition(k)["index"][:], np.int64) for k in range(nodes)]
    except ValueError:
        raise ConfigError(
            f"every one of {nodes} institutions must get at least {least} of {len(y)} examples; ten draws with "
            f"partition.alpha={config.alpha} gave one less: raise alpha, lower partition.size or take fewer nodes"
        ) from None
    return Dealt([part[: config.size or None] for part in parts])
