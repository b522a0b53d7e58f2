"""MONAI's EfficientNet-B0 (Cardoso et al. 2022, arXiv 2211.02701): `model=efficientnet:build`, images of 224 pixels.

`model.weights=FILE` has a state dict of MONAI's network for colour images. Nothing is downloaded.
"""

from monai.networks.nets import EfficientNetBN
from torch import nn

from flwr_replay.models import Prepared, StagedModel, staged

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def build(channels: int, size: int, classes: int) -> StagedModel:
    """Return its blocks as stages, its 1,280 features, and a head of our own for other classes."""
    net = EfficientNetBN("efficientnet-b0", pretrained=False, spatial_dims=2, in_channels=3)  # True downloads
    net.set_swish(memory_efficient=False)  # the other cannot be exported
    prepared = Prepared(3, 224, "bicubic", **IMAGENET)  # grey images are repeated
    head = nn.Linear(1280, classes)
    nn.init.zeros_(head.weight)
    return staged(
        net,
        stem=nn.Sequential(prepared, net._conv_stem_padding, net._conv_stem, net._bn0, net._swish),
        **{f"blocks{n}": blocks for n, blocks in enumerate(net._blocks)},
        features=nn.Sequential(
            net._conv_head_padding, net._conv_head, net._bn1, net._swish, net._avg_pooling, nn.Flatten()
        ),
        head=nn.Sequential(nn.LayerNorm(1280, elementwise_affine=False), head),  # of one norm: less is clipped
    )
