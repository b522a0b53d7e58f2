"""`prior=pixelcnn`: draws codes one by one, each from those before it.

Source: van den Oord et al. 2016 (arXiv 1606.05328), and for two levels Razavi et al. 2019, section 3.2.
Idea: a gated PixelCNN gives the probability of each top code, given the label and the codes above and left of it. A
second one does so for the bottom codes, given the top codes too. Codes are sampled one by one, and the generator's
decoder makes images of them.

Causality needs no masks: padding and cropping decide what a convolution sees. No layer mixes examples, and Opacus
supports all of them, so DP-SGD applies.

`B` batch, `W` width of a grid, `N` codes of an image, `F` features, `K` codes of the book.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_replay.config.sections import WIDTH, PriorConfig, within
from flwr_replay.generators.autoencoder import VQVAE2
from flwr_replay.generators.base import by_level
from flwr_replay.generators.priors import CodePrior

__all__ = ["PixelCNN", "PixelCNNConfig", "PixelCNNPrior", "code_prior"]


@dataclass(frozen=True, kw_only=True)
class PixelCNNConfig(PriorConfig):
    """The gated PixelCNN and its training."""

    cpu_seconds: ClassVar[tuple[float, float]] = (0.12, 4.0)  # benchmarks/priors.py

    width: int = 32  # channels of both stacks
    layers: int = 4  # gated layers

    def __post_init__(self) -> None:
        super().__post_init__()
        within("prior.", self, width=(1, WIDTH), layers=(1, 100))


class PixelCNNPrior(CodePrior):
    """p(codes | label) = p(top | label) · p(bottom | top, label); built by `build_prior`. A loss draws nothing."""

    def __init__(self, config: PixelCNNConfig, generator: VQVAE2, classes: int) -> None:
        super().__init__(generator.grids, classes)
        self.top = PixelCNN(generator.codebook_size, classes, config.width, config.layers)
        self.bottom = PixelCNN(generator.codebook_size, classes, config.width, config.layers, below=True)

    def loss(self, codes_BN: Tensor, labels_B: Tensor, draws_BU: Tensor) -> Tensor:
        """Return the mean negative log-likelihood of a code, nats: over an image's N codes, then over images."""
        top, bottom = by_level(codes_BN, self.grids)
        logits = self.top(top, labels_B), self.bottom(bottom, labels_B, top)
        nats = [
            F.cross_entropy(l_BKHW, codes, reduction="none")
            for l_BKHW, codes in zip(logits, (top, bottom), strict=True)
        ]
        return torch.cat([level.flatten(1) for level in nats], dim=1).mean()

    @torch.no_grad()
    def sample(self, labels_B: Tensor, rng: torch.Generator) -> Tensor:
        """Sample codes (B, N) int64 for labels (B,), with a CPU rng."""
        top = self.top.sample(self.grids[0], labels_B, rng)
        bottom = self.bottom.sample(self.grids[1], labels_B, rng, top)
        return torch.cat([top.flatten(1), bottom.flatten(1)], dim=1)


