"""Codebooks: the vectors that an encoder's output is rounded to (van den Oord et al. 2017, arXiv 1711.00937).

Both kinds map features to vectors and codes, straight through: where the codes stay as they are, the loss's gradient
at the features is its gradient at the vectors.

`B` batch, `D` numbers of a vector, `H` height, `W` width of a grid of codes, `K` codes of the book.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["EMACodebook", "GradientCodebook", "perplexity"]

DEAD = 0.1  # of an even share of the vectors: a code that is used less is revived
FRESH = 0.1  # standard deviation of a gradient codebook's fresh numbers: about that of a fresh encoder's features


def perplexity(codes: Tensor, codebook_size: int) -> Tensor:
    """Return exp(entropy) of how often each code is used: 1 where one code is, `codebook_size` where all are alike.

    >>> perplexity(torch.tensor([0, 1, 2, 2, 1, 0]), 128).round()
    tensor(3.)
    """
    share = torch.bincount(codes.flatten(), minlength=codebook_size) / codes.numel()
    nats: Tensor = torch.special.entr(share).sum()
    return nats.exp()


class EMACodebook(nn.Module):
    """Vectors that are running means of the features rounded to them, by vector-quantize-pytorch.

    They mix the examples of a batch, so per-example gradients, and with them DP-SGD, say nothing about them. A code
    whose running count falls below a tenth of an even share becomes a feature drawn from the batch, and begins with
    an even share. These draws come from PyTorch's global generator: call in training within `seeded`.

    Parameters
    ----------
    size : int
        K.
    dim : int
        D.
    decay : float
        What a step leaves of the running sums and counts.
    even_share : float
        Vectors of a batch divided by K.
    """

    def __init__(self, size: int, dim: int, decay: float, even_share: float) -> None:
        super().__init__()
        from vector_quantize_pytorch import VectorQuantize  # takes seconds

        self.quantiser = VectorQuantize(
            dim,
            size,
            decay=decay,
            threshold_ema_dead_code=DEAD * even_share,
            accept_image_fmap=True,
            commitment_weight=0.0,  # flwr_replay.generators.vqvae2 adds that loss for both kinds of codebook
            rotation_trick=False,  # the library's default, in place of the straight-through gradient
        )
        # The library revives with the threshold itself, so that a code used rarely would die anew at every step.
        self.quantiser._codebook.reset_cluster_size = even_share
        self.quantiser._codebook.cluster_size.zero_()  # fresh vectors are dead: the first batch replaces them

    def forward(self, h_BDHW: Tensor, learn: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Round features.

        Parameters
        ----------
        h_BDHW : Tensor
            Features.
        learn : bool
            In training mode, move the vectors towards these features too.

        Returns
        -------
        vectors : Tensor
            (B, D, H, W), with straight-through gradients in training mode.
        codes : Tensor
            (B, H, W), int64.
        loss : Tensor
            The codebook's own: nothing here.
        """
        vectors, codes, _ = self.quantiser(h_BDHW, freeze_codebook=not learn)
        return vectors, codes, h_BDHW.new_zeros(())

    def lookup(self, codes_BHW: Tensor) -> Tensor:
        """Return the vectors (B, D, H, W) of codes."""
        vectors: Tensor = self.quantiser.get_codes_from_indices(codes_BHW)
        return vectors


class GradientCodebook(nn.Module):
    """Vectors that the loss ‖sg[features] − vectors‖² moves: no statistics of a batch, no buffers.

    An `torch.nn.Embedding`, for which Opacus has per-example gradients; it has none for vector-quantize-pytorch's
    learnable codebook, whose codes and gradients these are.

    Parameters
    ----------
    size : int
        K.
    dim : int
        D.
    """

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(size, dim)
        nn.init.normal_(self.vectors.weight, std=FRESH)  # among wider ones, all features round to the shortest few

    def forward(self, h_BDHW: Tensor, learn: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Round features; arguments and results as of `EMACodebook.forward`, where only the loss teaches."""
        codes = torch.cdist(h_BDHW.detach().movedim(1, -1).flatten(1, 2), self.vectors.weight.detach()).argmin(-1)
        codes = codes.reshape(-1, *h_BDHW.shape[2:])
        vectors = self.lookup(codes)
        return h_BDHW + (vectors - h_BDHW).detach(), codes, F.mse_loss(vectors, h_BDHW.detach())

    def lookup(self, codes_BHW: Tensor) -> Tensor:
        """Return the vectors (B, D, H, W) of codes; contiguous, as Opacus needs the input of a convolution."""
        vectors: Tensor = self.vectors(codes_BHW).movedim(-1, 1)
        return vectors.contiguous()
