"""How a sum under masks is read though institutions are missing, of which any d of K may be (privacy.dropouts).

Of n institutions that are asked, e = n - (K - d) may fail. Each one, u, draws a key b_u, whose mask it adds to its
answer beside those that cancel. A second message asks T = K - d or more that have answered, the survivors, for keys:

    b_u    of each survivor u                           takes off u's own mask
    s_uv   of each survivor u with each v that failed   takes off the mask that v's would have cancelled

Nobody tells a key. u makes shares of its n secrets, b_u and all s_uv. T shares give a secret, fewer tell nothing of it:

    share of w   f(x_w), from a key that u and w have for it by their pinned keys, so it need not be sent to w
    f            the polynomial of degree n, modulo 2^256 - 189, with the secret at 0, and the shares at 1 … n
    points       f(n + 1) … f(n + e + 1), which leave with u's answer: with T shares n + 1 numbers, which give f(0)

A server that tells everybody what it likes, and t institutions that help it, read one sum, of K - d or more:

- An honest w tells shares for one set of survivors, once and for all: T or more, w among them. So it leaves out e at
  most. It tells of s_uv only where it has one of u and v as a survivor, and not the other.
- Let b_u be read: T - t honest ones have u as a survivor. Then s_uv is read only if T - t of these leave v out, since
  T - t others, who leave u out, are not there: 2 (T - t) > n - t. So b_v is not read. Those whose b_u is read are thus
  in one sum, and in no other.
- It is read only if T - t honest ones leave out each other honest v. All n - t leave out e each, at most, so there are
  e such v, at most: (e + 1) (T - t) > e (n - t).

Both conditions hold if K - t > d (d + 1), which `flwr_replay/config/run.py` asks for. Where an institution answers
several exchanges with the same sums (dp=statistics), it has one set of survivors in all of them, and there is one sum.

With a wrong share a key is wrong, and the sum is random. Its check shows it. If more than T tell, the server tries
without each of them: without the only one who told wrong shares the sum opens, and it is named. Two who lie together
can choose whom it opens without, so nobody is left out for it. Of T who tell, nobody is named: any T shares and the
points are on some polynomial. Wrong points spoil a sum for good.

Source: Bonawitz et al. 2017 (doi:10.1145/3133956.3133982), section 4: two masks, Shamir's shares. Deviations: by pinned
keys nothing is sent from one institution to another. K, d and t are such that survivors need not be signed.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from operator import mul

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from flwr_replay.wire.records import StateDict

__all__ = ["SECRET", "joined", "mask", "points_of", "shares_under", "strip"]

SECRET = 32  # bytes of a key, and of a share
PRIME = 2**256 - 189  # the largest below 2^256; a key that is not below it is as likely as 2^-248


def mask(key: bytes, onto: StateDict, adds: bool, dtype: str = "<i8") -> None:
    """Add the random numbers of a key to arrays of int64, or subtract them; arrays in the order of their names."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    for _, array in sorted(onto.items()):
        drawn = np.frombuffer(stream.update(bytes(array.size * np.dtype(dtype).itemsize)), dtype)
        (np.add if adds else np.subtract)(array, drawn.reshape(array.shape), out=array)


def shares_under(key: bytes, n: int) -> list[int]:
    """Return one institution's shares of another's n secrets, from the key that the two have for them."""
    return _numbers(Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(n * SECRET)))


def points_of(secrets: Sequence[bytes], shares: Sequence[Sequence[int]], spare: int) -> bytes:
    """Return the points of each secret that make up for `spare` shares.

    `shares[w][i]` is the share of institution w, of n, of secret i, of n.
    """
    n = len(shares)
    known = [[int.from_bytes(secret), *of] for secret, of in zip(secrets, zip(*shares, strict=True), strict=True)]
    at = [_coefficients(range(n + 1), n + 1 + more) for more in range(spare + 1)]
    return joined(_value(row, values) for values in known for row in at)


def joined(numbers: Iterable[int]) -> bytes:
    """Write numbers below the prime one after the other, `SECRET` bytes each."""
    return b"".join(number.to_bytes(SECRET) for number in numbers)


def strip(total: StateDict, cohort: Sequence[str], points: Mapping[str, bytes], shares: Mapping[str, bytes]) -> None:
    """Take off a sum's masks that do not cancel; wrong shares leave a random sum.

    Parameters
    ----------
    total : dict
        The survivors' answers, added modulo 2^64; it is written to.
    cohort : sequence of str
        The n names of those who were asked, sorted.
    points : mapping
        By survivor: what `points_of` returned.
    shares : mapping
        By institution that tells: for each survivor, sorted, its shares of that one's own key, and of those with each
        that failed. n - e of them are needed.
    """
    n, survivors, numbers = len(cohort), sorted(points), {name: array.view(np.int64) for name, array in total.items()}
    each = len(points[survivors[0]]) // (n * SECRET)
    failed, place = [name for name in cohort if name not in points], {name: i for i, name in enumerate(cohort)}
    told = {place[name] + 1: _numbers(shares[name]) for name in sorted(shares)[: n + 1 - each]}
    row = _coefficients([*told, *range(n + 1, n + 1 + each)], 0)
    for i, u in enumerate(survivors):
        own = _numbers(points[u])
        for j, v in enumerate([u, *failed], i * (1 + len(failed))):
            key = _value(row, [*(of[j] for of in told.values()), *own[place[v] * each :][:each]])
            mask(key.to_bytes(SECRET), numbers, adds=u > v)  # u has added its own, and what it shares with later names


def _numbers(data: bytes) -> list[int]:
    return [int.from_bytes(data[at : at + SECRET]) % PRIME for at in range(0, len(data), SECRET)]


def _coefficients(places: Sequence[int], at: int) -> list[int]:
    """Return Lagrange's coefficients: of a polynomial's values at some places, to that at another."""
    others = [[m for m in places if m != x] for x in places]
    over = [(prod(at - m for m in of), prod(x - m for m in of)) for x, of in zip(places, others, strict=True)]
    return [above * pow(below, -1, PRIME) % PRIME for above, below in over]


def _value(coefficients: Sequence[int], values: Sequence[int]) -> int:
    return int(sum(map(mul, coefficients, values))) % PRIME
