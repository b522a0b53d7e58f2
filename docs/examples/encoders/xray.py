"""TorchXRayVision's DenseNet-121 (Cohen et al. 2022, arXiv 2111.00595): `model=xray:build`, grey images of 224 pixels.

Its weights are a file, `model.weights=xray.pth`. Nothing is downloaded here; where there is a network, this writes it:

    net = torchxrayvision.models.DenseNet(weights="densenet121-res224-all")
    torch.save(net.state_dict(), "xray.pth")
"""

from torch import nn
from torchxrayvision.models import DenseNet

from flwr_replay.models import Prepared, StagedModel, staged


def build(channels: int, size: int, classes: int) -> StagedModel:
    """Return its blocks as stages, its 1,024 features, and a head of our own for other classes."""
    if channels != 1:
        raise ValueError("X-rays are grey: task.channels=1")
    net = DenseNet()  # with weights= it downloads, and its answers pass a sigmoid and thresholds
    layers = dict(net.features.named_children())  # it has no ReLU and no pooling behind its last norm
    prepared = Prepared(1, 224, "bilinear", mean=(0.5,), std=(1 / 2048,))  # [0, 1] to [-1024, 1024]
    stem = (prepared, *(layers[name] for name in ("conv0", "norm0", "relu0", "pool0")))
    pooled = (layers["norm5"], nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    head = nn.Linear(1024, classes)
    nn.init.zeros_(head.weight)
    return staged(
        net,
        stem=nn.Sequential(*stem),
        block1=nn.Sequential(layers["denseblock1"], layers["transition1"]),
        block2=nn.Sequential(layers["denseblock2"], layers["transition2"]),
        block3=nn.Sequential(layers["denseblock3"], layers["transition3"]),
        features=nn.Sequential(layers["denseblock4"], *pooled),
        head=nn.Sequential(nn.LayerNorm(1024, elementwise_affine=False), head),  # of one norm: less is clipped
    )
