"""Numbers with the interval in which the true value lies, at a confidence of 95 %."""

import math
from dataclasses import dataclass

from scipy.optimize import brentq

__all__ = ["Estimate", "auc_estimate", "share"]

Z = 1.959963984540054  # of the normal distribution, two-sided 95 %
BESIDE = 1e-9  # far less than one pair of examples counts in an AUC


@dataclass(frozen=True)
class Estimate:
    """A value in [0, 1] with its 95 % interval [low, high]."""

    value: float
    low: float
    high: float


def share(hits: int, tries: int) -> Estimate:
    """Return hits / tries with Wilson's interval (Wilson 1927, doi 10.1080/01621459.1927.10502953).

    Unlike ± 1.96 standard errors, it is of use at 0 and at all hits. There is at least one try.

    >>> found = share(0, 10)
    >>> round(found.value, 3), round(found.low, 3), round(found.high, 3)
    (0.0, 0.0, 0.278)
    """
    p, spread = hits / tries, Z**2 / tries
    centre = p + spread / 2
    half = Z * math.sqrt(p * (1 - p) / tries + spread / (4 * tries))
    low = 0.0 if hits == 0 else (centre - half) / (1 + spread)
    high = 1.0 if hits == tries else (centre + half) / (1 + spread)
    return Estimate(p, low, high)


def auc_estimate(auc: float, positives: int, negatives: int) -> Estimate:
    """Return an AUC with a score interval: all true values from which this one is less than 1.96 standard errors away.

    The standard error is Hanley and McNeil's (1982, doi 10.1148/radiology.143.1.7063747), at the true value and not at
    the measured one (Newcombe 2006, doi 10.1002/sim.2324). So the interval has a width at 0 and 1, too. There is at
    least one example of either kind.
    """

    def error(true: float) -> float:
        both_above = true / (2 - true) - true**2  # two positives against one negative
        both_below = 2 * true**2 / (1 + true) - true**2
        variance = true * (1 - true) + (positives - 1) * both_above + (negatives - 1) * both_below
        return math.sqrt(max(variance, 0.0) / (positives * negatives))

    def above(true: float) -> float:
        return true - auc - Z * error(true)

    def below(true: float) -> float:
        return auc - true - Z * error(true)

    # At 0 and 1 the error vanishes, so that the measured value itself is a root, too: look beside it.
    low = float(brentq(below, 0.0, auc - BESIDE)) if auc > BESIDE else 0.0
    high = float(brentq(above, auc + BESIDE, 1.0)) if auc < 1 - BESIDE else 1.0
    return Estimate(auc, low, high)
