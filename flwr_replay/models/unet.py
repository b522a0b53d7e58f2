"""U-Net as named stages (Ronneberger et al. 2015, arXiv 1505.04597), with norm layers as Qu et al. 2022, section 4.3.

At the cut `enc1` only one tensor is sent: the block's output, which is also its skip connection. The rest of the
network pools it for the next level.

`B` batch, `C` channels, `H` height, `W` width.
"""

import itertools
from collections import OrderedDict

import torch
from torch import nn

from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import TaskConfig, require
from flwr_replay.models.layers import norm_layer, stage
from flwr_replay.models.staged import StagedModel

__all__ = ["unet"]

LEVELS = 4  # encoding blocks, each followed by a pooling that halves the image; below them the bottleneck


def unet(model: ModelConfig, task: TaskConfig) -> StagedModel:
    """Build a U-Net from PyTorch's global generator, as `flwr_replay.models.build` does for a seed.

    `model.width` is the number of channels of the first level. Every further level doubles it: 32 gives the paper's 512
    in the bottleneck. The size is a multiple of 16, since four poolings halve it.

    Stages are enc1 (the first encoding block), rest (all other blocks), head (1x1 convolution to one logit per pixel).
    """
    multiple = 2**LEVELS
    require(
        task.size % multiple == 0,
        f"model unet halves images {LEVELS} times; got task.size {task.size}: choose a multiple of {multiple}",
    )
    return StagedModel(
        OrderedDict(
            enc1=_block(task.channels, model.width, model.norm),
            rest=Rest(model.width, model.norm),
            head=stage(conv=nn.Conv2d(model.width, 1, 1)),
        )
    )


def _block(inputs: int, outputs: int, norm: str) -> nn.Sequential:
    """Return two 3x3 convolutions, each with norm and ReLU."""
    return stage(
        conv1=nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        norm1=norm_layer(norm, outputs),
        relu1=nn.ReLU(),
        conv2=nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        norm2=norm_layer(norm, outputs),
        relu2=nn.ReLU(),
    )


class Rest(nn.Module):
    """All blocks but the first: (B, width, H, W) to (B, width, H, W)."""

    def __init__(self, width: int, norm: str) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(LEVELS + 1)]  # the last is the bottleneck's
        pairs = list(itertools.pairwise(widths))
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(_block(inputs, outputs, norm) for inputs, outputs in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(outputs, inputs, 2, stride=2) for inputs, outputs in pairs)
        self.join = nn.ModuleList(_block(2 * inputs, inputs, norm) for inputs, _ in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the levels down to the bottleneck, and up again with the skip connections."""
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(self.pool(x))
        for level in reversed(range(LEVELS)):
            x = self.join[level](torch.cat([self.up[level](x), skips[level]], dim=1))
        return x
