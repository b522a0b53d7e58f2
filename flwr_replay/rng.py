"""Random generators, with seeds derived from the run's seed and a purpose, never from global state.

Privacy noise is not drawn here: it needs a secret key, which no seed reveals.
"""

import hashlib
import json

import numpy as np

__all__ = ["derived_rng", "derived_seed"]


def derived_seed(*keys: object) -> int:
    """Hash keys, such as (seed, round, institution, purpose), to a seed.

    Number and types of the keys matter: `("a", "b")`, `("ab",)`, `(1,)` and `("1",)` give four different seeds. The
    same keys give the same seed in every process and on every machine.

    Parameters
    ----------
    *keys : int or str
        The run's seed, and the purpose. Other types are refused, since their text may differ between versions.

    Returns
    -------
    int
        In [0, 2**63): both NumPy and torch take it as a seed.

    Raises
    ------
    TypeError
        For a key that is neither an integer nor a string.

    Examples
    --------
    >>> derived_seed(0, "partition") == derived_seed(0, "partition")
    True
    >>> derived_seed(1, "x") == derived_seed("1", "x")
    False
    """
    plain: list[int | str] = []
    for key in keys:
        if not isinstance(key, (str, int, np.integer)):
            raise TypeError(f"a seed is derived from integers and strings; got {key!r}")
        plain.append(key if isinstance(key, str) else int(key))
    digest = hashlib.sha256(json.dumps(plain).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def derived_rng(seed: int, *names: object) -> np.random.Generator:
    """Return NumPy's random generator for one purpose.

    Parameters
    ----------
    seed : int
        The run's seed.
    *names : int or str
        The purpose: `derived_rng(seed, "partition", "test")`.
    """
    return np.random.default_rng(derived_seed(seed, *names))
