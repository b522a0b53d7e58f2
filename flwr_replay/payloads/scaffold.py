"""What travels in SCAFFOLD: weights, and beside them, under names of their own, a control of their size."""

from dataclasses import dataclass

import numpy as np

from flwr_replay.errors import WireError
from flwr_replay.payloads.common import Train, Trained
from flwr_replay.wire.records import StateDict, Weights
from flwr_replay.wire.weights import form_of, parted

__all__ = ["CONTROL", "TrainControlled", "weights_and_control", "zeros"]

CONTROL = "control."  # begins the names of its arrays


@dataclass(frozen=True, kw_only=True)
class TrainControlled(Train, stage="train-controlled", answer=Trained):
    """Train these weights, each step corrected by this control less your own."""


def zeros(arrays: StateDict) -> StateDict:
    """Return a control of zeros for every array of floats."""
    return {name: np.zeros_like(array) for name, array in arrays.items() if np.issubdtype(array.dtype, np.floating)}


def weights_and_control(arrays: Weights) -> tuple[StateDict, StateDict]:
    """Return θ and c, which have one form: else a WireError."""
    theta, c = parted(arrays, CONTROL)
    if form_of(c) != form_of(zeros(theta)):
        raise WireError(
            f"a control has the names, shapes and kinds of number of its weights; {len(c)} arrays came beside "
            f"{len(theta)} weights, or of another form: run the same version of flwr-replay everywhere"
        )
    return theta, c