class PixelCNN(nn.Module):
    """Logits of every code of a grid, given the label, the codes before it in reading order, and a grid above.

    Both stacks have F features, `width`. Each of the gated layers lets a code see one row and one column more. With
    `below` there is a grid above, of half the height and width.
    """

    def __init__(self, codebook_size: int, classes: int, width: int, layers: int, below: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(codebook_size, width)
        self.embed_above = nn.Embedding(codebook_size, width) if below else None
        self.layers = nn.ModuleList(GatedLayer(width, classes, first=i == 0, below=below) for i in range(layers))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv2d(width, width, 1), nn.ReLU(), nn.Conv2d(width, codebook_size, 1))

    def forward(self, codes_BHW: Tensor, labels_B: Tensor, above_Bhw: Tensor | None = None) -> Tensor:
        """Return logits (B, K, H, W)."""
        rows = self._rows_before(codes_BHW)
        return self._logits(codes_BHW, rows, labels_B, self._above(above_Bhw))

    def sample(
        self, grid: tuple[int, int], labels_B: Tensor, rng: torch.Generator, above_Bhw: Tensor | None = None
    ) -> Tensor:
        """Sample the codes (B, H, W) of a grid; features of the rows above are computed once for each row."""
        height, width = grid
        codes = labels_B.new_zeros((len(labels_B), height, width))
        above = self._above(above_Bhw)
        for i in range(height):
            rows = [features[:, :, -1:] for features in self._rows_before(codes[:, : i + 1])]
            above_row = None if above is None else above[:, :, i : i + 1]
            for j in range(width):
                logits = self._logits(codes[:, i : i + 1], rows, labels_B, above_row)[:, :, 0, j]
                sampled = torch.multinomial(logits.softmax(1).cpu(), 1, generator=rng)
                codes[:, i, j] = sampled[:, 0].to(codes.device)
        return codes

    def _above(self, above_Bhw: Tensor | None) -> Tensor | None:
        if self.embed_above is None:
            return None
        assert above_Bhw is not None, "the bottom codes' prior needs the top codes"
        return _features(self.embed_above, above_Bhw.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2))

    def _rows_before(self, codes_BHW: Tensor) -> list[Tensor]:
        """Return each layer's vertical features (B, 2F, H, W), which depend only on the rows before."""
        before, v = [], _features(self.embed, codes_BHW)
        for layer in self.layers:
            assert isinstance(layer, GatedLayer)
            before.append(layer.vertical(v))
            v = _gate(before[-1])
        return before

    def _logits(self, codes_BHW: Tensor, rows: list[Tensor], labels_B: Tensor, above: Tensor | None) -> Tensor:
        h = _features(self.embed, codes_BHW)
        for layer, row in zip(self.layers, rows, strict=True):
            h = layer(h, row, labels_B, above)
        logits: Tensor = self.head(h)
        return logits


class GatedLayer(nn.Module):
    """One layer of both stacks: vertical, for the rows above a code; horizontal, for the codes to its left.

    Only the first layer leaves out the code's own row in the vertical stack, and the code itself in the horizontal one.
    """

    def __init__(self, width: int, classes: int, first: bool, below: bool) -> None:
        super().__init__()
        self.first = first
        self.rows = nn.Conv2d(width, 2 * width, (2, 3))
        self.row = nn.Conv2d(width, 2 * width, (1, 2))
        self.rows_to_row = nn.Conv2d(2 * width, 2 * width, 1)
        self.label = nn.Embedding(classes, 2 * width)
        self.above = nn.Conv2d(width, 2 * width, 1) if below else None
        self.out = nn.Conv2d(width, width, 1)

    def vertical(self, v_BFHW: Tensor) -> Tensor:
        """Return features (B, 2F, H, W) of row i from rows up to i, or in the first layer up to i - 1."""
        before = (2, -1) if self.first else (1, 0)
        features: Tensor = self.rows(F.pad(v_BFHW, (1, 1, *before)))
        return features

    def forward(self, h_BFHW: Tensor, rows: Tensor, labels_B: Tensor, above: Tensor | None) -> Tensor:
        """Return features (B, F, H, W) of a code from the codes before it."""
        before = (2, -1) if self.first else (1, 0)
        gates = self.row(F.pad(h_BFHW, before)) + self.rows_to_row(rows) + self.label(labels_B)[:, :, None, None]
        if self.above is not None:
            gates = gates + self.above(above)
        changed: Tensor = self.out(_gate(gates))
        return changed if self.first else h_BFHW + changed


def _features(embed: nn.Module, codes_BHW: Tensor) -> Tensor:
    """Embed codes as (B, F, H, W), contiguous: else Opacus computes wrong per-example gradients of a Conv2d."""
    features: Tensor = embed(codes_BHW).movedim(-1, 1)
    return features.contiguous()


def _gate(gates: Tensor) -> Tensor:
    content, gate = gates.chunk(2, dim=1)
    return content.tanh() * gate.sigmoid()


code_prior = PixelCNNPrior  # builds it, as `build_prior` asks for
