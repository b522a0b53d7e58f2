"""DeepSet: a classifier of bags that ignores the order of their vectors (Zaheer et al. 2017, arXiv 1703.06114).

Kalra et al. 2023 (ProxyFL), appendix A.3: a layer of 512 (private model) or 256 units (proxy) on each vector, the mean
over vectors, layers of 128 and 64 units, and one unit for each class.

Legend: B bags, F features, H x W places, D units on each vector.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from flwr_replay.config.sections import ModelConfig, TaskConfig
from flwr_replay.models.layers import stage
from flwr_replay.models.staged import StagedModel

__all__ = ["deepset"]


class Elements(nn.Module):
    """A layer with ReLU on each vector of a bag, and its mean over the bag's vectors."""

    def __init__(self, features: int, units: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(features, units, 1)

    def forward(self, x_BFHW: Tensor) -> Tensor:
        """Return (B, D); a place whose features are all zero is empty."""
        there_BHW = (x_BFHW != 0).any(1)
        units_BDHW = torch.relu(self.fc(x_BFHW)) * there_BHW.unsqueeze(1)
        counts_B1 = there_BHW.sum((1, 2)).clamp(min=1).unsqueeze(1)
        means_BD: Tensor = units_BDHW.sum((2, 3)) / counts_B1
        return means_BD


def deepset(model: ModelConfig, task: TaskConfig) -> StagedModel:
    """Build a DeepSet with `model.width` units on each vector."""
    return StagedModel(
        OrderedDict(
            elements=stage(mean=Elements(task.channels, model.width)),
            hidden1=stage(fc=nn.Linear(model.width, 128), relu=nn.ReLU()),
            hidden2=stage(fc=nn.Linear(128, 64), relu=nn.ReLU()),
            head=stage(fc=nn.Linear(64, task.classes)),
        )
    )
