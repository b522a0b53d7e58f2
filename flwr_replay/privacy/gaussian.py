"""The plain Gaussian mechanism, exactly: its delta, its epsilon, and the least noise for both.

Source: Balle and Wang 2018 (arXiv 1805.06530), Theorem 8. Whoever releases f(x) + N(0, σ² I), where f has L2
sensitivity Δ, is (ε, δ)-DP if and only if

    δ ≥ Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ),   μ = Δ/σ,   Φ the normal distribution function

Several such releases with μ_1, μ_2, … are together exactly one with μ² = μ_1² + μ_2² + …, also where later ones are
chosen by what earlier ones gave (Dong, Roth and Su 2022, arXiv 1905.02383, Corollary 3.3), their noise too, as long as
the sum keeps within a limit (Smith and Thakurta 2022, arXiv 2210.17520).
"""

from collections.abc import Callable
from functools import lru_cache
from math import exp, expm1

__all__ = ["gaussian_delta", "gaussian_epsilon", "gaussian_noise"]

MARGIN = 1 + 1e-9  # by which noise lies above the least, so that its epsilon is never above the one asked for
CLOSE = 1e-13  # relative width at which a bisection ends


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return the least delta at which the mechanism has this epsilon.

    Parameters
    ----------
    epsilon : float
        Not negative.
    mu : float
        Δ/σ, the sensitivity in units of the noise's standard deviation; positive.

    Examples
    --------
    >>> f"{gaussian_delta(0.0, 1.0):.4f}"  # the total variation distance of N(0, 1) and N(1, 1)
    '0.3829'
    """
    from scipy.special import log_ndtr  # late: most runs state no epsilon of this kind

    above, below = log_ndtr(mu / 2 - epsilon / mu), log_ndtr(-mu / 2 - epsilon / mu)
    return float(exp(above) * -expm1(min(0.0, epsilon + below - above)))  # without taking e^ε, which may overflow


@lru_cache(maxsize=1024)  # a message asks several times
def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the least epsilon of the mechanism at a delta in (0, 1), rounded up; 0 without any release, mu = 0."""
    if mu == 0 or gaussian_delta(0.0, mu) <= delta:
        return 0.0
    return _least(lambda epsilon: gaussian_delta(epsilon, mu) > delta)


@lru_cache(maxsize=1024)
def gaussian_noise(epsilon: float, delta: float) -> float:
    """Return the least noise multiplier σ/Δ for a positive epsilon and a delta in (0, 1), up to one part in 10^9.

    Examples
    --------
    >>> f"{gaussian_noise(1.0, 1e-5):.3f}"  # the classical sqrt(2 ln(1.25/δ))/ε would take 4.845
    '3.731'
    """
    return MARGIN * _least(lambda sigma: gaussian_delta(epsilon, 1 / sigma) > delta)


def _least(too_small: Callable[[float], bool]) -> float:
    low, high = 0.0, 1.0
    while too_small(high):
        low, high = high, 2 * high
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if too_small(middle) else (low, middle)
    return high
