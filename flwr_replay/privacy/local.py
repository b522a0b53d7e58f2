"""Local differential privacy of latents and labels: every example gets noise of its own before it leaves.

Two data sets are neighbours here if one *example is replaced* by another, with its label. Their number stays. So no
trust in a server is needed, and an example's epsilon does not depend on who else is there. Latents: each row is clipped
to an L2 norm of C, a public constant, and gets Gaussian noise. Two rows differ by 2C at most. Labels: K-ary randomised
response (Kairouz, Bonawitz and Ramage 2016, arXiv 1602.07387), once for each example, on all of its views.

All this is for a *given* encoder. What its weights tell of the examples that it was trained on is not covered.
"""

from dataclasses import dataclass
from math import exp, floor, log2, sqrt

import torch
from torch import Tensor

from flwr_replay.privacy.accounting import LocalRelease
from flwr_replay.privacy.gaussian import gaussian_noise
from flwr_replay.privacy.secret import Stream

__all__ = ["LATENTS", "LocalDP", "clipped", "keep_probability", "randomised"]

LATENTS = "latents"  # the mechanism: latents and labels of one upload
ROUNDING = 1 + 1e-12  # float64 must not carry a clipped norm above C
GOOD = 10  # the largest epsilon of which the sentence says nothing more
WEAK = "An epsilon this large promises an example next to nothing: what can be read from it is for attacks to show. "
FINE = 20  # binary digits of the noise's standard deviation that are released


@dataclass(frozen=True)
class LocalDP:
    """What a run releases of each example, and with which noise.

    Attributes
    ----------
    clip : float
        C, the largest L2 norm of one row of latents.
    latent_epsilon, label_epsilon : float
        Of one example's latents, all views together, and of its label; they add up.
    views : int
        V, rows of latents for each example.
    classes : int
        K.
    encoder_trained : bool
        Whether an institution trains the encoder, which is done without noise.
    """

    clip: float
    latent_epsilon: float
    label_epsilon: float
    views: int
    classes: int
    encoder_trained: bool

    def cost(self, delta: float) -> LocalRelease:
        """Return what the upload costs one example: V rows, each with √V times the noise that one row would need."""
        sigma = gaussian_noise(self.latent_epsilon, delta) * sqrt(self.views)
        return LocalRelease(1.0, sigma, self.views, self.label_epsilon)

    def noisy(self, latents: Tensor, sigma: float, stream: Stream) -> Tensor:
        """Clip rows of latents, shape (B, ...), and add noise of standard deviation 2Cσ to every value.

        Returns
        -------
        Tensor
            Shape (B, ...), float32, on the CPU, in steps of about a millionth of the noise: where noise cancels a
            value, last bits would say which double the value was (Mironov 2012). Rounding it further is
            post-processing, with no epsilon of its own.
        """
        values, spread = clipped(latents, self.clip), 2 * self.clip * sigma
        step = 2.0 ** (floor(log2(spread)) - FINE)
        return ((values + stream.normal(values.shape) * spread) / step).round().mul(step).float()

    def sentence(self) -> str:
        """Return what the epsilon covers and what not."""
        total = self.latent_epsilon + self.label_epsilon
        encoder = "the encoder, which whoever is asked trains on its examples without noise and returns; "
        views = f", all {self.views} views together" if self.views > 1 else ""
        return (
            f"Each training example's latents (epsilon {self.latent_epsilon:g}{views}) and its label (epsilon "
            f"{self.label_epsilon:g}), together epsilon {total:g}, are locally differentially private, given the "
            "encoder as it was sent: for one "
            "example replaced by another in this run, not for one more or less. An example is one image, row or bag; a "
            "patient with several has as many times the epsilon, and every further run adds its own. Rounding to "
            "float16 or int8 adds no protection. "
            f"{WEAK * (total > GOOD)}These leave unprotected: "
            f"{encoder * self.encoder_trained}how many examples there are; that each row is a view of one example; "
            "losses and metrics. What leaves as a whole has no epsilon."
        )


def clipped(latents: Tensor, clip: float) -> Tensor:
    """Scale each row of shape (B, ...) to an L2 norm of at most `clip`; a row that is not finite becomes zeros.

    Returns
    -------
    Tensor
        Shape (B, ...), float64, on the CPU.
    """
    rows = latents.cpu().double().flatten(1)
    norms_B1 = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    scaled = rows * (clip / (norms_B1 * ROUNDING)).clamp(max=1)
    return torch.where(norms_B1.isfinite(), scaled, torch.zeros_like(scaled)).reshape(latents.shape)


def keep_probability(epsilon: float, classes: int) -> float:
    """Return with which probability a label stays: e^ε / (e^ε + K − 1)."""
    return 1 / (1 + (classes - 1) * exp(-epsilon))


def randomised(labels_N: Tensor, classes: int, epsilon: float, stream: Stream) -> Tensor:
    """Keep each label, or replace it by one of the others, all with the same probability.

    Parameters
    ----------
    labels_N : Tensor
        Classes 0 … K − 1, shape (N,). What lies outside counts as the nearest class.
    classes : int
        K, at least 2.
    epsilon : float
        Of one label; pure, without a delta.
    stream : Stream
        Draws two numbers for each label.
    """
    given = labels_N.cpu().long().clamp(0, classes - 1)
    stays = stream.uniform(len(given)) < keep_probability(epsilon, classes)
    others = (stream.uniform(len(given)) * (classes - 1)).long()
    others += others >= given
    return torch.where(stays, given, others)
