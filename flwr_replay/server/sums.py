"""What sums of features by class, and their products, say: means, a covariance, and Gaussians to draw from.

Legend: C classes, F features.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from flwr_replay.learning.heads import OF_ALL, variances
from flwr_replay.privacy.sums import noises, unpacked
from flwr_replay.wire.records import StateDict

__all__ = ["Moments"]

SURE = 6  # times the noise: a number of examples that divides; chosen on CIFAR-10's validation images, seeds 0 to 2


@dataclass(frozen=True)
class Moments:
    """Means of classes, and sums of products of features, with the noise of each.

    Attributes
    ----------
    numbers_C : NDArray
        Numbers of examples; `n_C` are at least six times their noise, by which sums may be divided.
    mu_CF, noise_C : NDArray
        Means, and the standard deviation of the noise in each of their numbers.
    products_FF : NDArray
        Sums of f fᵀ over all examples; (0, 0) where they were not asked for.
    noise : float
        Standard deviation of the noise on their diagonal.
    """

    numbers_C: NDArray[Any]
    n_C: NDArray[Any]
    mu_CF: NDArray[Any]
    noise_C: NDArray[Any]
    products_FF: NDArray[Any]
    noise: float

    @classmethod
    def of(cls, sums: NDArray[Any], pairs: NDArray[Any] | None, clip: float, sigma: float) -> Self:
        """Read sums as they travel, by class a number and features, (C, 1 + F), whose noise has `sigma`."""
        of_number, of_sum, of_product = noises(clip, pairs is not None)
        numbers_C = sums[:, 0] * of_number
        n_C = np.maximum(numbers_C, max(1.0, SURE * of_number * sigma))
        products_FF = np.zeros((0, 0)) if pairs is None else unpacked(pairs, sums.shape[1] - 1) * of_product
        mu_CF = sums[:, 1:] * of_sum / n_C[:, None]
        return cls(numbers_C, n_C, mu_CF, of_sum * sigma / n_C, products_FF, of_product * sigma)

    def gaussians(self, clip: float) -> StateDict:
        """Return what features are drawn from, `flwr_replay.learning.draws.Draws`: as many as there were examples.

        The covariance is that of `head=lda`, its factor the symmetric one: an axis has two signs, and last bits choose.
        No mean is longer than the clip, and no deviation.
        """
        known = self.mu_CF, self.n_C, self.noise_C, self.products_FF, self.noise
        variance_F, axes_FF = variances(*known, 1e-6 * clip**2, OF_ALL)
        long_C = np.maximum(np.linalg.norm(self.mu_CF, axis=1) / clip, 1)
        counts = np.maximum(self.numbers_C.round(), 0).astype(np.int64)
        return {
            "means": (self.mu_CF / long_C[:, None]).astype(np.float32),
            "factor": (axes_FF * np.sqrt(variance_F).clip(max=clip) @ axes_FF.T).astype(np.float32),
            "counts": counts if counts.any() else np.ones_like(counts),
        }
