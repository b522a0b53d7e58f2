"""`prior=maskgit`: a transformer that sees the whole grid and draws many codes at a time.

Source: Chang et al. 2022 (MaskGIT, arXiv 2202.04200), section 3, over the two levels of a VQ-VAE-2.
Idea: the network guesses masked codes from those that are not masked. Every top code is a position, which carries the
four bottom codes beneath it too. So 256 pixels are 1,024 positions, for 5,120 codes.

    learning   half of the examples: bottom codes all masked, top codes partly; the others: top codes known, bottom
               codes partly. The masked share of a level is cos(pi u / 2), u uniform in [0, 1).
               loss = mean cross entropy of the level's masked codes
    drawing    top codes in T steps, then bottom codes in T steps. After step t a share cos(pi t / 2T) is still masked.
               Of the codes drawn in a step those stay of which the network is surest, by
               log p + temperature (1 - t / T) g, with Gumbel noise g.

Deviations: two levels in one network, with a label. The mask is an input like any code. Neither dropout nor label
smoothing. A loss is no likelihood: a code is guessed from any others, not from those before it.

Its layers are PyTorch's own. `nn.MultiheadAttention` lacks gradients of single examples, and Opacus's attention keeps
the square of the positions. The blocks of x-transformers 2.31 pass Opacus's checks, but have no types, and would be a
dependency in place of twenty lines.

`B` batch, `N` codes of an image, `P` positions, `K` codes of a book, `F` features, `U` numbers that a loss draws.
"""

from dataclasses import dataclass
from math import cos, pi
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_replay.config.sections import NOT_NEGATIVE_FINITE, WIDTH, PriorConfig, require, within
from flwr_replay.generators.autoencoder import VQVAE2
from flwr_replay.generators.base import by_level
from flwr_replay.generators.priors import CodePrior

__all__ = ["MaskGIT", "MaskGITConfig", "code_prior"]

SLOTS = 5  # codes of a position: the top code, and four bottom codes row by row
LOGITS = 2**24  # numbers drawn from at once: 64 MB


@dataclass(frozen=True, kw_only=True)
class MaskGITConfig(PriorConfig):
    """MaskGIT, its training, and how it draws."""

    cpu_seconds: ClassVar[tuple[float, float]] = (0.2, 1.4)  # benchmarks/priors.py

    lr: float = 2e-3  # of Adam
    epochs: int = 48  # at each institution; it learns from a share of the codes, so it needs more than a PixelCNN
    width: int = 64  # features of a position
    layers: int = 4  # blocks of attention
    heads: int = 4  # of attention
    steps: int = 12  # in which a level's codes are drawn
    temperature: float = 4.5  # of the noise on the order in which codes are drawn; 0: the surest first

    def __post_init__(self) -> None:
        super().__post_init__()
        within("prior.", self, width=(1, WIDTH), layers=(1, 100), heads=(1, WIDTH), steps=(1, 10_000))
        within("prior.", self, temperature=NOT_NEGATIVE_FINITE)
        require(
            self.width % self.heads == 0,
            f"prior.width must be a multiple of prior.heads; got {self.width} and {self.heads}",
        )


