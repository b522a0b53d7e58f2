"""Sums of features by class under DP: the Gaussian mechanism, once.

A patient adds v = (w n_c, u f_c / C) for all classes c, with its number n_c of examples and their summed features f_c,
and ‖f‖ ≤ C for one of them. If products are asked for, v also has u Σ f fᵀ / C², of all classes together, each pair of
features once; those of two different ones are times √2, so that the norm is that of the matrix. w is `SHARE`, and u
such that ‖v‖ ≤ 1 for one example. All of v is scaled to ‖v‖ ≤ 1. So one patient more or less changes the sum by at most
1 (and by rounding, about 1e-9 in float64), as long as nobody's features depend on who else is there
(`flwr_replay.privacy.places`). Noise of standard deviation σ then costs what `flwr_replay.privacy.gaussian` says of
μ = 1/σ.

Of a regression the label, clipped to a public range and brought to [-C, C], is one more feature of an example in the
only class, and C √2 takes the place of C, which no example's f exceeds: ‖f‖² + y² ≤ 2 C². One number is not sent, the
sum of y². What is left of v has a norm of at most 1, too, and so has its change by a patient; with the sum's noise once
or each, and on the grid, what `flwr_replay.privacy.shares` says of such sums holds.

Legend: N examples, C classes, F features.
"""

from math import floor, log2, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flwr_replay.privacy.local import FINE, ROUNDING
from flwr_replay.privacy.secret import Stream

__all__ = ["WITH_LABEL", "class_sums", "labelled", "noises", "noisy", "packed", "unpacked"]

SHARE = 0.15  # w; chosen on CIFAR-10's validation images, seeds 0 to 2
WITH_LABEL = sqrt(2)  # times the clip: the largest norm of features and label
ROWS = 256  # of a patient's products of examples at once


def noises(clip: float, products: bool) -> tuple[float, float, float]:
    """Return the noise in numbers of examples, in sums of features, and in sums of their products, for σ = 1."""
    share = sqrt((1 - SHARE**2) / (1 + products))
    return 1 / SHARE, clip / share, clip**2 / share


def class_sums(
    features_NF: Tensor, labels_N: Tensor, patients_N: Tensor, classes: int, clip: float, products: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the sums of features and of examples by class, and of the products of features.

    Parameters
    ----------
    features_NF : Tensor
        What is not finite counts as zeros.
    labels_N, patients_N : Tensor
        Class of each example, and number of its patient, from 0; a patient of its own each where none are known.
    classes : int
        C.
    clip : float
        The largest L2 norm of one example's features.
    products : bool
        Whether products are asked for.

    Returns
    -------
    tuple of Tensor
        Shape (C, 1 + F), float64: numbers of examples, then sums of features. Shape (F, F), or (0, 0): sums of
        products. Both in units in which a patient adds at most a vector of norm 1.
    """
    of_number, of_sums, of_products = noises(clip, products)
    f_NF = clipped(features_NF, clip)
    v_NF = torch.cat([f_NF.new_full((len(f_NF), 1), 1 / of_number), f_NF / of_sums], 1)
    people = int(patients_N.max()) + 1
    of_both, pair_N = torch.unique(labels_N * people + patients_N, return_inverse=True)
    v_PF = v_NF.new_zeros(len(of_both), v_NF.shape[1]).index_add_(0, pair_N, v_NF)  # P: patient and class
    class_P, patient_P = of_both // people, of_both % people
    squares = v_NF.new_zeros(people).index_add_(0, patient_P, v_PF.square().sum(1))
    f_NF = f_NF / sqrt(of_products)
    for rows_B in torch.split(torch.arange(len(f_NF)), ROWS) if products else ():  # ‖Σ_i f_i f_iᵀ‖² = Σ_ij (f_i·f_j)²
        same_BN = patients_N[rows_B, None] == patients_N
        squares.index_add_(0, patients_N[rows_B], ((f_NF[rows_B] @ f_NF.T).square() * same_BN).sum(1))
    norms = (squares.sqrt() * ROUNDING).clamp(min=1)
    f_NF = f_NF / norms[patients_N].sqrt()[:, None]
    sums = v_NF.new_zeros(classes, v_NF.shape[1]).index_add_(0, class_P, v_PF / norms[patient_P, None])
    return sums, f_NF.T @ f_NF if products else f_NF.new_zeros(0, 0)


def clipped(features_NF: Tensor, clip: float) -> Tensor:
    """Return features of at most this norm, float64; zeros where they are not finite."""
    f_NF = features_NF.double()
    norms_N1 = torch.linalg.vector_norm(f_NF, dim=1, keepdim=True)
    return torch.where(norms_N1.isfinite(), f_NF * (clip / (norms_N1 * ROUNDING)).clamp(max=1), 0.0)


def labelled(features_NF: Tensor, learned_N: Tensor, clip: float) -> Tensor:
    """Return features of at most this norm with labels in [-1, 1], times `clip`, as the last: (N, F + 1)."""
    return torch.cat([clipped(features_NF, clip), clip * learned_N.double()[:, None]], 1)


def packed(products_FF: Tensor) -> Tensor:
    """Return each pair of features once, (F (F + 1) / 2,), with the norm of the whole."""
    row, column = torch.triu_indices(*products_FF.shape)
    return products_FF[row, column] * products_FF.new_full(row.shape, sqrt(2)).masked_fill(row == column, 1)


def unpacked(pairs: NDArray[np.float64], features: int) -> NDArray[np.float64]:
    """Return the symmetric matrix, (F, F), of pairs as `packed` returns them."""
    half_FF = np.zeros((features, features))
    half_FF[np.triu_indices(features)] = pairs / sqrt(2)
    whole_FF: NDArray[np.float64] = half_FF + half_FF.T
    np.fill_diagonal(whole_FF, whole_FF.diagonal() / sqrt(2))
    return whole_FF


def noisy(sums: Tensor, sigma: float, stream: Stream) -> Tensor:
    """Add noise of standard deviation σ, in steps of about a millionth of it: last bits would say what was added to."""
    step = 2.0 ** (floor(log2(sigma)) - FINE)
    return ((sums + stream.normal(sums.shape) * sigma) / step).round() * step
