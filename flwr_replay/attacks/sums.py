"""Was this image in a sum that has Gaussian noise? Asked by somebody who knows all other images that were in it.

    r = the sum less what all others have added        v + noise, if the image was in; else noise alone
    score  Σ log p(r | in) / p(r | out) = Σ (⟨r, v⟩ − ‖v‖²/2) / σ²,  over all releases

Nobody who sees the sums tells better (Neyman and Pearson 1933), and nobody knows more: this is the adversary of whom
the definition of (ε, δ) speaks. At most it finds (Kairouz, Oh and Viswanath 2015, arXiv 1311.0776, Theorem 2.1):

    TPR ≤ e^ε FPR + δ,   1 − FPR ≤ e^ε (1 − TPR) + δ

`n` images asked about, `d` numbers of a sum.
"""

from math import exp

import numpy as np
from torch import Tensor

__all__ = ["allowed", "log_ratio"]


def log_ratio(rest_d: Tensor, v_d: Tensor, sigma: float) -> float:
    """Return how much likelier a release is with a contribution than without, as a logarithm, nats.

    Parameters
    ----------
    rest_d : Tensor
        r, what the release has beside what is known to be in it, (d,).
    v_d : Tensor
        v, what the image adds if it is in, (d,), in the same units.
    sigma : float
        Standard deviation of the noise in each number.
    """
    return float((rest_d @ v_d - v_d @ v_d / 2) / sigma**2)


def allowed(epsilon: float, delta: float) -> dict[str, float]:
    """Return the largest AUC, and TPR at 1 % and 0.1 % false positives, of any attack under (ε, δ)-DP.

    >>> {name: round(value, 3) for name, value in allowed(1.0, 0.0).items()}
    {'auc': 0.731, 'tpr_at_1_percent': 0.027, 'tpr_at_01_percent': 0.003}
    """
    shrunk = exp(-epsilon)
    both = (1 - delta) * shrunk / (1 + shrunk)  # FPR at which both bounds are 1 - FPR

    def most(fpr: float) -> float:
        return min(1.0, fpr / shrunk + delta if fpr < both else 1 - shrunk * (1 - delta - fpr))

    corners = np.array([0.0, both, 1 - delta, 1.0])
    area = float(np.trapezoid([most(fpr) for fpr in corners], corners))
    return {"auc": area, "tpr_at_1_percent": most(0.01), "tpr_at_01_percent": most(0.001)}