class MaskGIT(CodePrior):
    """p(masked codes | other codes, label); built by `build_prior`."""

    def __init__(self, config: MaskGITConfig, generator: VQVAE2, classes: int) -> None:
        (height, width), (low_height, low_width) = grids = generator.grids
        assert (low_height, low_width) == (2 * height, 2 * width), "the bottom grid has twice the top's sides"
        super().__init__(grids, classes, draws=2 + generator.codes_per_image)
        self.codebook_size, self.steps, self.temperature = generator.codebook_size, config.steps, config.temperature
        self.codes = nn.Embedding(SLOTS * (self.codebook_size + 1), config.width)  # of each slot, with a mask
        self.rows, self.columns = nn.Embedding(height, config.width), nn.Embedding(width, config.width)
        self.label = nn.Embedding(classes, config.width)
        self.blocks = nn.ModuleList(AttentionBlock(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.top, self.bottom = (nn.Linear(config.width, codes * self.codebook_size) for codes in (1, SLOTS - 1))
        for table in (self.codes, self.rows, self.columns, self.label):
            nn.init.normal_(table.weight, std=0.02)

    def loss(self, codes_BN: Tensor, labels_B: Tensor, draws_BU: Tensor) -> Tensor:
        """Return the mean cross entropy of a masked code, nats: over an image's masked codes, then over images."""
        tokens_BPS, slots_S = self._joined(codes_BN), torch.arange(SLOTS, device=codes_BN.device)
        positions, below_B = tokens_BPS.shape[1], draws_BU[:, 0] < 0.5
        learned_BS = (slots_S > 0) == below_B[:, None]
        codes_B = positions * learned_BS.sum(1)
        masked_B = (codes_B * (draws_BU[:, 1] * (pi / 2)).cos()).ceil().clamp(min=1)
        order_BPS = draws_BU[:, 2:].view_as(tokens_BPS).masked_fill(~learned_BS[:, None], 2)
        rank_BPS = order_BPS.flatten(1).argsort(1).argsort(1).view_as(tokens_BPS)
        masked_BPS = rank_BPS < masked_B[:, None, None]
        hidden_BPS = masked_BPS | (slots_S > 0) & ~below_B[:, None, None]
        features_BPF = self._features(tokens_BPS.masked_fill(hidden_BPS, self.codebook_size), labels_B)
        logits = torch.cat([self._logits(features_BPF, level) for level in (0, 1)], dim=2)
        nats_BPS = F.cross_entropy(logits.movedim(-1, 1), tokens_BPS, reduction="none")
        return ((nats_BPS * masked_BPS).sum((1, 2)) / masked_B).mean()

    @torch.no_grad()
    def sample(self, labels_B: Tensor, rng: torch.Generator) -> Tensor:
        """Sample codes (B, N) int64 for labels (B,), with a CPU rng; so many images at once that memory is bounded."""
        height, width = self.grids[0]
        at_once = max(1, LOGITS // ((SLOTS - 1) * height * width * self.codebook_size))
        return torch.cat([self._drawn(labels, rng) for labels in torch.split(labels_B, at_once)])

    def _drawn(self, labels_B: Tensor, rng: torch.Generator) -> Tensor:
        height, width = self.grids[0]
        tokens_BPS = labels_B.new_full((len(labels_B), height * width, SLOTS), self.codebook_size)
        for level, slots in enumerate((slice(0, 1), slice(1, SLOTS))):
            grid_BPs = tokens_BPS[..., slots]
            left = codes = grid_BPs[0].numel()
            for step in range(1, self.steps + 1):
                before, left = left, int(codes * cos(pi / 2 * step / self.steps))  # none at last
                if left == before:
                    continue
                odds_BPsK = self._logits(self._features(tokens_BPS, labels_B), level).softmax(-1)
                found_BPs, surely_BPs = self._guesses(odds_BPsK, 1 - step / self.steps, rng)
                hidden_BPs = grid_BPs == self.codebook_size
                surely_BPs = surely_BPs.masked_fill(~hidden_BPs, torch.inf)  # what is drawn stays
                kept = surely_BPs.flatten(1).topk(codes - left, dim=1).indices
                stays_BPs = torch.zeros_like(hidden_BPs).flatten(1).scatter(1, kept, True).view_as(hidden_BPs)
                grid_BPs.copy_(torch.where(hidden_BPs & stays_BPs, found_BPs, grid_BPs))
        return self._apart(tokens_BPS)

    def _guesses(self, odds: Tensor, heat: float, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw a code by each row of odds (..., K); return it, and how sure it is, with noise."""
        shape = odds.shape[:-1]
        place, noise = (torch.rand(shape, generator=rng).to(odds.device) for _ in range(2))
        codes = (odds.cumsum(-1) < place[..., None]).sum(-1).clamp(max=self.codebook_size - 1)
        gumbel = -(-noise.clamp(min=1e-20).log()).clamp(min=1e-20).log()
        surely = odds.gather(-1, codes[..., None])[..., 0].clamp(min=1e-20).log()
        return codes, surely + self.temperature * heat * gumbel

    def _features(self, tokens_BPS: Tensor, labels_B: Tensor) -> Tensor:
        """Return features (B, P, F) of all positions, from codes and masks of all."""
        width, device = self.grids[0][1], tokens_BPS.device
        slots_S = torch.arange(SLOTS, device=device) * (self.codebook_size + 1)
        places_BP = torch.arange(tokens_BPS.shape[1], device=device).expand(len(tokens_BPS), -1)
        x = self.codes(tokens_BPS + slots_S).sum(2)
        x = x + self.rows(places_BP // width) + self.columns(places_BP % width) + self.label(labels_B)[:, None]
        for block in self.blocks:
            x = block(x)
        features: Tensor = self.norm(x)
        return features

    def _logits(self, features_BPF: Tensor, level: int) -> Tensor:
        """Return logits (B, P, 1 or 4, K) of a level's codes."""
        logits: Tensor = (self.top, self.bottom)[level](features_BPF)
        return logits.view(*logits.shape[:2], -1, self.codebook_size)

    def _joined(self, codes_BN: Tensor) -> Tensor:
        """Return the codes of every position, (B, P, 5)."""
        top_BHW, bottom_BHW = by_level(codes_BN, self.grids)
        below_B4HW = F.pixel_unshuffle(bottom_BHW[:, None], 2)
        return torch.cat([top_BHW[:, None], below_B4HW], dim=1).flatten(2).movedim(1, 2)

    def _apart(self, tokens_BPS: Tensor) -> Tensor:
        """Return the codes (B, N) of positions: the inverse of `_joined`."""
        grid_BSHW = tokens_BPS.movedim(2, 1).reshape(-1, SLOTS, *self.grids[0])
        return torch.cat([grid_BSHW[:, 0].flatten(1), F.pixel_shuffle(grid_BSHW[:, 1:], 2).flatten(1)], dim=1)


class AttentionBlock(nn.Module):
    """Attention of every position to all, then two layers of each; both behind a norm, and added."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.asks, self.mixes = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widens, self.narrows = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BPF: Tensor) -> Tensor:
        """Map features (B, P, F) to the same shape; attention needs memory for P, not for its square."""
        asked = self.asks(self.before(x_BPF)).view(*x_BPF.shape[:2], 3, self.heads, -1).movedim((2, 3), (0, 2))
        seen = F.scaled_dot_product_attention(*asked).movedim(1, 2).flatten(2)
        x_BPF = x_BPF + self.mixes(seen)
        changed: Tensor = x_BPF + self.narrows(F.gelu(self.widens(self.between(x_BPF))))
        return changed


code_prior = MaskGIT  # builds it, as `build_prior` asks for
