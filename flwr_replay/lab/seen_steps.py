"""What recorded steps of DP-SGD say of noise, clipping, sampling and charges, whatever the code says of itself.

A step is seen from outside: rows that were drawn, what one example adds to a sum, and by how much the weights moved.
What is left of a move without the sum is noise. Everything is in units of C:

    r = u − S,    u the move, S the sum of clipped gradients;    A = the most that one example adds to a sum

An account that charges σ, q and n steps says that r is N(0, σ²A²) in every step and coordinate, independent of S and of
other steps, that every row joins every step with probability q, and that there were n. Each of the p-values below tests
one of these, over n steps of d numbers, and holds for any n. The smallest counts times their number (Bonferroni).

S may depend on the noise of earlier steps, but is there before the step's own noise is drawn. So r along S is
N(0, σ²A²) in every step, whatever went before. Rounding to float32 adds at most 2⁻²⁴ (‖w‖ + 5 ‖u‖), w the weights.

It is the white-box test of Nasr et al. 2023 (arXiv 2302.07956) taken to its end: who sees a step of known gradients
needs no guesses, since the noise's variance is measured from n · d numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import beta, binom, chi2, norm
from torch import Tensor

from flwr_replay.privacy.accounting import SampledGaussian, epsilon
from flwr_replay.rng import derived_rng

__all__ = ["SeenSteps", "judged"]

FOUND = 0.95  # of all audits: the power that is stated
DRAWN = 2**16  # draws of Poisson sampling, with which counts are compared
FINDINGS = {
    "noise": "less noise, for what one example adds, than charged",
    "noise of a step": "a step with less noise than charged",
    "noise of a layer": "a layer with less noise than charged",
    "noise of a parameter": "a parameter with less noise than charged",
    "noise of all steps": "noise that cancels over the steps",
    "repeated noise": "noise that is alike in several steps",
    "clipping": "examples that move the weights by more than what was clipped",
    "rate": "more rows in the batches than charged",
    "batches": "batches whose sizes are not those of Poisson sampling",
    "rows": "rows that join more or less evenly than by Poisson sampling",
}


@dataclass
class SeenSteps:
    """Steps of one module that were charged alike."""

    cost: SampledGaussian  # as the code says; its rate and sigma are what is tested
    examples: int  # D
    sizes: list[int]  # numbers of each layer, d in all
    most: float = 0.0  # A, in units of C
    batches: list[int] = field(default_factory=list)  # rows of each step
    squares_n: list[float] = field(default_factory=list)  # ‖r‖² of each step
    along_n: list[float] = field(default_factory=list)  # r along S, of each step
    sums_n: list[float] = field(default_factory=list)  # ‖S‖ of each step

    def __post_init__(self) -> None:
        self.drawn_D = np.zeros(self.examples, np.int64)  # how often each row was drawn
        self.squares_d, self.total_d = np.zeros(sum(self.sizes)), np.zeros(sum(self.sizes))  # Σ r² and Σ r

    def saw(self, rows_B: Tensor, taken: int, moved_d: Tensor, sums_d: Tensor, most: float) -> None:
        """Record a step that drew the rows (B,), int64, of which the sum had so many examples as `taken`.

        `moved_d`, by how much the weights moved, the sum of clipped gradients, and `most`, the largest norm of what one
        example added to the sum, are float64 and in units of C.
        """
        self.batches.append(taken)
        self.drawn_D += np.bincount(rows_B, minlength=self.examples)
        self.most = max(self.most, most)
        rest_d, norm_of_sum = moved_d - sums_d, float(torch.linalg.vector_norm(sums_d))
        self.along_n.append(float(rest_d @ sums_d) / norm_of_sum if norm_of_sum else 0.0)
        self.sums_n.append(norm_of_sum)
        rest = rest_d.cpu().numpy()
        self.squares_n.append(float(rest @ rest))
        self.squares_d += rest**2
        self.total_d += rest

    @property
    def steps(self) -> int:
        """How many were seen."""
        return len(self.squares_n)

    @property
    def sigma(self) -> float:
        """The noise that was seen, over the most that one example adds."""
        return sqrt(sum(self.squares_n) / (self.steps * len(self.total_d))) / self.most

    @property
    def rate(self) -> float:
        """The share of the rows that was drawn."""
        return sum(self.batches) / (len(self.batches) * self.examples)

    def p_values(self) -> dict[str, float]:
        """Return the p-value of each test, by its key in `FINDINGS`; many tests of a kind are corrected."""
        n, d, variance = self.steps, len(self.total_d), (self.cost.sigma * self.most) ** 2
        layers = [of_layer.sum() for of_layer in np.split(self.squares_d, np.cumsum(self.sizes)[:-1])]
        values = {
            "noise": chi2.cdf(sum(self.squares_n) / variance, n * d),
            "noise of a step": n * chi2.cdf(min(self.squares_n) / variance, d),
            "noise of a layer": len(layers) * min(chi2.cdf(np.array(layers) / variance, n * np.array(self.sizes))),
            "noise of a parameter": d * chi2.cdf(self.squares_d.min() / variance, n),
            "noise of all steps": chi2.cdf(self.total_d @ self.total_d / (n * variance), d),
            "repeated noise": chi2.sf(self.total_d @ self.total_d / (n * variance), d),
            "clipping": norm.sf(sum(self.along_n) / sqrt(n * variance)),
        }
        q, steps = self.cost.rate, len(self.batches)
        values["rate"] = binom.sf(sum(self.batches) - 1, steps * self.examples, q)
        if q < 1:
            values["batches"] = _dispersion(np.array(self.batches), self.examples, q)
            values["rows"] = _dispersion(self.drawn_D, steps, q)
        return {name: min(1.0, float(p)) for name, p in values.items()}

    def undetected(self, significance: float) -> dict[str, float]:
        """Return the largest faults that tests at this significance could miss in more than 5 of 100 audits.

        Returns
        -------
        dict
            `noise`: its share of what is charged; `growth`: of sums after clipping, as a share of them; `rate`.
        """
        numbers = self.steps * len(self.total_d)
        less = sqrt(chi2.ppf(significance, numbers) / chi2.ppf(FOUND, numbers))
        far = (norm.isf(significance) + norm.ppf(FOUND)) * sqrt(self.steps) * self.cost.sigma * self.most
        q, rows = self.cost.rate, len(self.batches) * self.examples
        most = int(binom.isf(significance, rows, q)) + 1  # so many are found
        more = float(beta.ppf(FOUND, most, rows - most + 1)) if most <= rows else 1.0
        return {"noise": less, "growth": float(far / sum(self.sums_n)), "rate": more}


def judged(
    seen: Sequence[SeenSteps], charged: Sequence[SampledGaussian], stray: int, delta: float, significance: float
) -> dict[str, Any]:
    """Test what an account charges by the steps that were seen.

    Parameters
    ----------
    seen : Sequence[SeenSteps]
        All of an institution; each has a step.
    charged : Sequence[SampledGaussian]
        All charges on its account, with a sigma above 0.
    stray : int
        Steps without DP-SGD on weights that it trains.
    delta : float
        At which epsilon is stated.
    significance : float
        Share of honest audits in which something may be found.

    Returns
    -------
    dict
        `steps`; `charged`; `stray`; `kinds`: `sigma` and `rate` of each kind of step, seen and charged, and `most`, A;
        `detectable`, the epsilon above which a fault of noise, clipping or rate, the same in all steps, would have
        been found in 95 of 100 audits; `growth`, the share of sums above which so would their growth after clipping;
        `found`, in words.
    """
    share = significance / (len(FINDINGS) * len(seen))
    broken = {name for kind_seen in seen for name, p in kind_seen.p_values().items() if p <= share}
    broken -= {name for name in broken if name.startswith("noise of")} if "noise" in broken else set()
    words, steps = [FINDINGS[name] for name in FINDINGS if name in broken], _steps(charged)
    taken = _steps([replace(kind_seen.cost, steps=kind_seen.steps) for kind_seen in seen])
    if over := sum(max(0, n - steps.get(kind, 0)) for kind, n in taken.items()):
        words.append(f"{over:,} steps that were not charged")
    if stray:
        words.append(f"{stray:,} steps without DP-SGD on weights that it trains")
    spent = [SampledGaussian(*kind, n) for kind, n in steps.items() if kind not in taken]
    missed = [kind_seen.undetected(share) for kind_seen in seen]
    for kind_seen, most in zip(seen, missed, strict=True):
        spent.append(SampledGaussian(most["rate"], kind_seen.cost.sigma * most["noise"], kind_seen.steps))
    return {
        "steps": sum(taken.values()),
        "charged": sum(steps.get(kind, 0) for kind in taken),
        "stray": stray,
        "kinds": [
            {
                "sigma": {"seen": kind_seen.sigma, "charged": kind_seen.cost.sigma},
                "rate": {"seen": kind_seen.rate, "charged": kind_seen.cost.rate},
                "most": kind_seen.most,
            }
            for kind_seen in seen
        ],
        "detectable": epsilon(spent, delta),
        "growth": max(most["growth"] for most in missed),
        "found": words,
    }


def _steps(costs: Sequence[SampledGaussian]) -> Mapping[tuple[float, float], int]:
    """Return how many steps there are of each rate and sigma."""
    steps: dict[tuple[float, float], int] = {}
    for cost in costs:
        steps[cost.rate, cost.sigma] = steps.get((cost.rate, cost.sigma), 0) + cost.steps
    return steps


def _dispersion(counts: NDArray[np.int64], trials: int, q: float) -> float:
    """Return the p-value, two-sided, of how far counts lie from their mean, if each is binomial."""
    drawn, seen = _distances(len(counts), trials, q), ((counts - round(trials * q)) ** 2).sum()
    below, above = np.searchsorted(drawn, seen, "right"), DRAWN - np.searchsorted(drawn, seen)
    return 2 * float(1 + min(below, above)) / (1 + DRAWN)


@cache
def _distances(counts: int, trials: int, q: float) -> NDArray[np.int64]:
    """Draw counts, and return their squared distances from the mean, rounded; summed, and sorted, (DRAWN,).

    How often each number occurs among the counts is multinomial.
    """
    numbers = np.arange(binom.ppf(1e-15, trials, q), binom.isf(1e-15, trials, q) + 1).astype(np.int64)
    shares, rng = binom.pmf(numbers, trials, q), derived_rng(0, "dispersion")
    squares, some = (numbers - round(trials * q)) ** 2, DRAWN // 64
    return np.sort(np.concatenate([rng.multinomial(counts, shares / shares.sum(), some) @ squares for _ in range(64)]))
