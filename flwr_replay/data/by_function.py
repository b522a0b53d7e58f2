"""A partition of the user's own: `partition=mypkg.data:deal`.

    def deal(labels: ndarray, nodes: int, seed: int) -> list of `nodes` index arrays

Labels are of examples, or of patients where the data name them, who are dealt as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.parts import import_part, users_code
from flwr_replay.config.sections import PartitionConfig, require
from flwr_replay.data.dealing import Dealt
from flwr_replay.errors import ConfigError

__all__ = ["deal_by_function"]


def deal_by_function(
    y: NDArray[Any], config: PartitionConfig, nodes: int, seed: int, classes: Sequence[str] = ()
) -> Dealt:
    """Deal as the user's function does.

    Raises
    ------
    ConfigError
        If the function cannot be imported, fails, or returns no such arrays: of another number, with indices that are
        no integers, out of range, or dealt twice.
    """
    option, deal = f"partition={config.deal}", import_part("partition", config.deal)
    with users_code(ConfigError, f"{option}, called with {len(y)} labels, nodes={nodes} and seed={seed}, failed"):
        parts = [np.asarray(part) for part in deal(y.copy(), nodes, seed)]
    require(len(parts) == nodes, f"{option} must return {nodes} arrays, one for each institution; got {len(parts)}")
    for part in parts:
        if part.size and (part.ndim != 1 or not np.issubdtype(part.dtype, np.integer)):
            raise ConfigError(
                f"{option} must return arrays of indices, integers in one dimension; got {part.dtype} of shape "
                f"{part.shape}: of a mask, return np.flatnonzero(mask)"
            )
    dealt = [part.astype(np.int64) for part in parts]
    found, times = np.unique(np.concatenate(dealt), return_counts=True)
    wrong = found[(found < 0) | (found >= len(y))]
    require(not len(wrong), f"{option} deals indices from 0 to {len(y) - 1}; got {wrong[:1]}: count from 0")
    twice = found[times > 1]
    require(not len(twice), f"{option} must deal an example once; index {twice[:1]} came twice: leave one out")
    return Dealt(dealt)
