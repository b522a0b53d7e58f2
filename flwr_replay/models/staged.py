"""A model as an ordered list of named stages, and how to cut it after one of them.

`B` batch, `C` channels, `H` height, `W` width.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_replay.config.sections import one_of, require
from flwr_replay.models.frozen import Frozen

__all__ = ["StagedModel", "has_batch_norm", "placed", "split", "split_before_head", "staged"]

Module = TypeVar("Module", bound=nn.Module)


class StagedModel(nn.Sequential):
    """A sequence of named stages; built from an ``OrderedDict`` of modules as `torch.nn.Sequential` is.

    A stage's name is the first part of its parameters' names in the state dict (``layer1.0.conv1.weight``).
    """

    channels_last = False  # whether it is faster on a CPU with weights in this memory order; `placed` uses it
    foreign: Mapping[str, str] = MappingProxyType({})  # its publisher's names of the weights, by ours

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages, from input to output."""
        return tuple(self._modules)


def staged(net: nn.Module, /, **stages: nn.Module) -> StagedModel:
    """Make a model of a network's layers, whose weights may then be loaded by the network's own names.

    Parameters
    ----------
    net : Module
        The network from which layers were taken.
    stages : Module
        The stages by name, from input to output; the last is `head`.
    """
    names = {id(tensor): name for name, tensor in net.state_dict(keep_vars=True).items()}
    built = StagedModel(OrderedDict(stages))
    state = built.state_dict(keep_vars=True)
    built.foreign = {ours: names[id(tensor)] for ours, tensor in state.items() if id(tensor) in names}
    return built


def placed(model: Module, device: torch.device | str) -> Module:
    """Move a whole model to a device, with its weights in the memory order that is fastest there.

    Call it before the model is split. The order changes results by rounding only.
    """
    if torch.device(device).type == "cpu" and getattr(model, "channels_last", False):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.to(device)


def split(model: nn.Module, cut: str) -> tuple[StagedModel, StagedModel]:
    """Cut a model after one of its stages; Qu et al. 2022, Fig. 4, cut ResNet-34 after conv1.

    ``primary(encoder(x))`` performs the same operations as ``model(x)``.

    Parameters
    ----------
    model : StagedModel, or any torch.nn.Sequential
        The whole model; it is not changed. Only a sequence can be cut.
    cut : str
        The encoder's last stage: any stage except the model's last, the head. Empty: the first stage.

    Returns
    -------
    encoder, primary : StagedModel
        The stages up to and including `cut`, and the rest. Both share their parameters and buffers with `model`
        and keep its names: ``encoder.state_dict() | primary.state_dict()`` is ``model.state_dict()``.

    Raises
    ------
    ConfigError
        If `cut` is not a stage of `model` or is the head, if `model` is not a sequence, or if both parts would train
        the same parameter.
    """
    require(
        isinstance(model, nn.Sequential),
        f"only a torch.nn.Sequential of named stages can be cut; got {type(model).__name__}: build the model as one",
    )
    cuts = tuple(model._modules)[:-1]
    if cut:
        frozen = isinstance(next(model.children(), None), Frozen)
        one_of(f"cut, with all up to {cuts[0]} frozen by model.train," if frozen else "cut", cut, cuts)
    first = cuts.index(cut) + 1 if cut else 1
    stages = list(model.named_children())
    before, after = StagedModel(OrderedDict(stages[:first])), StagedModel(OrderedDict(stages[first:]))
    require(
        {*map(id, before.parameters())}.isdisjoint(map(id, after.parameters())),
        f"a model is cut where its parts share no weights; at cut={cuts[first - 1]!r} they do: cut elsewhere",
    )
    return before, after


def split_before_head(model: nn.Module, cut: str) -> tuple[StagedModel, StagedModel, StagedModel]:
    """Cut a model after one of its stages and again before its head, for U-shaped split learning.

    Returns
    -------
    encoder, middle, head : StagedModel
        As from `split`; the head is the model's last stage.

    Raises
    ------
    ConfigError
        As `split`, and if no stage is left between the two cuts.
    """
    encoder, rest = split(model, cut)
    earlier = "cut at an earlier stage" if len(encoder) > 1 else "train one there, model.train=from:STAGE"
    require(
        len(rest) > 1, f"encoder and head must leave a stage between them; got cut={encoder.stages[-1]!r}: {earlier}"
    )
    middle, head = split(rest, rest.stages[-2])
    return encoder, middle, head


def has_batch_norm(module: nn.Module) -> bool:
    """Say whether a module contains batch norm that trains: it mixes the examples of a batch and keeps statistics.

    Such a module has no per-example gradients, so it cannot be trained by DP-SGD. If its feature map is one pixel, it
    cannot be trained on a batch of one.
    """
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())
