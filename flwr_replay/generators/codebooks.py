"""Codebooks: the vectors that an encoder's output is rounded to (van den Oord et al. 2017, arXiv 1711.00937).

Both kinds map features to vectors and codes, with a straight-through gradient: the loss's gradient at the vectors is
taken as its gradient at the features.

`B` batch, `D` length of a vector, `H` height, `W` width of a grid of codes, `K` codes of the book.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["EMACodebook", "GradientCodebook", "perplexity"]

DEAD = 0.1  # of an even share of the vectors: a code that is used less is replaced
FRESH = 0.1  # standard deviation of a gradient codebook's fresh numbers: about that of a fresh encoder's features


def perplexity(codes: Tensor, codebook_size: int) -> Tensor:
    """Return exp(entropy) of how often each code is used: 1 for a single code, `codebook_size` for an even use.

    >>> perplexity(torch.tensor([0, 1, 2, 2, 1, 0]), 128).round()
    tensor(3.)
    """
    share = torch.bincount(codes.flatten(), minlength=codebook_size) / codes.numel()
    nats: Tensor = torch.special.entr(share).sum()
    return nats.exp()


class EMACodebook(nn.Module):
    """Vectors that are running means of the features rounded to them, by vector-quantize-pytorch.

    They mix the examples of a batch and have no gradients of single examples, so DP-SGD does not cover them. A code
    whose running count falls below a tenth of an even share is replaced by a feature drawn from the batch, and begins
    with an even share. These draws come from PyTorch's global rng: in training, call within `seeded`.

    `size` is K, `dim` is D. `decay` is the share of the running sums and counts that a step keeps, and `even_share` the
    vectors of a batch divided by K.
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
            commitment_weight=0.0,  # flwr_replay.generators.autoencoder adds that loss for both kinds of codebook
            rotation_trick=False,  # the library's default, in place of the straight-through gradient
        )
        # The library would begin with the threshold itself, so a rare code would be replaced at every step.
        self.quantiser._codebook.reset_cluster_size = even_share
        self.quantiser._codebook.cluster_size.zero_()  # fresh vectors are dead: the first batch replaces them

    def forward(self, h_BDHW: Tensor, learn: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Round features; with `learn`, in training mode, also move the vectors towards them.

        Returns
        -------
        vectors : Tensor
            (B, D, H, W), with straight-through gradients in training mode.
        codes : Tensor
            (B, H, W), int64.
        loss : Tensor
            The codebook's own: 0 here.
        """
        vectors, codes, _ = self.quantiser(h_BDHW, freeze_codebook=not learn)
        return vectors, codes, h_BDHW.new_zeros(())

    def lookup(self, codes_BHW: Tensor) -> Tensor:
        """Return the vectors (B, D, H, W) of codes."""
        vectors: Tensor = self.quantiser.get_codes_from_indices(codes_BHW)
        return vectors


class GradientCodebook(nn.Module):
    """Vectors learned by the loss ‖sg[features] − vectors‖², without statistics of a batch and without buffers.

    They are a `torch.nn.Embedding`, for which Opacus has per-example gradients. It has none for the learnable codebook
    of vector-quantize-pytorch, which gives the same codes and gradients. `size` is K, `dim` is D.
    """

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(size, dim)
        nn.init.normal_(
            self.vectors.weight, std=FRESH
        )  # with a larger one, all features round to the few shortest vectors

    def forward(self, h_BDHW: Tensor, learn: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Round features, as `EMACodebook.forward` does; here only the loss moves the vectors."""
        codes = torch.cdist(h_BDHW.detach().movedim(1, -1).flatten(1, 2), self.vectors.weight.detach()).argmin(-1)
        codes = codes.reshape(-1, *h_BDHW.shape[2:])
        vectors = self.lookup(codes)
        return h_BDHW + (vectors - h_BDHW).detach(), codes, F.mse_loss(vectors, h_BDHW.detach())

    def lookup(self, codes_BHW: Tensor) -> Tensor:
        """Return the vectors (B, D, H, W) of codes; contiguous, as Opacus needs the input of a convolution."""
        vectors: Tensor = self.vectors(codes_BHW).movedim(-1, 1)
        return vectors.contiguous()
