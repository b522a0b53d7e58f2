"""The judge: it has the originals, and says how much of them an attack found.

An attack never sees this module's data. A reconstruction is scored in three ways. PSNR and SSIM compare pixels.
`identified` asks what a patient would ask: is the nearest of *all* the institution's images the right one? A blurred
image of 10 dB may still point to one patient.

`N` all images of an institution, `n` reconstructions, `B` those of one message, `C` channels, `H` height, `W` width.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from flwr_replay.attacks.distances import distances, nearest
from flwr_replay.attacks.intervals import Estimate, share
from flwr_replay.errors import ConfigError
from flwr_replay.models.layers import as_input
from flwr_replay.rng import derived_rng
from flwr_replay.terminal import installing

__all__ = ["ImageScores", "Judge", "NearerScores", "assigned", "image_metrics", "psnr", "ssim"]

WINDOW = 11  # pixels; SSIM's Gaussian window (Wang et al. 2004, doi 10.1109/TIP.2003.819861)
EXCHANGES = 999  # of own and other images
FAR = 1e30  # in place of a distance that is not a number


@dataclass(frozen=True)
class Likeness:
    """How near reconstructions come to originals, pixel by pixel."""

    number: int  # reconstructions
    psnr: float  # dB, mean over the reconstructions; infinite if one of them is exact
    psnr_sd: float  # dB, standard deviation; 0 for one reconstruction
    ssim: float | None  # mean; none: smaller than its window


@dataclass(frozen=True)
class ImageScores(Likeness):
    """How near reconstructions come to their own originals."""

    identified: Estimate  # share of reconstructions whose nearest original is the right one
    chance: float  # what guessing identifies at most: B / N


@dataclass(frozen=True)
class NearerScores(Likeness):
    """How many reconstructions are nearer to an institution's images than to as many of other people's.

    Their likeness is that to the nearest of the institution's.
    """

    nearer: int  # how many
    own: int  # images of the institution that were compared, and as many of other people's
    by_chance: float  # mean of the same count with own and others exchanged at random
    by_chance_95: int  # no more than that in 95 % of the exchanges
    p: float  # share of exchanges, the real one among them, with at least as many


class Judge:
    """Scores reconstructions against the training images that an institution really has, uint8 or in [0, 1]."""

    def __init__(self, originals_NCHW: Tensor) -> None:
        self.originals_NCHW = as_input(originals_NCHW).cpu()

    def scores(self, reconstructions_nCHW: Tensor, rows_n: Tensor, batch: int = 1) -> ImageScores:
        """Score reconstructions of these rows.

        Parameters
        ----------
        reconstructions_nCHW : Tensor
            In [0, 1].
        rows_n : Tensor
            The originals that they claim to be, int64 in [0, N).
        batch : int
            B, the images behind one message. If it is more than 1, their order is unknown: each message's
            reconstructions are assigned to its originals, whatever the order of either.

        Returns
        -------
        ImageScores
            Originals that are not numbers give scores that are not numbers, and nothing identified.
        """
        found_nCHW, rows_n = as_input(reconstructions_nCHW).cpu(), rows_n.cpu()
        if batch > 1:
            batches = zip(torch.split(found_nCHW, batch), torch.split(rows_n, batch), strict=True)
            rows_n = torch.cat([rows[assigned(images, self.originals_NCHW[rows])] for images, rows in batches])
        # Hit where no original is nearer than its own; another copy of it may be as near.
        hits_n = nearest(distances(found_nCHW, self.originals_NCHW)).gather(1, rows_n[:, None])[:, 0]
        return ImageScores(
            **self._likeness(found_nCHW, rows_n),
            identified=share(int(hits_n.sum()), len(found_nCHW)),
            chance=min(1.0, batch / len(self.originals_NCHW)),
        )

    def control(
        self, reconstructions_nCHW: Tensor, rows_n: Tensor, batch: int = 1, seed: int = 0
    ) -> ImageScores | None:
        """Score other patients' reconstructions as those of these rows, which should identify none but by chance.

        Every message's reconstructions are claimed to be of images drawn from outside that message; the seed decides
        which. None if the institution has too few others.
        """
        rng, claimed = derived_rng(seed, "control"), []
        for rows in torch.split(rows_n.cpu(), batch):
            others = np.setdiff1d(np.arange(len(self.originals_NCHW)), rows.numpy())
            if len(others) < len(rows):
                return None
            claimed.append(torch.from_numpy(rng.choice(others, len(rows), replace=False)))
        return self.scores(reconstructions_nCHW, torch.cat(claimed), batch)

    def nearer(
        self, reconstructions_nCHW: Tensor, labels_N: Tensor, others_NCHW: Tensor, other_labels_N: Tensor, seed: int = 0
    ) -> NearerScores:
        """Count reconstructions that are nearer to one of the institution's images than to any of other people's.

        For reconstructions of which nobody knows whose they are. Where nothing was learned, an own image and another
        person's of the same label are exchangeable. So the same count is taken with own and others exchanged at random
        within each label, which holds for reconstructions that are alike, blurred or nothing but noise, too.

        Other people's images and labels are drawn by `equal_label_shares`: as many of each label. An image that is as
        near to both sides counts as nearer to none.
        """
        found_nCHW, own = as_input(reconstructions_nCHW).cpu(), self.originals_NCHW
        distances_nM = distances(found_nCHW, torch.cat([own, as_input(others_NCHW).cpu()]))
        nearest_nM = nearest(distances_nM).numpy()
        labels_M = torch.cat([labels_N, other_labels_N]).numpy()
        other_M, rng = np.arange(len(labels_M)) >= len(own), derived_rng(seed, "exchanged")
        counts = [_nearer_to_own(nearest_nM, other_M)]
        for _ in range(EXCHANGES):
            exchanged_M = np.empty_like(other_M)
            order = np.lexsort((rng.random(len(labels_M)), labels_M))  # random within each label, of which it is even
            exchanged_M[order] = np.arange(len(order)) % 2 == 1
            counts.append(_nearer_to_own(nearest_nM, exchanged_M))
        return NearerScores(
            **self._likeness(found_nCHW, distances_nM[:, : len(own)].argmin(1)),
            nearer=counts[0],
            own=len(own),
            by_chance=float(np.mean(counts[1:])),
            by_chance_95=int(np.quantile(counts, 0.95, method="higher")),
            p=float(np.mean(np.array(counts) >= counts[0])),
        )

    def mean_image(self, auxiliary_MCHW: Tensor, rows_n: Tensor) -> ImageScores:
        """Score the mean auxiliary image, which is of nobody, as the reconstruction of every row."""
        mean_CHW = as_input(auxiliary_MCHW).mean(0)
        return self.scores(mean_CHW.expand(len(rows_n), -1, -1, -1), rows_n)

    def nearest_auxiliary(self, auxiliary_MCHW: Tensor, rows_n: Tensor) -> ImageScores:
        """Score the auxiliary image that is nearest to each original: no attack that copies does better in PSNR."""
        auxiliary = as_input(auxiliary_MCHW).cpu()
        nearest_n = distances(self.originals_NCHW[rows_n.cpu()], auxiliary).argmin(1)
        return self.scores(auxiliary[nearest_n], rows_n)

    def _likeness(self, found_nCHW: Tensor, rows_n: Tensor) -> dict[str, Any]:
        """Return the fields of `Likeness`, of each image to its original."""
        right_nCHW = self.originals_NCHW[rows_n]
        decibels_n, likeness_n = psnr(found_nCHW, right_nCHW), ssim(found_nCHW, right_nCHW)
        return {
            "number": len(found_nCHW),
            "psnr": float(decibels_n.mean()),
            "psnr_sd": float(decibels_n.std()) if len(decibels_n) > 1 else 0.0,
            "ssim": None if likeness_n is None else float(likeness_n.mean()),
        }


def _nearer_to_own(nearest_nM: NDArray[np.bool_], other_M: NDArray[np.bool_]) -> int:
    """Count rows all of whose nearest images are the institution's own; a row without numbers has none."""
    return int((nearest_nM.any(1) & ~(nearest_nM & other_M).any(1)).sum())


