"""A model as an ordered list of named stages, and what it means to cut it at one of them.

`B` batch, `C` channels, `H` height, `W` width.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_replay.config.sections import one_of, require

__all__ = ["StagedModel", "has_batch_norm", "placed", "split", "split_before_head"]

Module = TypeVar("Module", bound=nn.Module)


class StagedModel(nn.Sequential):
    """A sequence of named stages; built from an ``OrderedDict`` of modules as `torch.nn.Sequential` is.

    A stage's name is the first part of its parameters' names in the state dict (``layer1.0.conv1.weight``).
    """

    channels_last = False  # whether it is faster on a CPU with its weights in that order; `placed` asks

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages, in the order in which data pass them."""
        return tuple(self._modules)


def placed(model: Module, device: torch.device | str) -> Module:
    """Move a whole model, before it is split, to where it computes, its weights in the order that is fastest there.

    The order changes results by rounding only.
    """
    if torch.device(device).type == "cpu" and getattr(model, "channels_last", False):
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model.to(device)


def split(model: nn.Module, cut: str) -> tuple[StagedModel, StagedModel]:
    """Cut a model after one of its stages, as Qu et al. 2022, Fig. 4, cut ResNet-34 after conv1.

    ``primary(encoder(x))`` is ``model(x)``, operation by operation.

    Parameters
    ----------
    model : StagedModel, or any torch.nn.Sequential
        The whole model; it stays as it is. A module that is no sequence has no place to cut.
    cut : str
        The encoder's last stage: any stage but the model's last one, the head. Empty: the first stage.

    Returns
    -------
    encoder, primary : StagedModel
        The stages up to and including `cut`, and the rest. Both share their parameters and buffers with `model`
        and keep its names: ``encoder.state_dict() | primary.state_dict()`` is ``model.state_dict()``.

    Raises
    ------
    ConfigError
        `cut` is no stage of `model`, or it is the head; `model` is no sequence.
    """
    require(
        isinstance(model, nn.Sequential),
        f"only a torch.nn.Sequential of named stages can be cut; got {type(model).__name__}: build the model as one",
    )
    cuts = tuple(model._modules)[:-1]
    if cut:
        one_of("cut", cut, cuts)
    first = cuts.index(cut) + 1 if cut else 1
    stages = list(model.named_children())
    return StagedModel(OrderedDict(stages[:first])), StagedModel(OrderedDict(stages[first:]))


def split_before_head(model: nn.Module, cut: str) -> tuple[StagedModel, StagedModel, StagedModel]:
    """Cut a model after one of its stages and once more before its head, as U-shaped split learning does.

    Returns
    -------
    encoder, middle, head : StagedModel
        As from `split`; the head is the model's last stage.

    Raises
    ------
    ConfigError
        As `split` does; or nothing is left between the two cuts.
    """
    encoder, rest = split(model, cut)
    require(
        len(rest) > 1, f"a cut before the head too must leave a stage between; got cut={cut!r}: cut at an earlier stage"
    )
    middle, head = split(rest, rest.stages[-2])
    return encoder, middle, head


def has_batch_norm(module: nn.Module) -> bool:
    """Say whether a module contains batch norm: training then mixes the examples of a batch and keeps statistics.

    Such a module has no per-example gradients (so no DP-SGD) and cannot be trained on a batch of one where its
    feature map is one pixel.
    """
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())
