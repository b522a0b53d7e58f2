"""A model of the user's own: `model=mypkg.nets:build`.

    def build(channels: int, size: int, classes: int) -> torch.nn.Sequential

Its named children are the stages, after which it can be cut. `B` batch.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from flwr_replay.config.parts import import_part
from flwr_replay.config.sections import ModelConfig, TaskConfig, require
from flwr_replay.errors import ConfigError
from flwr_replay.models.staged import StagedModel

__all__ = ["own"]


def own(model: ModelConfig, task: TaskConfig) -> StagedModel:
    """Call the user's function, and check what it returns.

    Raises
    ------
    ConfigError
        If it cannot be imported or called, returns something else than a sequence of named stages, or gives outputs of
        another shape than (B, task.classes), or (B, 1, H, W) where labels are masks.
    """
    option = f"model={model.build}"
    try:
        built = import_part("model", model.build)(channels=task.channels, size=task.size, classes=task.classes)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{option} is called with channels={task.channels}, size={task.size}, classes={task.classes}, and failed: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from None
    require(
        isinstance(built, nn.Sequential) and len(built) > 1,
        f"{option} must return torch.nn.Sequential with at least two named stages, the last of them the head; got "
        f"{type(built).__name__}",
    )
    staged = StagedModel(OrderedDict(built.named_children()))
    x_BCHW = torch.zeros(2, task.channels, task.size, task.size)
    expected = (2, 1, task.size, task.size) if task.kind == "segmentation" else (2, task.classes)
    try:
        with torch.no_grad():
            found = tuple(staged.eval()(x_BCHW).shape)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigError(f"{option} fails on images {tuple(x_BCHW.shape)}: {str(error).splitlines()[0]}") from None
    require(found == expected, f"{option} must give outputs of shape {expected} for two images; got {found}")
    return staged.train()