def psnr(found_nCHW: Tensor, right_nCHW: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each image, dB, (n,): 10 log10(1 / mean squared error), for range 1."""
    ratios: Tensor = image_metrics().peak_signal_noise_ratio(
        found_nCHW, right_nCHW, data_range=1.0, reduction="none", dim=tuple(range(1, found_nCHW.ndim))
    )
    return ratios


def ssim(found_nCHW: Tensor, right_nCHW: Tensor) -> Tensor | None:
    """Return the structural similarity of each image, (n,), for range 1; None for images smaller than its window."""
    if min(found_nCHW.shape[2:]) < WINDOW:
        return None
    likeness: Tensor = image_metrics().structural_similarity_index_measure(
        found_nCHW, right_nCHW, data_range=1.0, reduction="none", kernel_size=WINDOW
    )
    return likeness.reshape(len(found_nCHW))


def assigned(found_BCHW: Tensor, right_BCHW: Tensor) -> Tensor:
    """Return for each reconstruction the original that it counts for, (B,): the least sum of squared distances.

    This is the Hungarian method's assignment (Kuhn 1955). Each original is taken at most once; there may be more of
    them than reconstructions.
    """
    squared_BB = distances(found_BCHW, right_BCHW).square().nan_to_num(nan=FAR, posinf=FAR)
    return torch.from_numpy(linear_sum_assignment(squared_BB.numpy())[1])


def image_metrics() -> ModuleType:
    """Import the library of PSNR and SSIM; raise `ConfigError` if it is missing."""
    try:
        from torchmetrics.functional import image  # takes a second to import
    except ModuleNotFoundError:
        raise ConfigError(f"PSNR and SSIM need torchmetrics: {installing('attacks')}") from None
    return image
