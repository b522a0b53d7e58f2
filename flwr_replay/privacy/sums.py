"""Sums of features by class under DP: the Gaussian mechanism, once.

A patient adds v = (w n_c, √(1 − w²) f_c / C) for all classes c, with its number n_c of examples and their summed
features f_c, and ‖f‖ ≤ C for one of them. All of v is scaled to ‖v‖ ≤ 1. So one patient more or less changes the sum by
at most 1 (and by rounding, about 1e-9 in float64), as long as nobody's features depend on who else is there
(`flwr_replay.privacy.places`). Noise of standard deviation σ then costs what `flwr_replay.privacy.gaussian` says of
μ = 1/σ.

Legend: N examples, C classes, F features.
"""

from __future__ import annotations

from math import floor, log2, sqrt

import torch
from torch import Tensor

from flwr_replay.privacy.local import FINE, ROUNDING
from flwr_replay.privacy.secret import Stream

__all__ = ["class_sums", "noises", "noisy"]

SHARE = 0.15  # w; chosen on CIFAR-10's validation images, seeds 0 to 2


def noises(clip: float) -> tuple[float, float]:
    """Return the noise in numbers of examples, and in sums of features, for σ = 1."""
    return 1 / SHARE, clip / sqrt(1 - SHARE**2)


def class_sums(features_NF: Tensor, labels_N: Tensor, patients_N: Tensor, classes: int, clip: float) -> Tensor:
    """Return the sums of features and of examples by class.

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

    Returns
    -------
    Tensor
        Shape (C, 1 + F), float64: numbers of examples, then sums of features, in units in which a patient adds at most
        a vector of norm 1.
    """
    of_number, of_sums = noises(clip)
    f_NF = features_NF.double()
    norms_N1 = torch.linalg.vector_norm(f_NF, dim=1, keepdim=True)
    f_NF = torch.where(norms_N1.isfinite(), f_NF * (clip / (norms_N1 * ROUNDING)).clamp(max=1), 0.0)
    v_NF = torch.cat([f_NF.new_full((len(f_NF), 1), 1 / of_number), f_NF / of_sums], 1)
    people = int(patients_N.max()) + 1
    of_both, pair_N = torch.unique(labels_N * people + patients_N, return_inverse=True)
    v_PF = v_NF.new_zeros(len(of_both), v_NF.shape[1]).index_add_(0, pair_N, v_NF)  # P: patient and class
    class_P, patient_P = of_both // people, of_both % people
    squares = v_NF.new_zeros(people).index_add_(0, patient_P, v_PF.square().sum(1))
    v_PF = v_PF / (squares[patient_P].sqrt() * ROUNDING).clamp(min=1)[:, None]
    return v_NF.new_zeros(classes, v_NF.shape[1]).index_add_(0, class_P, v_PF)


def noisy(sums: Tensor, sigma: float, stream: Stream) -> Tensor:
    """Add noise of standard deviation σ, in steps of about a millionth of it: last bits would say what was added to."""
    step = 2.0 ** (floor(log2(sigma)) - FINE)
    return ((sums + stream.normal(sums.shape) * sigma) / step).round() * step
