"""The models of `conf/model/`, with weights that depend on a seed only.

===========  =========================================  =====================================================
model        stages                                     source
===========  =========================================  =====================================================
`mlp`        hidden1, hidden2, head                     Kalra et al. 2023 (ProxyFL), appendix A.1
`lenet5`     conv1, conv2, hidden1, hidden2, head       LeCun et al. 1998 with ReLU and max-pool; `lenet5_unpadded`
`cnn1`       conv1, conv2, hidden, head                 ProxyFL, appendix A.1; its proxy on CIFAR-10
`cnn2`       conv1, conv2, head                         ProxyFL, appendix A.1; its private model on CIFAR-10
`cnn`        conv1, conv2, head                         CNN2 of any width, padded, with a norm layer
`resnet18`   conv1, layer1 .. layer4, head              He et al. 2016; `flwr_replay.models.resnet`
`resnet34`   conv1, layer1 .. layer4, head              the same
`gabor`      energies, head                             Tramèr and Boneh 2021; `flwr_replay.models.gabor`
`deepset`    elements, hidden1, hidden2, head           ProxyFL, appendix A.3
`unet`       enc1, rest, head                           Ronneberger et al. 2015; `flwr_replay.models.unet`
`timm`       as its blocks are, features, head          `flwr_replay.models.timm_models`; `lite0` is one of them
`own`        the user's                                 `flwr_replay.models.own`
===========  =========================================  =====================================================

ProxyFL: arXiv 2111.11343. He et al.: arXiv 1512.03385. LeCun et al.: doi 10.1109/5.726791.

LeNet-5, CNN1 and CNN2 pool before ReLU. The outputs have the same bits, and ReLU has a quarter of the numbers. Initial
weights are those of PyTorch's layers (torchvision's ResNet). No stage changes its input in place, so activations at a
cut may be kept. No layer changes another's output in place, which the hooks of per-example gradients do not allow.

`B` batch, `C` channels, `H` height, `W` width.
"""

from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import TaskConfig, require
from flwr_replay.errors import ConfigError
from flwr_replay.memory import remembered
from flwr_replay.models.frozen import Frozen, frozen_stages
from flwr_replay.models.gabor import gabor
from flwr_replay.models.layers import Prepared, Standardize, norm_layer, stage
from flwr_replay.models.own import own
from flwr_replay.models.pretrained import load_pretrained
from flwr_replay.models.seeding import seeded
from flwr_replay.models.staged import StagedModel
from flwr_replay.models.timm_models import timm_model
from flwr_replay.models.unet import unet

__all__ = ["backbone", "build", "bytes_of", "described", "encoder_digest", "encoder_of", "frozen_before"]

# With this memory order, steps take 0.7 to 0.9 of the time; those of ResNets take 1.1. Models with norm layers are left
# out: a norm after a cut would sum over an image in another order, with other last bits.
CHANNELS_LAST = ("lenet5", "lenet5_unpadded", "cnn1", "cnn2")


def build(model: ModelConfig, task: TaskConfig, seed: int) -> StagedModel:
    """Build a model with fresh weights.

    Parameters
    ----------
    model : ModelConfig
        The model's name and options.
    task : TaskConfig
        Gives the input, float (B, C, H, W) in [0, 1] with C = ``task.channels`` and H = W = ``task.size``, and the
        output, logits (B, ``task.classes``) or, for a U-Net, (B, 1, H, W). With ``task.mean``, the first stage
        standardises the input.
    seed : int
        0 to 2**64 - 1; PyTorch's CPU generator uses the lower 32 bits. The weights depend on it only, not on the
        default device or PyTorch's global generator, whose state is restored.

    Returns
    -------
    StagedModel
        On the CPU, in training mode.

    Raises
    ------
    ConfigError
        If the images are too small for the model, or if the model does not fit the kind of task.
    """
    smallest = _smallest(model)
    require(
        model.name == "own" or (model.name == "unet") == (task.kind == "segmentation"),
        f"model=unet and segmentation tasks go together; got model={model.name} and task.kind={task.kind}",
    )
    stem = f" with the {model.stem} stem" if model.name.startswith("resnet") else ""
    require(
        task.size >= smallest,
        f"model {model.name}{stem} needs images of at least {smallest}x{smallest} pixels; got task.size {task.size}: "
        "choose a model with fewer poolings, such as mlp",
    )
    encoder = encoder_of(model, task)
    if not encoder:
        return _whole(model, task, seed)
    trained = deepcopy(_trained(model, task, seed))
    return StagedModel(OrderedDict([([*encoder.stages._modules][-1], deepcopy(encoder)), *trained.items()]))


