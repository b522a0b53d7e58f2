"""Features drawn from one Gaussian for each class, which stand in for those of patients.

    f of class c ~ N(μ_c, L Lᵀ), brought to ‖f‖ ≤ C        n_c of them in a pass

Means and covariance come from sums over all institutions (`flwr_replay.server.sums`). Under DP drawing costs nothing:
it is post-processing. Source: Beitollahi et al. 2024 (arXiv 2402.01862, FedPFT), with mixtures for each class.

`B` batch, `F` features, `C` classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from flwr_replay.config.sections import ReplayConfig, require
from flwr_replay.errors import WireError
from flwr_replay.generators.sampler import ReplaySampler
from flwr_replay.learning.training import torch_rng
from flwr_replay.models.frozen import Frozen
from flwr_replay.wire.records import StateDict

__all__ = ["Draws", "frozen_features"]

MOST = 10_000_000  # draws in a pass
BEYOND = 1 + 1e-3  # times C: the largest number of a mean or a factor, rounding included


def frozen_features(model: nn.Module) -> int:
    """Return F of a model whose frozen encoder makes a vector of an image, on which layers with weights follow.

    Raises
    ------
    ConfigError
        If nothing is frozen, or its output is no vector.
    """
    encoder = next(model.children(), None)
    require(
        isinstance(encoder, Frozen),
        "features are drawn for what lies above a frozen encoder, the same everywhere; all of this model trains: set "
        "model.train=head, or from:STAGE",
    )
    assert isinstance(encoder, Frozen)
    require(
        len(encoder.shape) == 1,
        f"features are drawn as vectors; at this cut an image has the shape {encoder.shape}: freeze more of the model, "
        "model.train=head",
    )
    return int(encoder.shape[0])


@dataclass(frozen=True)
class Draws(ReplaySampler):
    """Draws features, (B, F, 1, 1) as data sets hold them, and their classes."""

    means_CF: Tensor
    factor_FF: Tensor  # L, float32
    labels: Tensor  # of a pass, (n,), int64
    norm: float  # C
    rng: torch.Generator
    options: ReplayConfig

    @classmethod
    def of(cls, arrays: StateDict, norm: float, options: ReplayConfig, *purpose: object) -> Self:
        """Read what `flwr_replay.server.sums` has made, or a stranger sent; `purpose` seeds what is drawn.

        Raises
        ------
        WireError
            If shapes do not fit, numbers of draws are no counts, or others are larger than C.
        """
        means, factor, counts = (np.asarray(arrays.get(name, ())) for name in ("means", "factor", "counts"))
        F = means.shape[-1] if means.ndim == 2 else 0
        whole = counts.ndim == 1 and counts.dtype == np.int64 and counts.min(initial=0) >= 0
        small = all(np.abs(array).max(initial=0) <= norm * BEYOND for array in (means, factor))  # NaN is not
        if not (F and factor.shape == (F, F) and whole and len(counts) == len(means) and small) or not (
            0 < float(counts.sum(dtype=np.float64)) <= MOST
        ):
            raise WireError(
                f"draws have means (C, F) and a factor (F, F), of numbers up to {norm:g}, and counts (C,), 1 to "
                f"{MOST:,} in all; got shapes {means.shape}, {factor.shape} and {counts.shape}: refused"
            )
        means_CF, factor_FF = (torch.from_numpy(array.astype(np.float32)) for array in (means, factor))
        labels = torch.repeat_interleave(torch.arange(len(counts)), torch.from_numpy(counts.copy()))
        return cls(means_CF, factor_FF, labels, norm, torch_rng(*purpose, "draws"), options)

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Draw features of the classes of these rows, others every time."""
        labels_B = self.labels[rows]
        noise_BF = torch.randn(len(rows), len(self.factor_FF), generator=self.rng)
        f_BF = self.means_CF[labels_B] + noise_BF @ self.factor_FF.T
        f_BF *= (self.norm / torch.linalg.vector_norm(f_BF, dim=1, keepdim=True)).clamp(max=1)
        return f_BF[:, :, None, None], labels_B

    def epoch(self, size: int, shuffle: torch.Generator, share: slice = slice(None)) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield max(1, ⌊n/b⌋) batches of draws, one pass; of each batch the rows in `share`."""
        order = torch.randperm(len(self), generator=shuffle)
        for rows in torch.split(order, min(size, len(self)))[: max(1, len(self) // size)]:
            x_B, y_B = self.take(rows)
            yield x_B.flatten(1)[share], y_B[share]
