"""What DP-SGD costs: epsilon of a sampling rate, a noise multiplier and steps, and the noise for a target epsilon.

Two bounds on the same mechanism, both computed by Opacus: Rényi DP (Mironov, Talwar and Zhang 2019, arXiv 1908.10530)
and numerical composition of privacy loss random variables (Gopi, Lee and Wutschitz 2021, arXiv 2106.02848), which is
tighter. Both hold for Poisson sampling, in which every example joins every step independently and with the same
probability. Neither covers shuffled epochs. Neighbouring data sets differ by one example added or removed. Where every
example joins every step, neither is needed: `flwr_replay.privacy.gaussian` has the exact epsilon.

Latents and labels under local DP are accounted for apart, exactly, and for one example replaced by another.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from heapq import heappop, heappush
from math import floor, inf, isfinite, log, log2, log10, sqrt
from typing import Any, Self, TypeAlias

import numpy as np

from flwr_replay.config.sections import one_of, require
from flwr_replay.errors import ConfigError
from flwr_replay.privacy import importing_opacus
from flwr_replay.privacy.gaussian import gaussian_epsilon

__all__ = ["ORDERS", "LocalRelease", "SampledGaussian", "epsilon", "noise_for", "rounded_up"]

# Opacus' orders; below them for an epsilon in the hundreds, above them for one below 0.1.
ORDERS = (
    *(1 + x / 100 for x in range(1, 10)),
    *(1 + x / 10 for x in range(1, 100)),
    *range(12, 65),
    *(128, 256, 512, 1024),
)
WHOLE_ORDERS = tuple(order for order in ORDERS if order >= 2 and order == int(order))  # these take no series
MOST = 64.0  # epsilon, up to which the PRV accountant is asked; beyond 700 exp() overflows
SHARE = 0.01  # of epsilon, or less: the PRV accountant's error, which is added
DELTAS = 1000  # it also counts one part in so many of delta as lost
POINTS = 2.5e5  # of its grid, on either side of zero; where they are not enough, the error is larger
LARGEST = 1e6  # noise multiplier
Sampling: TypeAlias = tuple[float, float]  # q and noise multiplier
SLACK = 1e-6  # of epsilon; divergences are sums of series that are cut off


@dataclass(frozen=True)
class SampledGaussian:
    """Steps of the Poisson-sampled Gaussian mechanism: what DP-SGD releases, and what it is charged for.

    Parameters
    ----------
    rate : float
        q, the probability with which an example joins a step, in (0, 1]. With 1 this is the plain Gaussian mechanism.
    sigma : float
        Noise multiplier: the noise's standard deviation in units of the L2 sensitivity. 0 gives no privacy.
    steps : int
        How often.
    """

    rate: float
    sigma: float
    steps: int

    def __post_init__(self) -> None:
        require(0 < self.rate <= 1, f"a sampling rate lies in (0, 1]; got {self.rate}")
        require(0 <= self.sigma < inf, f"the noise multiplier must be finite and not negative; got {self.sigma}")
        require(self.steps >= 0, f"the number of steps must not be negative; got {self.steps}")

    @classmethod
    def of_epochs(cls, *, examples: int, batch: int, sigma: float, epochs: int) -> Self:
        """Return DP-SGD over some epochs: q = b/|D|, and ⌊|D|/b⌋ steps an epoch (Qu et al. 2022, Algorithm 3).

        Raises
        ------
        ConfigError
            If there are fewer examples than b, which no sampling rate can give.

        Examples
        --------
        >>> SampledGaussian.of_epochs(examples=1144, batch=32, sigma=0.7, epochs=225).steps
        7875
        """
        require(batch >= 1, f"a batch must have at least one example; got {batch}")
        require(epochs >= 0, f"the number of epochs must not be negative; got {epochs}")
        require(
            examples >= batch,
            f"DP-SGD samples a batch from at least as many examples; got {examples} examples and a batch of {batch}: "
            "choose a smaller batch",
        )
        return cls(batch / examples, sigma, examples // batch * epochs)


@dataclass(frozen=True)
class LocalRelease(SampledGaussian):
    """What one example releases of itself under local DP; neighbours are one example *replaced* by another.

    Parameters
    ----------
    rate, sigma, steps
        1; the noise's standard deviation in units of the sensitivity 2C; rows of latents of the example.
    label_epsilon : float
        Of its label, by randomised response; 0: no label was released.
    """

    label_epsilon: float = 0.0


def epsilon(
    costs: Sequence[SampledGaussian],
    delta: float,
    accountant: str = "rdp",
    orders: Sequence[float] = ORDERS,
) -> float:
    """Return epsilon of several mechanisms on the same examples, released together or one after another.

    Parameters
    ----------
    costs : Sequence[SampledGaussian]
        All that was released; of nothing, epsilon is 0. By either accountant it is exact of `LocalRelease` alone, and
        where every rate is 1.
    delta : float
        In (0, 1); usually at most 1/|D|.
    accountant : str
        rdp | prv. prv's bound lies up to 1 % above the best one. Where its numbers fail, or are worse, it is rdp's.
    orders : Sequence[float]
        Rényi orders, each above 1; the best one is used. prv has none.

    Returns
    -------
    float
        An upper bound, at least 0; infinite without noise.

    Raises
    ------
    ConfigError
        If delta is no probability, or local releases stand among others: one epsilon has one kind of neighbours.

    Examples
    --------
    >>> fig7 = SampledGaussian.of_epochs(examples=1144, batch=32, sigma=0.7, epochs=225)
    >>> round(epsilon([fig7], delta=8.7e-4), 1)
    39.1
    """
    require(0 < delta < 1, f"delta is a probability in (0, 1); got {delta}")
    one_of("accountant", accountant, ("rdp", "prv"))
    if local := [cost for cost in costs if isinstance(cost, LocalRelease)]:
        require(
            len(local) == len(costs),
            "one epsilon is for one kind of neighbours: an example replaced (latents), or one more or less (DP-SGD); "
            "got releases of both",
        )
        return _local(local, delta)
    steps: dict[tuple[float, float], int] = {}
    for cost in costs:  # the same mechanism in many visits is one entry
        if cost.steps:
            steps[cost.rate, cost.sigma] = steps.get((cost.rate, cost.sigma), 0) + cost.steps
    if not steps:
        return 0.0
    if any(sigma == 0 for _, sigma in steps):
        return inf
    if all(rate == 1 for rate, _ in steps):
        return gaussian_epsilon(sqrt(sum(count / sigma**2 for (_, sigma), count in steps.items())), delta)
    bound = _rdp(tuple(steps.items()), delta, tuple(orders))
    return bound if accountant == "rdp" else _prv(steps, delta, bound)


def _local(costs: Sequence[LocalRelease], delta: float) -> float:
    """Compose rows of latents exactly, and add the pure epsilons of labels."""
    if any(cost.steps and not cost.sigma for cost in costs):
        return inf
    mu = sqrt(sum(cost.steps / cost.sigma**2 for cost in costs if cost.steps))
    return gaussian_epsilon(mu, delta) + sum(cost.label_epsilon for cost in costs)


@lru_cache(maxsize=1024)  # institutions of the same size ask for the same
def _rdp(steps: tuple[tuple[tuple[float, float], int], ...], delta: float, orders: tuple[float, ...]) -> float:
    """Convert the sum of all Rényi divergences as Balle et al. 2020, arXiv 1905.09982, Theorem 21.

    A divergence grows with its order. So one order bounds all above it, and most are never computed.
    """
    orders_A = np.sort(np.array(orders, float))
    orders_A = orders_A[(orders_A > 1) & np.isfinite(orders_A)]
    first_A = np.log1p(-1 / orders_A)
    second_A = (np.log(delta) + np.log(orders_A)) / (orders_A - 1)

    def between(low: int, high: int, divergence: float) -> list[tuple[float, int, int, float]]:
        """Return these orders with the least epsilon that one of them can have, if there are any."""
        bounds_A = divergence + first_A[low:high] - second_A[low:high]
        return [(float(bounds_A.min()), low, high, divergence)] if low < high else []

    best, left = inf, between(0, len(orders_A), 0.0)
    while left and left[0][0] <= best + SLACK:
        _, low, high, below = heappop(left)
        middle = (low + high) // 2
        rdp = sum(count * _rdp_of_step(rate, sigma, float(orders_A[middle])) for (rate, sigma), count in steps)
        if finite := isfinite(rdp):
            best = min(best, float(rdp + first_A[middle] - second_A[middle]))
        for interval in (*between(low, middle, below), *between(middle + 1, high, rdp if finite else below)):
            heappush(left, interval)
    return max(0.0, best)


@lru_cache(maxsize=2**16)
def _rdp_of_step(rate: float, sigma: float, order: float) -> float:
    with importing_opacus():  # which takes seconds
        from opacus.accountants.analysis.rdp import compute_rdp

    return float(compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=order))


def _prv(steps: Mapping[Sampling, int], delta: float, bound: float) -> float:
    """Return the PRV accountant's upper bound, or `bound`, that of Rényi DP, where that is less or PRV fails.

    One mechanism's bound grows with its steps: they share a grid up to the next power of two, and just beyond it the
    bound is at least that of all steps up to there.
    """
    grids = {sampling: 2 ** (count - 1).bit_length() for sampling, count in steps.items()}
    bound_by_prv = _composed(steps, grids, delta, bound)
    (sampling, count), *others = steps.items()
    if not others and (half := grids[sampling] // 2) and count < 1.25 * half:
        bound_by_prv = max(bound_by_prv, _whole_grid(sampling, half, delta))
    return min(bound, bound_by_prv)


@lru_cache(maxsize=1024)
def _whole_grid(sampling: Sampling, count: int, delta: float) -> float:
    grid = {sampling: count}
    bound = _rdp(tuple(grid.items()), delta, ORDERS)
    return min(bound, _composed(grid, grid, delta, bound))


def _composed(steps: Mapping[Sampling, int], grids: Mapping[Sampling, int], delta: float, bound: float) -> float:
    """Compose on a grid that is fine enough for as many steps as `grids` has; infinite where Opacus cannot."""
    if bound > MOST:
        return inf
    with importing_opacus():
        from opacus.accountants.analysis.prv import compose_heterogeneous

    try:
        error, losses = _discrete(tuple(grids.items()), delta, SHARE * 2.0 ** floor(log2(max(bound, 0.25))))
        with np.errstate(all="ignore"):
            whole = compose_heterogeneous(list(losses), [steps[sampling] for sampling in grids])
            return max(0.0, float(whole.compute_epsilon(delta, delta / DELTAS, error)[2]))  # Gopi et al., Theorem 5.5
    except (RuntimeError, ValueError):  # means that differ, an epsilon off the grid, a delta too small
        return inf


@lru_cache(maxsize=32)
def _discrete(grids: tuple[tuple[Sampling, int], ...], delta: float, error: float) -> tuple[float, tuple[Any, ...]]:
    """Return the error, and a step of each mechanism on one grid, as `opacus.accountants.PRVAccountant` makes them."""
    with importing_opacus():
        from opacus.accountants.analysis import prv

    total, lost = sum(count for _, count in grids), delta / DELTAS
    whole = _rdp(grids, lost / 4, WHOLE_ORDERS)
    width = 3 + max([whole, *(_rdp(((sampling, 1),), lost / (8 * total), WHOLE_ORDERS) for sampling, _ in grids)])
    meshes = sqrt(total * log(12 / lost) / 2)  # of the error
    error = max(error, width * meshes / POINTS)
    if error >= 1:
        raise ValueError(error)
    grid = prv.Domain.create_aligned(-width, width, error / meshes)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of empty densities
        losses = [prv.PoissonSubsampledGaussianPRV(*sampling) for sampling, _ in grids]
        cut = [prv.TruncatedPrivacyRandomVariable(loss, -width, width) for loss in losses]
        return error, tuple(prv.discretize(loss, grid) for loss in cut)


def rounded_up(value: float, digits: int = 3) -> str:
    """Write an epsilon or delta with a few digits, never less than it is.

    >>> rounded_up(0.12341), rounded_up(2.0), rounded_up(1e-5, 2), rounded_up(0.0), rounded_up(inf)
    ('0.124', '2', '1e-05', '0', 'inf')
    """
    shown = f"{value:.{digits}g}"
    if float(shown) >= value:
        return shown
    step = 10.0 ** (floor(log10(float(shown) or value)) - digits + 1)
    return f"{float(shown) + step:.{digits}g}"


def noise_for(
    target: float,
    delta: float,
    samplings: Sequence[tuple[float, int]],
    accountant: str = "rdp",
    fixed: Sequence[SampledGaussian] = (),
) -> float:
    """Return the least noise multiplier with which all that is released costs at most `target`.

    Parameters
    ----------
    target : float
        Epsilon, positive.
    delta : float
        In (0, 1).
    samplings : Sequence[tuple[float, int]]
        (q, steps) of every mechanism on these examples; all get the same noise multiplier.
    accountant : str
        rdp | prv.
    fixed : Sequence[SampledGaussian]
        Further releases, whose noise is given.

    Returns
    -------
    float
        At most 0.1 % above the least; `epsilon` of it is never above `target`.

    Raises
    ------
    ConfigError
        If no noise multiplier up to a million is enough.
    """
    require(0 < target < inf, f"the target epsilon must be positive and finite; got {target}")
    require(
        not fixed or epsilon(fixed, delta) < target,
        f"the noisy label counts alone cost epsilon {target} at delta {delta:.2g}, or more: raise privacy.count-sigma",
    )

    @cache
    def costs(sigma: float) -> float:
        new = [SampledGaussian(rate, sigma, steps) for rate, steps in samplings]
        return epsilon([*fixed, *new], delta, accountant)

    tight = accountant == "prv" and any(rate < 1 for rate, _ in samplings)
    high, factor = (noise_for(target, delta, samplings, fixed=fixed), 1.1) if tight else (1.0, 2.0)  # rdp's is enough
    while costs(high) > target:
        high *= 2
        if high > LARGEST:
            raise ConfigError(f"epsilon {target} at delta {delta} needs more noise than {LARGEST:.0f}: raise epsilon")
    low, nudge = high / factor, 4e-4
    while costs(low) <= target and low > 1 / LARGEST:
        high, low = low, low / factor
    while high - low > 1e-3 * low:
        above, below = costs(low), costs(high)
        share = log(above / target) / log(above / below) if 0 < below < above < inf else 0.5  # almost a power of σ
        middle = low * (high / low) ** min(0.9, max(0.1, share)) * (1 + nudge)
        nudge = -nudge  # so that the least lies between two of them
        low, high = (max(middle, low), high) if costs(middle) > target else (low, min(middle, high))
    return high