def _whole(model: ModelConfig, task: TaskConfig, seed: int) -> StagedModel:
    """Build a model all of which trains, with the weights that everyone has beforehand."""
    with seeded(seed), torch.device("cpu"):
        built = _fresh(model, task)
    built.channels_last = model.name in CHANNELS_LAST and not model.library
    if task.mean and not any(isinstance(layer, Prepared) for layer in built.modules()):
        name, first = next(iter(built.named_children()))
        inner = dict(first._modules) if type(first) is nn.Sequential else {"layer": first}
        layers = OrderedDict(standardize=Standardize(task.mean, task.std), **inner)
        setattr(built, name, nn.Sequential(layers))
    if model.everywhere:
        load_pretrained(built, model.weights, model.library, own_code=bool(model.build))
    return built


@remembered(maxsize=4)
def _trained(model: ModelConfig, task: TaskConfig, seed: int) -> OrderedDict[str, nn.Module]:
    """Return the stages that train beside frozen ones, as they begin: whole models take long to build."""
    built = _whole(model, task, seed)
    names = built.stages[len(frozen_stages(built.stages, model.train)) :]
    return OrderedDict((name, built.get_submodule(name)) for name in names)


def encoder_of(model: ModelConfig, task: TaskConfig) -> Frozen | None:
    """Return the stages that do not train, with the same weights whatever a model's seed; None if all train."""
    return None if model.train == "all" else _encoder(model, task)


@remembered(maxsize=2)  # all models of a process share its weights: nothing in it changes
def _encoder(model: ModelConfig, task: TaskConfig) -> Frozen | None:
    built = _whole(model, task, 0)
    stages = OrderedDict((name, built.get_submodule(name)) for name in frozen_stages(built.stages, model.train))
    image = torch.zeros(1, task.channels, task.size, task.size)
    return Frozen(stages, image, alone=bool(model.build)) if stages else None


@remembered(maxsize=2)
def encoder_digest(model: ModelConfig, task: TaskConfig) -> str:
    """Return the SHA-256 of the stages that do not train; empty if all train."""
    encoder = encoder_of(model, task)
    return encoder.digest if encoder else ""


@remembered(maxsize=2)
def described(model: ModelConfig, task: TaskConfig) -> str:
    """Say what a pretrained or frozen network is: its weights, what it makes of images, how much of it trains.

    Empty for one that is neither.
    """
    if not model.library and model.train == "all":
        return ""
    built, encoder = build(model, task, 0), encoder_of(model, task)
    layers = [*built.modules(), encoder and encoder.prepared]
    prepared = [f"; {layer.extra_repr()}" for layer in layers if isinstance(layer, Prepared)]
    weights = f"weights {Path(model.weights).name}" if model.weights else model.build or "fresh weights"
    text = f"{model.name}, {weights}{''.join(prepared)}. {sum(p.numel() for p in built.parameters()):,} numbers train"
    if encoder is None:
        return f"{text}."
    first, *_, last = [*encoder.stages._modules] * 2
    stages = first if first == last else f"{first} to {last}"
    fixed = sum(tensor.numel() for tensor in encoder.numbers.values())
    return f"{text}; {fixed:,} stay as they are and do not travel: {stages}, {encoder_digest(model, task)}."


def _fresh(model: ModelConfig, task: TaskConfig) -> StagedModel:
    if model.library:
        return timm_model(model, task)
    if model.name in BUILDERS:
        return BUILDERS[model.name](model, task)
    from flwr_replay.models.resnet import resnet  # torchvision takes seconds to import

    return resnet(model, task)


