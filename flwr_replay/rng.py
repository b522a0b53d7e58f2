"""Random generators, with seeds derived from the run's seed and a purpose, never from global state.

Privacy noise is not drawn here: it needs a secret key, which no seed reveals.
"""

import hashlib
import json

import numpy as np

__all__ = ["derived_rng", "derived_seed"]


def derived_seed(*parts: object) -> int:
    """Hash parts, such as (seed, round, institution, purpose), to a seed.

    Number and types of the parts matter: `("a", "b")`, `("ab",)`, `(1,)` and `("1",)` give four different seeds. The
    same parts give the same seed in every process and on every machine.

    Parameters
    ----------
    *parts : int or str
        The run's seed, and the purpose. Other types are refused, since their text may differ between versions.

    Returns
    -------
    int
        In [0, 2**63): both NumPy and torch take it as a seed.

    Raises
    ------
    TypeError
        For a part that is neither an integer nor a string.

    Examples
    --------
    >>> derived_seed(0, "partition") == derived_seed(0, "partition")
    True
    >>> derived_seed(1, "x") == derived_seed("1", "x")
    False
    """
    plain: list[int | str] = []
    for part in parts:
        if not isinstance(part, (str, int, np.integer)):
            raise TypeError(f"a seed is derived from integers and strings; got {part!r}")
        plain.append(part if isinstance(part, str) else int(part))
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
