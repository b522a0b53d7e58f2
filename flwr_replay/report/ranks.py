"""Average ranks of methods over seeds or data sets, Friedman's test, and Nemenyi's critical difference.

Source: Demšar 2006, Statistical comparisons of classifiers over multiple data sets, JMLR 7, section 3.2. Deviation: a
p-value is never below k!^(1-N), that of N equal orders of k methods, which the F distribution falls below for few N.

Letters: N cases (seeds of one data set, or data sets), k methods.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import factorial, sqrt
from typing import Self

import numpy as np

from flwr_replay.report.charts import Chart, Row, dots

__all__ = ["FEWEST", "MeanRanks"]

FEWEST = 5  # cases; of three, the true standard deviation may be six times the measured one
LEVEL = 0.05


@dataclass(frozen=True)
class MeanRanks:
    """By method its rank in each case, 1 for the best; equal values share the mean of their ranks."""

    by_method: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(cls, values: Mapping[str, Mapping[str, float]], higher_is_better: bool) -> Self | None:
        """Rank methods in the cases that all have; None for fewer than three methods or `FEWEST` such cases.

        >>> values = {"a": {"0": 0.1, "1": 0.5, "2": 0.2, "3": 0.3, "4": 0.2, "5": 0.9}}
        >>> values |= {"b": {str(n): 0.4 for n in range(5)}, "c": {str(n): 0.4 for n in range(5)}}
        >>> print(MeanRanks.of(values, True).told.partition(";")[0])
        average ranks, 1 is best: b 1.70, c 1.70, a 2.60
        """
        from scipy.stats import rankdata

        cases = [case for case in next(iter(values.values()), {}) if all(case in own for own in values.values())]
        if len(values) < 3 or len(cases) < FEWEST:
            return None
        sign = -1 if higher_is_better else 1
        ranks_kN = rankdata([[sign * own[case] for case in cases] for own in values.values()], axis=0)
        return cls(
            {name: dict(zip(cases, map(float, own), strict=True)) for name, own in zip(values, ranks_kN, strict=True)}
        )

    @cached_property
    def means(self) -> dict[str, float]:
        """The average rank of every method, the best first."""
        means = {name: float(np.mean([*own.values()])) for name, own in self.by_method.items()}
        return dict(sorted(means.items(), key=lambda pair: pair[1]))

    @property
    def size(self) -> tuple[int, int]:
        """Return k and N."""
        return len(self.by_method), len(next(iter(self.by_method.values())))

    @cached_property
    def p(self) -> float:
        r"""Friedman's test in Iman and Davenport's form: of equal methods, how often ranks differ so much by chance.

        .. math:: \chi^2 = \frac{12 N}{k (k + 1)} \Big( \sum_j R_j^2 - \frac{k (k + 1)^2}{4} \Big), \quad
            F = \frac{(N - 1) \chi^2}{N (k - 1) - \chi^2} \sim F_{k - 1, (k - 1)(N - 1)}
        """
        from scipy.stats import f

        k, n = self.size
        squares = sum(mean**2 for mean in self.means.values())
        chi_squared = 12 * n / (k * (k + 1)) * (squares - k * (k + 1) ** 2 / 4)
        rest = n * (k - 1) - chi_squared
        asymptotic = float(f.sf((n - 1) * chi_squared / rest, k - 1, (k - 1) * (n - 1))) if rest > 1e-9 else 0.0
        return max(asymptotic, float(factorial(k)) ** (1 - n))

    @cached_property
    def apart(self) -> float:
        r"""Nemenyi's critical difference: average ranks that lie so far apart differ at 5 %.

        .. math:: q_{0.05, k, \infty} / \sqrt 2 \; \sqrt{k (k + 1) / (6 N)}
        """
        from scipy.stats import studentized_range

        k, n = self.size
        return float(studentized_range.ppf(1 - LEVEL, k, np.inf)) / sqrt(2) * sqrt(k * (k + 1) / (6 * n))

    @property
    def told(self) -> str:
        """All of it in one line."""
        shown = ", ".join(f"{name} {mean:.2f}" for name, mean in self.means.items())
        pairs = [f"{a} and {b}" for a, b in combinations(self.means, 2) if self.means[b] - self.means[a] > self.apart]
        told = f"these differ: {', '.join(pairs)}" if pairs else "none differ"
        return (
            f"average ranks, 1 is best: {shown}; Friedman p = {self.p:.2g}; by Nemenyi, {self.apart:.2f} apart, {told}"
        )

    @property
    def chart(self) -> Chart:
        """A dot for the rank in each case, a bar at their mean; of methods that differ lines do not overlap."""
        half = self.apart / 2
        return dots(
            {name: Row(self.by_method[name], mean, (mean - half, mean + half)) for name, mean in self.means.items()}
        )
