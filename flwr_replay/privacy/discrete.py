"""Discrete Gaussian noise: whole numbers, drawn exactly, so that no rounding tells what they were added to.

Source: Canonne, Kamath and Steinke 2020 (arXiv 2004.00010), Algorithms 1 to 3, with σ = t = 2^BITS. All draws are
comparisons of whole numbers; nothing here is a floating-point number.

    exp(-a/2^m):   Algorithm 1; true with this probability
    Laplace:       Algorithm 2; |Y| = U + 2^BITS V
    Gaussian:      Algorithm 3; a Y is kept with probability exp(-(|Y| - σ)² / 2σ²)

Numbers beyond 2^32, which is 256 σ, are never drawn. Their probability is below e^-30000.
"""

import numpy as np
from numpy.typing import NDArray

from flwr_replay.privacy.secret import Stream

__all__ = ["BITS", "discrete_gaussian"]

BITS = 24  # of σ
FURTHEST = 2**32
AT_ONCE = 2**16  # numbers drawn at a time: it takes a few MB
U64 = np.uint64


def discrete_gaussian(n: int, stream: Stream) -> NDArray[np.int64]:
    """Return n independent whole numbers with probabilities proportional to exp(-y² / 2σ²), σ = 2^BITS."""
    drawn, have = np.empty(n, np.int64), 0
    while have < n:
        size_K, negative_K = _laplace(min(n - have, AT_ONCE) * 9 // 4 + 64, stream)  # of which about 0.48 are kept
        off_K = np.abs(size_K.view(np.int64) - 2**BITS).view(U64)
        kept_K = _true(off_K * off_K, 2 * BITS + 1, stream)
        signed = np.where(negative_K, -size_K.view(np.int64), size_K.view(np.int64))[kept_K][: n - have]
        drawn[have : have + len(signed)] = signed
        have += len(signed)
    return drawn


def _laplace(n: int, stream: Stream) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Return sizes and signs of up to n discrete Laplace numbers of scale 2^BITS."""
    u_N = stream.words(n) >> U64(64 - BITS)
    u_N = u_N[_true(u_N, BITS, stream)]
    v_N = np.zeros(len(u_N), U64)
    going = np.arange(len(u_N))
    while len(going := going[_true(np.full(len(going), 2**BITS, U64), BITS, stream)]):
        v_N[going] += U64(1)
    size_N, negative_N = u_N + (v_N << U64(BITS)), (stream.words(len(u_N)) & U64(1)).astype(bool)
    kept_N = ~(negative_N & (size_N == 0)) & (size_N < FURTHEST)
    return size_N[kept_N], negative_N[kept_N]


def _true(a_N: NDArray[np.uint64], m: int, stream: Stream) -> NDArray[np.bool_]:
    """Return for each whole number a true with probability exp(-a / 2^m)."""
    rest_N, whole_N = a_N & U64(2**m - 1), a_N >> U64(m)
    true_N = _of_fraction(rest_N, m, stream)
    going, left = np.flatnonzero(true_N & (whole_N > 0)), whole_N.copy()
    while len(going):  # exp(-1), as often as it is whole
        true_N[going] = _of_fraction(np.full(len(going), 2**m, U64), m, stream)
        left[going] -= U64(1)
        going = going[true_N[going] & (left[going] > 0)]
    return true_N


def _of_fraction(a_N: NDArray[np.uint64], m: int, stream: Stream) -> NDArray[np.bool_]:
    """Return for each a of at most 2^m true with probability exp(-a / 2^m).

    K counts how many draws of probability a / (2^m k), k = 1, 2, …, succeed before one fails; it is even so often.
    """
    even_N = np.ones(len(a_N), bool)
    going, k = np.arange(len(a_N)), 1
    while len(going):
        succeeds = ((stream.words(len(going)) >> U64(64 - m)) < a_N[going]) & (_below(k, len(going), stream) == 0)
        going = going[succeeds]
        even_N[going] ^= True
        k += 1
    return even_N


def _below(k: int, n: int, stream: Stream) -> NDArray[np.uint64]:
    """Return n uniform whole numbers below k."""
    if k == 1:
        return np.zeros(n, U64)
    drawn, most = stream.words(n), U64(2**64 - 1 - 2**64 % k)
    while (beyond := drawn > most).any():
        drawn[beyond] = stream.words(int(beyond.sum()))
    return drawn % U64(k)
