"""A linear classifier of fixed features: energies of oriented filters, averaged over a grid.

Features that no data have shaped, with a linear layer on them, learn more under differential privacy than networks that
learn their own (Tramèr and Boneh 2021, arXiv 2011.11660, with a scattering network). There are few parameters, so there
is little noise. Here the features are those of its first layer in spirit: Gabor filters of one scale, eight
orientations and two phases. The energy of both phases is averaged over a grid of at most 7 x 7 places.

Legend: B batch, C channels, H height, W width, O orientations, F features.
"""

import math
from collections import OrderedDict

import torch
from torch import Tensor
from torch.nn import functional

from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import TaskConfig, require
from flwr_replay.models.layers import Centred, centred, classifier, stage
from flwr_replay.models.staged import StagedModel

__all__ = ["gabor"]

ORIENTATIONS, SIDE = 8, 7  # filters of SIDE x SIDE pixels
WAVE, WIDTH = 4.0, 2.0  # wavelength, and standard deviation of the Gaussian, pixels
GRID = 7  # places along each side, at most
AT_ONCE = 64  # images: filtered a thousand at a time, they take six times as long


class Energies(Centred):
    """Energies of Gabor filters and means of the channels on a grid; an image's features are centred, of one norm.

    Nothing in it is learned or depends on data, and no image's features depend on another's.
    """

    filters_O1HW: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("filters_O1HW", filters(), persistent=False)  # it never changes, so it does not travel

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return (B, F) with F = (8 + C) x places."""
        if torch.compiler.is_exporting():  # batches would bound the number of images
            return self.features(x_BCHW)
        return torch.cat([self.features(x) for x in torch.split(x_BCHW, AT_ONCE)])

    def features(self, x_BCHW: Tensor) -> Tensor:
        """Return the features of a few images."""
        batch, channels, height, width = x_BCHW.shape
        answers = functional.conv2d(x_BCHW.reshape(-1, 1, height, width), self.filters_O1HW, padding=SIDE // 2)
        squares = answers.square().view(batch, channels, ORIENTATIONS, 2, height, width).sum((1, 3))
        places = min(GRID, height), min(GRID, width)
        energies = functional.adaptive_avg_pool2d(squares.clamp_min(1e-12).sqrt(), places)
        means = functional.adaptive_avg_pool2d(x_BCHW, places)
        return centred(torch.cat([energies, means], 1).flatten(1))


def filters() -> Tensor:
    """Return the filters, (16, 1, 7, 7): of every orientation a cosine and a sine, without mean, of norm 1."""
    place = torch.arange(SIDE, dtype=torch.float64) - SIDE // 2
    y, x = torch.meshgrid(place, place, indexing="ij")
    window = torch.exp(-(x.square() + y.square()) / (2 * WIDTH**2))
    waves = []
    for orientation in range(ORIENTATIONS):
        angle = math.pi * orientation / ORIENTATIONS
        along = 2 * math.pi / WAVE * (x * math.cos(angle) + y * math.sin(angle))
        for phase in (0.0, math.pi / 2):
            wave = window * torch.cos(along + phase)
            wave = wave - wave.mean()
            waves.append(wave / wave.norm())
    return torch.stack(waves).unsqueeze(1).float()


def gabor(model: ModelConfig, task: TaskConfig) -> StagedModel:
    """Build the classifier; a linear one begins with weights of zero, whatever the seed."""
    require(
        task.size > 1 and task.format != "bags",
        f"model=gabor sees edges in images; task={task.name} has none: choose model=mlp or deepset",
    )
    features = (ORIENTATIONS + task.channels) * min(GRID, task.size) ** 2
    layers = classifier(features, model, task.classes)
    return StagedModel(OrderedDict(energies=stage(features=Energies()), **layers))
