"""How large numbers on the wire may be, in requests and answers alike; half as large where a training begins."""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.files.tensors import StateDict

__all__ = [
    "LARGEST",
    "LARGEST_NUMBER",
    "MOST_COUNTED",
    "NEVER_NEGATIVE",
    "STATE",
    "bounded",
    "cut_back",
    "is_statistic",
    "largest",
    "most_of",
]

LARGEST = 1e6  # of a weight, latent or standardised label; larger ones are wrong, and may give outputs not finite
LARGEST_SQUARE = 1e12  # of a norm layer's running mean or variance, and of Adam's mean of squares: squares of weights
LARGEST_NUMBER = 1e100  # of a loss, a metric, a sum of errors, an epsilon: sums and squares of them stay finite
MOST_COUNTED = 10**15  # of examples, pixels, bytes, steps
STATE = "proxy-optimizer."  # begins the names of an optimizer's arrays that travel with its model's
NEVER_NEGATIVE = re.compile(rf"(.*\.)?({STATE}\d+\.(step|exp_avg_sq)|running_var)")  # Adam's; variances


def is_statistic(name: str) -> bool:
    """Say whether an array of this name is a norm layer's running mean or variance."""
    return name.endswith(("running_mean", "running_var"))


def most_of(name: str) -> float:
    """Return the largest size of floating numbers of this name; whole numbers have no bound."""
    return LARGEST_SQUARE if is_statistic(name) or NEVER_NEGATIVE.fullmatch(name) else LARGEST


def cut_back(arrays: StateDict) -> StateDict:
    """Return, of arrays, those that leave a training no room below the bounds, cut back to half of these.

    What is beyond is refused everywhere. A model at the bound, to which one institution can bring it, would cross it in
    the others' training, or by a server's momentum, and all would be refused.
    """
    floating = {name: array for name, array in arrays.items() if np.issubdtype(array.dtype, np.floating)}
    too_large = {name: array for name, array in floating.items() if largest({name: array}) > most_of(name) / 2}
    return {name: np.clip(array, -most_of(name) / 2, most_of(name) / 2) for name, array in too_large.items()}


def bounded(array: NDArray[Any], most: float) -> bool:
    """Say whether all numbers are at most so large; one that is none is not."""
    return not array.size or bool(array.max() <= most and array.min() >= -most)


def largest(arrays: StateDict) -> float:
    """Return the largest size of any number; NaN if one is."""
    ends = [(float(array.max()), -float(array.min())) for array in arrays.values() if array.size]
    return float(np.max(ends, initial=0.0))
