"""Weights under masks: of one institution's numbers nobody can read any, of all institutions' the server reads the sum.

    at institution k: y_k = ⌊2^28 n_k θ_k⌉ + m_k  (mod 2^64), with masks that cancel, Σ_k m_k = 0
    at the server:    Σ_k n_k θ_k / n = 2^-28 Σ_k y_k / n, to within K / (2^29 n), before it is rounded to θ's dtype

Two whole numbers more, zeros under masks, tell whether the masks have cancelled. `flwr_replay/institution/masking.py`
makes the masks; nothing here can.

Source: Bonawitz et al. 2017 (doi:10.1145/3133956.3133982), section 4.0.1: masking with one-time pads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.errors import DivergedError, RunError
from flwr_replay.wire.records import StateDict, Weights, opened

__all__ = ["MASKED", "blank_masked", "fixed_point", "is_masked", "mean_of"]

MASKED = "masked"  # of a row of the ledger: its protection; ends the names of masked arrays, and is the check's name
BITS = 28  # of a number's fraction


def fixed_point(weights: StateDict, n: int, institutions: int) -> StateDict:
    """Write weights, times a number of examples, as whole numbers modulo 2^64; with the check, which is [0, 0].

    If one is not finite, or so large that a sum of so many could leave the range, all are 0 and the check is [1, 0]: an
    error would tell the server whose weights these are.
    """
    with np.errstate(all="ignore"):
        scaled = {name: np.rint(np.multiply(one, n * 2.0**BITS, dtype=np.float64)) for name, one in weights.items()}
        good = all((np.abs(one) < 2.0**62 / institutions).all() for one in scaled.values())  # NaN fails, too
    numbers = {f"{name}.{MASKED}": one if good else np.zeros_like(one) for name, one in scaled.items()}
    check = np.array([not good, 0], np.uint64)
    return {MASKED: check, **{name: np.asarray(one, np.int64).view(np.uint64) for name, one in numbers.items()}}


def is_masked(record: Mapping[str, Any]) -> bool:
    """Say whether a record holds masked arrays only."""
    return bool(record) and all(name.rpartition(".")[2] == MASKED for name in record)


def blank_masked(weights: Weights) -> StateDict:
    """Return zeros of the form that these weights have under masks; none for none."""
    shapes = {f"{name}.{MASKED}": array.shape for name, array in opened(weights).items()}
    return {name: np.zeros(shape, np.uint64) for name, shape in {MASKED: (2,), **shapes}.items()} if shapes else {}


def mean_of(answers: Sequence[StateDict], n: int, like: StateDict) -> StateDict:
    """Return the mean of all institutions' weights, in the dtypes of the weights that were sent.

    Parameters
    ----------
    answers : Sequence[StateDict]
        What all institutions have sent, under masks.
    n : int
        All institutions' numbers of examples, summed.
    like : StateDict
        The weights that were sent.

    Raises
    ------
    RunError
        If the masks have not cancelled: then nothing can be read.
    DivergedError
        If weights of some institutions are not finite, or too large.
    """

    def total(name: str) -> NDArray[np.uint64]:
        found: NDArray[np.uint64] = answers[0][name].copy()
        for answer in answers[1:]:
            np.add(found, answer[name], out=found)
        return found

    diverged, zero = (int(number) for number in total(MASKED))
    if zero or diverged > len(answers):
        raise RunError(
            "masks cancel only if all pinned institutions answer the same request; these do not: compare the files of "
            "pinned keys by `flwr-replay deploy seal-key`, and start as many nodes as they name"
        )
    if diverged:
        most = 2.0 ** (62 - BITS) / n
        raise DivergedError(
            f"under masks weights must be finite and below about {most:.3g} in size; those of {diverged} of "
            f"{len(answers)} institutions are not: lower training.lr"
        )
    mean: StateDict = {}
    for name, sent in like.items():
        value = total(f"{name}.{MASKED}").view(np.int64) / (n * 2.0**BITS)
        mean[name] = np.asarray(value if np.issubdtype(sent.dtype, np.floating) else np.rint(value), sent.dtype)
    return mean
