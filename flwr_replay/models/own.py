"""A model of the user's own: `model=mypkg.nets:build`.

    def build(channels: int, size: int, classes: int) -> torch.nn.Sequential

Its named children are the stages, after which it can be cut. `B` batch.
"""

from collections import OrderedDict
from itertools import chain

import torch
from torch import nn
from torch.func import functional_call

from flwr_replay.config.model import ModelConfig
from flwr_replay.config.own_code import import_own, users_code
from flwr_replay.config.sections import TaskConfig, require
from flwr_replay.errors import ConfigError
from flwr_replay.memory import on_forget
from flwr_replay.models.frozen import Frozen
from flwr_replay.models.layers import Prepared, Standardize, out_of_place
from flwr_replay.models.staged import StagedModel

__all__ = ["check_layers", "own"]

# Layers that compute each example by itself, whatever their arguments.
APART = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.GroupNorm, nn.LayerNorm, nn.Dropout, nn.Identity),
    *(nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardtanh),
    *(nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Upsample),
    *(nn.Sequential, StagedModel, Standardize, Prepared),
)
_passed: set[tuple[ModelConfig, TaskConfig, str]] = set()
on_forget(_passed.clear)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def own(model: ModelConfig, task: TaskConfig) -> StagedModel:
    """Call the user's function, and check what it returns.

    Raises
    ------
    ConfigError
        If it cannot be imported or called, returns something else than a sequence of named stages, gives outputs of
        another shape than (B, task.classes), or (B, 1, H, W) where labels are masks, or has nothing that trains.
    """
    option, build = f"model={model.build}", import_own("model", model.build)
    called = f"channels={task.channels}, size={task.size}, classes={task.classes}"
    with users_code(ConfigError, f"{option} is called with {called}, and failed"):
        built = build(channels=task.channels, size=task.size, classes=task.classes)
    require(
        type(built) in (nn.Sequential, StagedModel) and len(built) > 1 and not _altered(built),
        f"{option} must return torch.nn.Sequential with at least two named stages, the last of them the head; got "
        f"{type(built).__name__}",
    )
    staged = out_of_place(StagedModel(OrderedDict(built._modules)))  # a layer may stand there twice
    staged.foreign = getattr(built, "foreign", {})
    checked = (model, task, torch.get_default_device().type)
    if checked not in _passed:  # seconds at 224 pixels, and a run builds many
        _check_outputs(option, staged, task)
        _passed.add(checked)
    return staged.train()


def _check_outputs(option: str, staged: StagedModel, task: TaskConfig) -> None:
    x_BCHW = torch.zeros(2, task.channels, task.size, task.size)
    expected = (2, 1, task.size, task.size) if task.kind == "segmentation" else (2, task.classes)
    with users_code(ConfigError, f"{option} fails on images {tuple(x_BCHW.shape)}"):
        with torch.no_grad():
            tested = staged.eval()(x_BCHW)
        copies = {name: tensor.clone() for name, tensor in chain(staged.named_parameters(), staged.named_buffers())}
        trained = functional_call(staged.train(), copies, (x_BCHW,))  # norm statistics stay as they are
    for outputs in (tested, trained):
        shape = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else f"a {type(outputs).__name__}"
        require(shape == expected, f"{option} must give outputs of shape {expected} for two images; got {shape}")
    require(trained.requires_grad, f"{option} must give outputs that depend on a parameter that trains; these do not")


def check_layers(model: ModelConfig, built: nn.Module) -> None:
    """Refuse a model of the user's under DP if one of its layers might mix the examples of a batch.

    Only layers are taken that compute each example by itself, as PyTorch has them, without hooks. Those that do not
    train may be any: each image passes them alone. That they remember none is on whoever wrote them.
    """
    for name, layer in built.named_modules():
        flattens = type(layer) is nn.Flatten and layer.start_dim == 1
        require(
            type(layer) is Frozen or ((type(layer) in APART or flattens) and not _altered(layer)),
            f"under differential privacy model={model.build} may have only layers that compute each example by itself; "
            f"{name} is a {type(layer).__name__}, or has hooks: take Linear, Conv2d, GroupNorm, ReLU and the like, or "
            "freeze what lies before the head, model.train=head",
        )


def _altered(layer: nn.Module) -> bool:
    return "forward" in vars(layer) or any(getattr(layer, hooks, None) for hooks in HOOKS)