def _smallest(model: ModelConfig) -> int:
    """Return the smallest image size, in pixels, at which the poolings (ResNet: the stem) leave at least one pixel."""
    if model.library or model.name in ("mlp", "deepset", "unet", "gabor", "own"):
        return 1
    if model.name in ("cnn1", "cnn2"):
        return 10
    if model.name == "lenet5_unpadded":
        return 16
    return 2 if model.name.startswith("resnet") and model.stem == "small" else 4


def _mlp(model: ModelConfig, task: TaskConfig) -> StagedModel:
    """Two hidden layers of `model.width` units (the paper: 200) with ReLU, on the flattened image."""
    inputs = task.channels * task.size**2
    return StagedModel(
        OrderedDict(
            hidden1=stage(flatten=nn.Flatten(), fc=nn.Linear(inputs, model.width), relu=nn.ReLU()),
            hidden2=stage(fc=nn.Linear(model.width, model.width), relu=nn.ReLU()),
            head=stage(fc=nn.Linear(model.width, task.classes)),
        )
    )


def _lenet5(model: ModelConfig, task: TaskConfig) -> StagedModel:
    """LeNet-5: 6 and 16 maps of 5x5 convolutions, 120 and 84 units, with ReLU and 2x2 max-pool.

    ProxyFL uses LeNet5 and refers to Shen et al. 2020, but neither lists its layers; these are the published ones. A
    32x32 image needs no padding and ends in 5x5 maps. At 28 to 31 pixels conv1 pads by 2, as is usual for MNIST (5x5
    again). Below 28 pixels conv2 pads by 2, too, so that 8x8 digits end in 2x2 maps. Larger maps are averaged to 5x5,
    so that the head does not grow with the image. `lenet5_unpadded` is that of ProxyFL's public code: MNIST's
    images end in 4x4 maps.
    """
    padded = model.name == "lenet5"
    pads = 2 * (padded and task.size < 32), 2 * (padded and task.size < 28)
    side = ((task.size + 2 * pads[0] - 4) // 2 + 2 * pads[1] - 4) // 2
    shrink = {"shrink": nn.AdaptiveAvgPool2d(5)} if side > 5 else {}
    features = 16 * min(side, 5) ** 2
    return StagedModel(
        OrderedDict(
            conv1=stage(conv=nn.Conv2d(task.channels, 6, 5, padding=pads[0]), pool=nn.MaxPool2d(2), relu=nn.ReLU()),
            conv2=stage(conv=nn.Conv2d(6, 16, 5, padding=pads[1]), pool=nn.MaxPool2d(2), relu=nn.ReLU(), **shrink),
            hidden1=stage(flatten=nn.Flatten(), fc=nn.Linear(features, 120), relu=nn.ReLU()),
            hidden2=stage(fc=nn.Linear(120, 84), relu=nn.ReLU()),
            head=stage(fc=nn.Linear(84, task.classes)),
        )
    )


def _proxyfl_cnn(model: ModelConfig, task: TaskConfig) -> StagedModel:
    """Two unpadded 3x3 convolutions, each with ReLU and 2x2 max-pool: 6 and 16 maps and 64 units, or 128 and 128 maps.

    Kalra et al. 2023, appendix A.1. An image of s pixels ends in maps of ((s - 2) // 2 - 2) // 2.
    """
    maps = (6, 16) if model.name == "cnn1" else (128, 128)
    side = ((task.size - 2) // 2 - 2) // 2
    stages: OrderedDict[str, nn.Module] = OrderedDict(
        (f"conv{i + 1}", stage(conv=nn.Conv2d(inputs, outputs, 3), pool=nn.MaxPool2d(2), relu=nn.ReLU()))
        for i, (inputs, outputs) in enumerate([(task.channels, maps[0]), maps])
    )
    if model.name == "cnn1":
        stages["hidden"] = stage(flatten=nn.Flatten(), fc=nn.Linear(maps[1] * side**2, 64), relu=nn.ReLU())
        stages["head"] = stage(fc=nn.Linear(64, task.classes))
    else:
        stages["head"] = stage(flatten=nn.Flatten(), fc=nn.Linear(maps[1] * side**2, task.classes))
    return StagedModel(stages)


def _cnn(model: ModelConfig, task: TaskConfig) -> StagedModel:
    """Two 3x3 convolutions of `model.width` maps, each with norm, ReLU and 2x2 max-pool, and a linear head.

    It differs from CNN2 in its norm layers and in padding by 1. An image of s pixels ends in maps of s // 4.
    """

    def block(inputs: int) -> nn.Sequential:
        return stage(
            conv=nn.Conv2d(inputs, model.width, 3, padding=1, bias=False),
            norm=norm_layer(model.norm, model.width),
            relu=nn.ReLU(),
            pool=nn.MaxPool2d(2),
        )

    return StagedModel(
        OrderedDict(
            conv1=block(task.channels),
            conv2=block(model.width),
            head=stage(flatten=nn.Flatten(), fc=nn.Linear(model.width * (task.size // 4) ** 2, task.classes)),
        )
    )


class Elements(nn.Module):
    """A layer of D units with ReLU on each vector of a bag (B, F, H, W), and its mean over the bag's vectors."""

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


def _deepset(model: ModelConfig, task: TaskConfig) -> StagedModel:
    """DeepSet: a classifier of bags that ignores the order of their vectors (Zaheer et al. 2017, arXiv 1703.06114).

    Kalra et al. 2023 (ProxyFL), appendix A.3: a layer of 512 (private model) or 256 units (proxy), `model.width`, on
    each vector, the mean over vectors, layers of 128 and 64 units, and one unit for each class.
    """
    return StagedModel(
        OrderedDict(
            elements=stage(mean=Elements(task.channels, model.width)),
            hidden1=stage(fc=nn.Linear(model.width, 128), relu=nn.ReLU()),
            hidden2=stage(fc=nn.Linear(128, 64), relu=nn.ReLU()),
            head=stage(fc=nn.Linear(64, task.classes)),
        )
    )


BUILDERS: dict[str, Callable[[ModelConfig, TaskConfig], StagedModel]] = {  # all but torchvision's
    **{"own": own, "mlp": _mlp, "lenet5": _lenet5, "lenet5_unpadded": _lenet5, "cnn1": _proxyfl_cnn},
    **{"cnn2": _proxyfl_cnn, "cnn": _cnn, "gabor": gabor, "deepset": _deepset, "unet": unet},
}


def bytes_of(model: ModelConfig, task: TaskConfig, whole: bool = False) -> int:
    """Return the bytes of a model's weights without building it: of those that travel, or with `whole` of all."""
    sizes = _outline(model, task)
    first = 0 if whole else len(frozen_stages([*sizes], model.train))
    return sum(size[whole] for size in list(sizes.values())[first:])


def frozen_before(model: ModelConfig, task: TaskConfig, cut: str) -> bool:
    """Return whether nothing before a cut trains; an empty cut is the first possible one."""
    names = frozen_stages([*_outline(model, task)], model.train)
    return bool(names) and cut in ("", names[-1])


@remembered(maxsize=16)
def _outline(model: ModelConfig, task: TaskConfig) -> dict[str, tuple[int, int]]:
    """Return the bytes of each stage of a model that is built without its numbers; a user's own may need them.

    The first number is of what a state dict has, the second also of constants, such as a projection.
    """
    try:
        with torch.device("meta"):
            built = _fresh(model, task)
    except ConfigError:
        if model.name != "own":
            raise
        built = _whole(model, task, 0)
    return {
        name: (
            sum(value.nbytes for value in stage.state_dict().values()),
            sum(value.nbytes for value in chain(stage.parameters(), stage.buffers())),
        )
        for name, stage in built.named_children()
    }


@remembered(maxsize=4)
def backbone(model: ModelConfig, task: TaskConfig) -> Callable[[int], nn.Module]:
    """Return the builder of a configuration's backbone, a function from seed to model; cached."""
    return partial(build, model, task)
