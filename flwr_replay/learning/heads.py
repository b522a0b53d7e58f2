"""A network's last linear layer, its head, and the features that it takes.

`B` batch, `F` features, `C` classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flwr_replay.config.sections import require

__all__ = ["features_of", "linear_head"]


def linear_head(model: nn.Module) -> tuple[str, nn.Linear]:
    """Return the last layer of a model, and its name; a ConfigError if that is not linear, or has no bias."""
    name, layer = list(model.named_modules())[-1]
    require(
        isinstance(layer, nn.Linear) and layer.bias is not None,
        f"the head must be a torch.nn.Linear with a bias, the model's last layer; got {type(layer).__name__}: choose "
        "model=gabor, lite0, timm or another with such a head",
    )
    assert isinstance(layer, nn.Linear)
    return name, layer


def features_of(model: nn.Module, x: Tensor) -> Tensor:
    """Return what a model's head takes, (B, F), of inputs (B, ...); the model is in evaluation mode afterwards."""
    taken: list[Tensor] = []
    handle = linear_head(model)[1].register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    try:
        with torch.inference_mode():
            model.eval()(x)
    finally:
        handle.remove()
    return taken[0]
