"""A lower bound on epsilon from guesses which of m examples, each in by a fair coin, one run has learned from.

Steinke, Nasr and Jagielski 2023 (arXiv 2305.08846), Theorem 5.2, test (ε, δ)-DP as it stands. c right ones are counted
among g guesses; the auditor abstains from the other m − g examples. With (ε, 0)-DP, c is at most Bin(g, e^ε / (1 +
e^ε)), as for randomised response; δ adds at most 2mδ α to the tail.

A test at significance s is wrong in at most a share s of all audits. Whoever tries several numbers of guesses and
reports the best bound divides s by their number (Bonferroni): `lower_bound` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit
from scipy.stats import binom

from flwr_replay.config.sections import require

__all__ = ["SIGNIFICANCE", "Guesses", "by_steinke", "guessed", "lower_bound"]

SIGNIFICANCE = 0.01  # 99 % bounds
LARGEST = 64.0  # epsilon; no number of canaries that fits a machine shows as much
STEP = 1e-6  # to which a bound is computed


@dataclass(frozen=True)
class Guesses:
    """What an auditor guessed, and how much of it was right.

    Parameters
    ----------
    canaries : int
        m, all examples that were in by a fair coin.
    guesses : int
        g, those that it guessed; it abstains from the others.
    right : int
        c, those that it guessed rightly.
    """

    canaries: int
    guesses: int
    right: int

    def __post_init__(self) -> None:
        require(
            0 <= self.right <= self.guesses <= self.canaries and self.guesses >= 1,
            f"of the canaries some are guessed, and of these some rightly; got {self.right} of {self.guesses} of "
            f"{self.canaries}",
        )


def by_steinke(guesses: Guesses, delta: float, significance: float = SIGNIFICANCE) -> float:
    """Return the largest epsilon that the guesses refute at delta, at least 0; see above.

    Parameters
    ----------
    guesses : Guesses
        Of one run.
    delta : float
        In [0, 1). The test loses its power as 2mδ nears the significance.
    significance : float
        Probability with which the bound may be too large, in (0, 1).

    Examples
    --------
    >>> round(by_steinke(Guesses(500, 500, 366), delta=1e-5, significance=0.05), 4)
    0.8349
    """
    right_C = np.arange(1, guesses.right + 1)

    def p_value(epsilon: float) -> float:
        q = expit(epsilon)
        tail = float(binom.sf(guesses.right - 1, guesses.guesses, q))  # P[Bin ≥ c]
        below_C = binom.sf(guesses.right - right_C - 1, guesses.guesses, q) - tail  # P[c > Bin ≥ c − i], i = 1 … c
        alpha = float(np.max(below_C / right_C, initial=0.0))
        return tail + 2 * guesses.canaries * delta * alpha

    low, high = 0.0, LARGEST
    if p_value(low) > significance:
        return 0.0
    while high - low > STEP:  # what is refuted lies below all that is not
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle) <= significance else (low, middle)
    return low


def guessed(scores_m: NDArray[np.float64], was_in_m: NDArray[np.bool_], guesses: int) -> Guesses:
    """Guess that the examples of the largest scores were in and those of the smallest out, half of the guesses each.

    Equal scores are taken in the examples' order, which must not depend on the coins.

    Parameters
    ----------
    scores_m : NDArray
        Of every canary, (m,); larger means in.
    was_in_m : NDArray
        How the coins fell, (m,).
    guesses : int
        g, from 1 to m.
    """
    order = np.argsort(scores_m, kind="stable")
    guessed_out, guessed_in = order[: guesses // 2], order[len(order) - (guesses - guesses // 2) :]
    right = int((~was_in_m[guessed_out]).sum() + was_in_m[guessed_in].sum())
    return Guesses(len(scores_m), guesses, right)


def lower_bound(tried: Sequence[Guesses], delta: float, significance: float = SIGNIFICANCE) -> tuple[float, Guesses]:
    """Return the best bound over all numbers of guesses that were tried, and the guesses that gave it.

    The significance is divided by how many there are. So in at least 1 − `significance` of all audits it is not too
    large.

    Raises
    ------
    ConfigError
        If nothing was guessed.
    """
    require(bool(tried), "a bound comes from at least one number of guesses; got none")
    bounds = [(by_steinke(guesses, delta, significance / len(tried)), guesses) for guesses in tried]
    return max(bounds, key=lambda pair: pair[0])
