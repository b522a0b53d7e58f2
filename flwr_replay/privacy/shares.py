"""Noise that a sum needs once: every institution adds a share of it, under masks.

    at institution k:  y_k = ⌊s_k / g⌉ + N_Z(0, 2^48)            whole numbers; N_Z: `flwr_replay.privacy.discrete`
    the sum:           Σ_k y_k = Σ_k ⌊s_k / g⌉ + noise of variance at least h · 2^48

s_k are an institution's sums in units of their sensitivity, h the number of institutions whose shares count: all but
those that may help the server, or add none. A patient more or less, or another update of norm C in place of one, which
moves it by 2C, changes Σ_k ⌊s_k / g⌉ by at most 1/g + √d in the L2 norm, with d numbers, rounding included. So g is
chosen such that

    √h · 2^24 = σ · MARGIN · (1/g + √d),   σ the noise multiplier that the account charges for

Source: Kairouz, Liu and Steinke 2021 (arXiv 2102.06387), Theorem 1: against h shares of variance 2^48 the sum of
discrete Gaussians is as private as one of variance h · 2^48, but for d τ with τ = 10 Σ_{k<h} exp(-2π² 2^48 k/(k+1)),
which is below e^-10^15. One discrete Gaussian X is as private as a Gaussian of its variance V that is rounded, but for
little: for all whole x, Jensen's inequality gives P(X = x) ≤ e^(1/24V) P(⌊N(0, V)⌉ = x), and sinh(a) ≤ a exp(a²/6)
gives P(⌊N(0, V)⌉ = x) ≤ exp(x²/24V²) P(X = x) (1 + e^-V). Over d numbers with ‖x‖² ≤ 8 d V + 3000 V, which others
exceed with a probability below e^-900, both together change ε by less than (d + 200)/V, 4e-6 for d = 10^9; T messages
together by T times as much. MARGIN lowers ε by 1e-4 (ε + μ²/2) or more, with μ² = T/σ²: ε of a Gaussian grows with μ
at a rate of at least ε/μ + μ/2. That is more: `step_of` asks for 1/g > 200 √d, so T d/V is below μ²/40,000, and 200 T/V
is below 1e-4 ε for all T < 10^8 ε. There is room for the rounding of the s_k in float64, too: with n patients it moves
neighbours apart by at most n² 2^-52 more, 2e-6 for n = 10^5.
"""

from collections.abc import Mapping
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flwr_replay.config.sections import require
from flwr_replay.errors import DivergedError
from flwr_replay.privacy.discrete import BITS, discrete_gaussian
from flwr_replay.privacy.secret import Stream
from flwr_replay.wire.records import StateDict

__all__ = ["MARGIN", "beside", "check_sums", "shared", "step_of"]

MARGIN = 1 + 1e-4


def step_of(sigma: float, honest: int, numbers: int) -> float:
    """Return g, what one step of the whole numbers is worth in units of the sensitivity.

    Parameters
    ----------
    sigma : float
        Noise multiplier of the sum.
    honest : int
        h, how many shares make up this noise.
    numbers : int
        d, of one institution's answer.

    Raises
    ------
    ConfigError
        If steps of this size are too large for the proof above, 1/g ≤ 200 √d.
    """
    steps = sqrt(honest) * 2.0**BITS / (sigma * MARGIN) - sqrt(numbers)
    require(
        steps > 200 * sqrt(numbers),
        f"noise of multiplier {sigma:.3g} leaves no room for {numbers:,} numbers: choose a larger epsilon, or a "
        "smaller model",
    )
    return 1 / steps


def shared(sums: Tensor, step: float, stream: Stream) -> Tensor:
    """Return sums in steps, int64, with a share of the noise."""
    noise = torch.from_numpy(discrete_gaussian(sums.numel(), stream)).view(sums.shape)
    return (sums.double() / step).round().long() + noise


def check_sums(sums: Mapping[str, NDArray[np.int64]], most: float, shares: int) -> None:
    """Refuse sums that honest institutions cannot have sent.

    Parameters
    ----------
    sums : mapping
        By name; whole numbers.
    most : float
        Their largest L2 norm without noise, in steps: all examples, each with a norm of one sensitivity.
    shares : int
        K, how many institutions have added noise.

    Raises
    ------
    DivergedError
        If their norm is larger. That of the noise is added, so large that honest shares exceed it less than once in
        e^1000 runs.
    """
    numbers = sum(array.size for array in sums.values())
    norm = sqrt(sum(float(np.square(array.astype(np.float64)).sum()) for array in sums.values()))
    if norm > most + sqrt(shares) * 2.0**BITS * (2 * sqrt(numbers) + 50):
        raise DivergedError(
            f"all institutions' sums can have a norm of {most:.3g} steps and their noise; it is {norm:.3g}, and masks "
            "hide whose: an institution has sent too large numbers; begin a new run without it"
        )


def beside(sent: StateDict, made: StateDict) -> StateDict:
    """Return an answer: what was made, beside the weights that were sent; zeros in their place beside shares."""
    if all(array.dtype == np.int64 for array in made.values()):
        sent = {name: np.zeros(array.shape, np.int64) for name, array in sent.items()}
    return {**sent, **made}
