"""PushSum at one institution: the parcels that it sends, and how it mixes those that arrive.

Source: Kalra et al. 2023 (ProxyFL), Algorithm 1, lines 7-10.
"""

from collections.abc import Sequence
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.errors import RunError, WireError
from flwr_replay.wire.records import StateDict

__all__ = ["mixed", "parcel", "sender_name"]

VANISHED = 1e-12  # below it a weight w is refused; they are 1 on average


def sender_name(i: int) -> str:
    """Name the model of parcel i in a delivery's arrays; names sort as the parcels do."""
    return f"{i:05d}"


def parcel(theta: StateDict, w: float, share: float) -> tuple[StateDict, float]:
    """Return one sender's parcel for one receiver (Algorithm 1, line 7): share * w * θ, and share * w.

    Parameters
    ----------
    theta : StateDict
        The sender's de-biased θ. Floating arrays are multiplied in float64 and cast back; integer arrays stay as they
        are. Names, shapes and dtypes are the model's.
    w : float
        The sender's weight, > 0.
    share : float
        P[k', k], in (0, 1].
    """
    weight = w * share
    if weight == 1:  # as in a permutation
        return theta, weight
    return {name: _times(array, weight).astype(array.dtype) for name, array in theta.items()}, weight


def mixed(
    theta: StateDict, w: float, kept: float, arrived: Sequence[tuple[StateDict, float]]
) -> tuple[StateDict, float]:
    """Add the parcels to the kept share, and divide by the sum of the weights (Algorithm 1, lines 8-10).

    Parameters
    ----------
    theta : StateDict
        The institution's own de-biased θ, as it was when it sent its parcels.
    w : float
        Its weight, > 0.
    kept : float
        P[k, k], in [0, 1].
    arrived : Sequence[tuple[StateDict, float]]
        The parcels, in the order of the senders' names: the last bits of a sum depend on it.

    Returns
    -------
    theta : StateDict
        De-biased: floating arrays summed and divided in float64, each of its old dtype; integer arrays, such as
        batch counters, are the institution's own.
    w : float
        The new weight: Σ_k' P[k, k'] w_k'.

    Raises
    ------
    WireError
        If a parcel's weight is negative or not finite, or its arrays have other names or shapes.
    RunError
        If the new weight is 0, since nothing was kept and nothing arrived, or below 1e-12, since the institution keeps
        sending more than it receives. Soon w θ could not be distinguished from 0 in float32.
    """
    for arrays, weight in arrived:
        if not (isfinite(weight) and weight >= 0):
            raise WireError(f"the weight of a parcel must be finite and not negative; got {weight}")
        shapes, own = ({name: array.shape for name, array in state.items()} for state in (arrays, theta))
        if shapes != own:
            name = sorted(name for name in shapes | own if shapes.get(name) != own.get(name))[0]
            raise WireError(
                f"a parcel must hold the own model's arrays; {name!r} has shape {shapes.get(name)} in the parcel and "
                f"{own.get(name)} here"
            )
    total = w * kept + sum(weight for _, weight in arrived)  # line 9
    if not total >= VANISHED:  # nor NaN
        raise RunError(
            f"an institution's weight must not vanish; with {kept:g} kept and {len(arrived)} parcels it is {total:g}: "
            "choose a topology in which everyone keeps a share and gets as much as it sends, such as exponential-half"
        )
    mixed = {}
    for name, array in theta.items():
        if not np.issubdtype(array.dtype, np.floating):
            mixed[name] = array.copy()
            continue
        terms = [_times(array, w * kept)] if kept else []
        terms += [_times(arrays[name], 1.0) for arrays, _ in arrived]
        z = sum(terms[1:], terms[0])  # line 8
        mixed[name] = np.asarray(z / total, array.dtype)  # line 10
    return mixed, total


def _times(array: NDArray[Any], factor: float) -> NDArray[Any]:
    if not np.issubdtype(array.dtype, np.floating):
        return array.copy()
    return np.asarray(np.multiply(array, factor, dtype=np.float64))
