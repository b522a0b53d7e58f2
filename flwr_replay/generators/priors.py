"""Priors from which codes are drawn, in place of codes of real images (Qu et al. 2022, footnote 1).

What every prior is: a density over the codes of an image, given its label. `prior=<name>` is found by its name: the
module `flwr_replay.generators.<name>` has a config dataclass, `<Name>Config`, and a function `code_prior`. A third one
is that module and `conf/prior/<name>.yaml`.

`B` batch, `n` images, `N` codes of an image, `U` numbers that a loss draws for an example.
"""

import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flwr_replay.config.sections import PriorConfig, require
from flwr_replay.generators.autoencoder import VQVAE2
from flwr_replay.generators.base import Grids
from flwr_replay.models.seeding import seeded

__all__ = ["CodePrior", "LabelBins", "build_prior", "check_cpu", "example_nats", "summed_nats"]

SCORED = 8  # draws over which an example's score is averaged


class CodePrior(nn.Module, ABC):
    """p(codes | label). No layer mixes examples, and Opacus supports all of them, so that DP-SGD applies.

    Parameters
    ----------
    grids : tuple of (int, int)
        Height and width of each level's codes, top first.
    classes : int
        Labels lie in [0, classes).
    draws : int
        U, uniform numbers in [0, 1) that the loss needs for an example. They are an argument, so that no loss depends
        on other examples, and come from a secret stream under DP: a public rng would tie an example's draws to its
        place in a secret batch.
    """

    def __init__(self, grids: Grids, classes: int, draws: int = 0) -> None:
        super().__init__()
        self.grids, self.classes, self.draws = grids, classes, draws

    @abstractmethod
    def loss(self, codes_BN: Tensor, labels_B: Tensor, draws_BU: Tensor) -> Tensor:
        """Return the mean loss of a code, nats: over codes of an image, then over images."""

    @abstractmethod
    def sample(self, labels_B: Tensor, rng: torch.Generator) -> Tensor:
        """Sample codes (B, N) int64 for labels (B,), with a CPU rng, on the labels' device."""

    def uniform(self, examples: int, rng: torch.Generator) -> Tensor:
        """Return the numbers that a loss needs, (examples, U) float32, on the CPU."""
        return torch.rand(examples, self.draws, generator=rng)


def build_prior(config: PriorConfig, generator: VQVAE2, classes: int, seed: int) -> CodePrior:
    """Build a prior over a generator's codes; labels lie in [0, classes), a regression's by `LabelBins`.

    The generator has two levels, and its bottom grid twice the top's height and width. The prior is on the CPU, in
    training mode. Its fresh weights depend on the seed alone; PyTorch's global rng is left as it was.
    """
    module = importlib.import_module(f"flwr_replay.generators.{config.name}")
    with seeded(seed), torch.device("cpu"):
        prior: CodePrior = module.code_prior(config, generator, classes)
    return prior


def check_cpu(config: PriorConfig, size: int, device: torch.device) -> None:
    """Refuse to train a prior over large images on a CPU, by `ConfigError`.

    The time that it states was measured at 256 pixels with a small codebook, and grows with the pixels.
    """
    training, drawing = config.cpu_seconds
    hours = (training * config.epochs + drawing) * (size / 256) ** 2 * 1000 / 3600
    require(
        device.type != "cpu" or size <= config.cpu_size,
        f"on a CPU a prior is trained on images of at most prior.cpu-size={config.cpu_size} pixels; got "
        f"task.size={size}, where prior={config.name} takes a core about {hours:.1f} hours or more to learn and draw "
        f"1,000 images: use a GPU or a smaller size, or set prior.cpu-size={size} to wait",
    )


@dataclass(frozen=True)
class LabelBins:
    """Equal intervals of a continuous label, used as its classes.

    The interval is given, not computed from the labels: their range would reveal something of them. Labels outside
    belong to the outermost bins.

    >>> bins = LabelBins(low=-3.0, high=3.0, bins=6)
    >>> bins.classes(torch.tensor([-9.0, -0.5, 0.5, 3.0]))
    tensor([0, 2, 3, 5])
    >>> bins.centres(torch.tensor([0, 2, 5]))
    tensor([-2.5000, -0.5000,  2.5000])
    """

    low: float
    high: float
    bins: int

    def classes(self, labels_B: Tensor) -> Tensor:
        """Return each label's bin, int64."""
        place = (labels_B - self.low) * (self.bins / (self.high - self.low))
        return place.floor().long().clamp(0, self.bins - 1)

    def centres(self, classes_B: Tensor) -> Tensor:
        """Return the middle of each bin, float32: the label of codes sampled for it."""
        return self.low + (classes_B.float() + 0.5) * ((self.high - self.low) / self.bins)


def summed_nats(prior: CodePrior, e_B: Tensor, y_B: Tensor, draws_BU: Tensor) -> Tensor:
    """Return the sum of the examples' losses, nats."""
    return prior.loss(e_B, y_B, draws_BU) * len(y_B)


def example_nats(prior: CodePrior, codes_nN: Tensor, labels_n: Tensor) -> Tensor:
    """Return every example's loss, nats, (n,). All have the same draws, so that scores differ by examples alone."""
    draws = prior.uniform(SCORED if prior.draws else 1, torch.Generator().manual_seed(0)).to(codes_nN.device)
    rows = zip(codes_nN, labels_n, strict=True)
    return torch.stack([prior.loss(e.expand(len(draws), -1), y.expand(len(draws)), draws) for e, y in rows])
