"""ResNet-18 and ResNet-34 as named stages of torchvision's blocks (He et al. 2016, arXiv 1512.03385).

torchvision takes seconds to import. So `flwr_replay.models.zoo` imports this module only to build a ResNet.
"""

from collections import OrderedDict
from functools import partial

import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, conv1x1

from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import TaskConfig
from flwr_replay.models.layers import norm_layer, stage
from flwr_replay.models.staged import StagedModel

__all__ = ["Block", "resnet"]

_BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}  # per layer; He et al., table 1


class Block(BasicBlock):  # type: ignore[misc]
    """torchvision's block, computed without changing a layer's output in place.

    torchvision adds the identity to the norm layers' outputs, and applies ReLU, in place. PyTorch refuses this with the
    backward hooks of per-example gradients.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (B, C, H, W) to (B, C', H', W')."""
        identity = x if self.downsample is None else self.downsample(x)
        hidden = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(hidden)) + identity)


def resnet(model: ModelConfig, task: TaskConfig) -> StagedModel:
    """Build a ResNet from PyTorch's global generator, as `flwr_replay.models.build` does for a seed.

    With width 64, the published stem, batch norm and three channels, the outputs are those of torchvision's model; so
    are the weights for the same seed. Its ``bn1`` is ``conv1.norm`` here, and its ``fc`` is ``head.fc``.

    `model.width` is the number of channels of the stem and layer1; every further layer doubles it and halves the image,
    which may have any size. The stem convolves 7x7 with stride 2 (published) or 3x3 with stride 1 (small); a 3x3
    max-pool of stride 2 ends both.

    Stages are conv1 (convolution, norm, ReLU, max-pool), layer1 .. layer4, head (average pool, linear).
    """
    norm, width = partial(norm_layer, model.norm), model.width
    kernel, stride = (7, 2) if model.stem == "published" else (3, 1)
    # In torchvision's order, so that a seed gives the same weights as in torchvision.
    stages: OrderedDict[str, nn.Module] = OrderedDict()
    stages["conv1"] = stage(
        conv=nn.Conv2d(task.channels, width, kernel, stride, padding=kernel // 2, bias=False),
        norm=norm(width),
        relu=nn.ReLU(),
        pool=nn.MaxPool2d(3, stride=2, padding=1),
    )
    inputs = width
    for layer, blocks in enumerate(_BLOCKS[model.name]):
        outputs, stride = width * 2**layer, 1 if layer == 0 else 2
        downsample = None if layer == 0 else nn.Sequential(conv1x1(inputs, outputs, stride), norm(outputs))
        first = Block(inputs, outputs, stride, downsample, norm_layer=norm)
        rest = (Block(outputs, outputs, norm_layer=norm) for _ in range(blocks - 1))
        stages[f"layer{layer + 1}"] = nn.Sequential(first, *rest)
        inputs = outputs
    stages["head"] = stage(pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=nn.Linear(inputs, task.classes))
    staged = StagedModel(stages)
    for module in staged.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return staged
