"""Weights under masks: of one institution's numbers nobody can read any, of all institutions' the server reads the sum.

    at institution k: y_k = ⌊2^b (n_k/n) θ_k + u_k⌉ + m_k  (mod 2^64), with Σ_k m_k = 0 and Σ_k u_k = 0
    at the server:    Σ_k (n_k/n) θ_k = 2^-b Σ_k y_k, to within K / 2^(b+1), before it is rounded to θ's dtype

b is 43 for weights, so |θ| must be below 2^20; it is 33 for statistics of norm layers and for whole numbers.

- u_k is random, so the sum tells of Σ_k (n_k/n) θ_k only. Without it a learning rate so small that all but one
  institution's updates are rounded to 0 would show the one that is left.
- An institution whose numbers are too large sends random ones in their place, so the sum is random. Zeros, or any
  others that the server knows, would show the sum of all others.

Two whole numbers more, zeros under masks, tell whether the masks have cancelled; the first is random if numbers of an
institution were too large. `flwr_replay/ciphers/masking.py` makes masks and u_k; nothing here can.

Source: Bonawitz et al. 2017 (doi:10.1145/3133956.3133982), section 4.0.1: masking with one-time pads.
"""

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.errors import DivergedError, PrivacyError, RunError
from flwr_replay.wire.bounds import LARGEST, NEVER_NEGATIVE, bounded, is_statistic, largest
from flwr_replay.wire.records import StateDict, Weights, opened

__all__ = ["MASKED", "add", "blank_masked", "check_room", "exact", "fixed_point", "is_masked", "mean_of", "sums_of"]

MASKED = "masked"  # of a row of the ledger: its protection; ends the names of masked arrays, and is the check's name
BITS, COARSE = 43, 33  # of a number's fraction; the latter of statistics and whole numbers
LARGEST_COARSE = 1e9  # of these


def check_room(weights: StateDict) -> None:
    """Refuse weights from which no training may begin in a masked run: those of an answer may be a little larger.

    They must be finite, and not too large: else a DivergedError.
    """
    for name, array in weights.items():
        most = LARGEST if _bits(name, array) == BITS else LARGEST_COARSE
        if not bounded(array, most):
            raise DivergedError(
                f"under masks weights must be finite and at most {most:g} in size; {name!r} is not: lower training.lr"
            )


def fixed_point(weights: StateDict, share: float, dither: Mapping[str, NDArray[np.int64]]) -> StateDict:
    """Write weights, times a share, as whole numbers modulo 2^64, with the check [0, 0].

    If one is not finite, or too large, all are random, and the check is [r, 0] with a random r.

    `share` is n_k / n, the institution's share of all examples; `dither` is 2^32 u_k, by the weights' names.
    """
    fits = all(largest({name: array}) < 2.0 ** (63 - _bits(name, array)) for name, array in weights.items())
    if not fits:  # NaN does not, either
        blank = blank_masked(weights).items()
        noise = {k: np.frombuffer(secrets.token_bytes(w.nbytes), w.dtype).reshape(w.shape) for k, w in blank}
        return noise | {MASKED: np.array([1 + secrets.randbelow(2**64 - 1), 0], np.uint64)}
    numbers: StateDict = {MASKED: np.zeros(2, np.uint64)}
    for name, w in weights.items():
        scaled = np.multiply(w, share * 2.0 ** _bits(name, w), dtype=np.float64) + dither[name] * 2.0**-32
        numbers[f"{name}.{MASKED}"] = np.asarray(np.rint(scaled), np.int64).view(np.uint64)
    return numbers


def exact(sums: StateDict) -> StateDict:
    """Write whole numbers as they are, modulo 2^64, with the check [0, 0]; others are a PrivacyError."""
    if fractions := [name for name, array in sums.items() if array.dtype != np.int64]:
        raise PrivacyError(
            f"with noise=shared whole numbers leave, int64; {fractions[0]!r} is {sums[fractions[0]].dtype}: kept back"
        )
    return {
        MASKED: np.zeros(2, np.uint64),
        **{f"{name}.{MASKED}": array.view(np.uint64) for name, array in sums.items()},
    }


def is_masked(record: Mapping[str, Any]) -> bool:
    """Say whether a record holds masked arrays only."""
    return bool(record) and all(name.rpartition(".")[2] == MASKED for name in record)


def blank_masked(weights: Weights) -> StateDict:
    """Return zeros of the form that these weights have under masks; none for none."""
    shapes = {f"{name}.{MASKED}": array.shape for name, array in opened(weights).items()}
    return {name: np.zeros(shape, np.uint64) for name, shape in {MASKED: (2,), **shapes}.items()} if shapes else {}


def add(answer: StateDict, to: StateDict) -> None:
    """Add an institution's whole numbers to a sum modulo 2^64, which begins as an empty dictionary."""
    for name, array in answer.items():
        if name in to:
            np.add(to[name], array, out=to[name])
        else:
            to[name] = array.copy()


def mean_of(total: StateDict, like: StateDict) -> StateDict:
    """Return the mean of weights whose sum all answers make, in the dtypes of those that were sent, `like`.

    Raises
    ------
    RunError
        If the masks have not cancelled: then nothing can be read.
    DivergedError
        If weights of an institution are not finite, or too large, or the mean is.
    """
    mean: StateDict = {}
    for name, whole in sums_of(total, like).items():
        sent, value = like[name], whole / 2.0 ** _bits(name, like[name])
        value = np.maximum(value, 0) if NEVER_NEGATIVE.fullmatch(name) else value  # rounding may have left -1e-10
        mean[name] = np.asarray(value if np.issubdtype(sent.dtype, np.floating) else np.rint(value), sent.dtype)
    check_room(mean)
    return mean


def sums_of(total: StateDict, names: Iterable[str]) -> dict[str, NDArray[np.int64]]:
    """Return the whole numbers in a sum of all answers, by name; errors as of `mean_of`."""
    diverged, zero = total[MASKED]
    if zero:
        raise RunError(
            "masks cancel only if all pinned institutions answer the same request; these do not: compare the files of "
            "pinned keys by `flwr-replay deploy seal-key`, and start as many nodes as they name; where weights have "
            "diverged before, begin a new run; with dropouts one that has told wrong shares of keys spoils a sum, too"
        )
    if diverged:
        raise DivergedError(
            f"under masks weights must be finite and below {2 ** (63 - BITS):,} in size; those of an institution are "
            "not, and nothing says whose: lower training.lr and begin a new run"
        )
    return {name: total[f"{name}.{MASKED}"].view(np.int64) for name in names}


def _bits(name: str, array: NDArray[Any]) -> int:
    return COARSE if is_statistic(name) or not np.issubdtype(array.dtype, np.floating) else BITS
