"""Stages that do not train: a fixed encoder, which no message, checkpoint or optimizer holds.

`B` batch, `C` channels, `H` height, `W` width.
"""

import copy
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from flwr_replay.config.sections import one_of, require
from flwr_replay.files.tensors import digest
from flwr_replay.models.layers import Prepared, outlined

__all__ = ["Frozen", "frozen_stages"]


class Frozen(nn.Module):
    """A model's first stages with weights that stay, always in evaluation mode: batch norm is a fixed scale.

    It has no parameters, and nothing in its state dict. What has its outputs' shape already passes unchanged, so a
    model takes images, and features that were computed before.

    Parameters
    ----------
    stages : OrderedDict
        The stages by name. Their parameters become buffers.
    image : Tensor, shape (1, C, H, W)
        Any input, to learn the outputs' shape.
    alone : bool
        Whether every image is computed by itself. Layers that are not known might mix the examples of a batch, which
        differential privacy does not allow.

    Raises
    ------
    ConfigError
        If an output has the shape of an image, and so could not be told from one.
    """

    def __init__(self, stages: OrderedDict[str, nn.Module], image: Tensor, alone: bool) -> None:
        super().__init__()
        self.stages, self.alone = nn.Sequential(stages), alone
        for layer in self.stages.modules():
            for name, parameter in list(layer._parameters.items()):
                if parameter is not None:
                    del layer._parameters[name]
                    layer.register_buffer(name, parameter.detach())
            layer._non_persistent_buffers_set.update(layer._buffers)
        self.eval()
        with torch.no_grad():
            self.shape = tuple((self.stages(image) if alone else outlined(self.stages, image.to("meta"))).shape[1:])
        require(
            tuple(image.shape[1:]) not in (self.shape, self.stored),
            f"model.train freezes stages whose output {self.shape} has the shape of an image: freeze one stage more",
        )

    @property
    def stored(self) -> tuple[int, int, int]:
        """The shape in which data sets hold its output of one image."""
        channels, height, width = (*self.shape, 1, 1)[:3]
        return channels, height, width

    @property
    def numbers(self) -> dict[str, Tensor]:
        """Its weights and norm statistics, by their names in the model; not how many batches made these."""
        buffers = self.stages.named_buffers()
        return {name: buffer for name, buffer in buffers if not name.endswith("num_batches_tracked")}

    @property
    def prepared(self) -> Prepared | None:
        """What brings images to the form that the stages take, if anything does."""
        return next((layer for layer in self.stages.modules() if isinstance(layer, Prepared)), None)

    @property
    def digest(self) -> str:
        """The SHA-256 of its numbers and layers."""
        layers = re.sub(r" at 0x\w+", "", repr(self.stages))  # a function's place in memory is another every time
        numbers = {name: buffer.cpu().numpy() for name, buffer in self.numbers.items()}
        return digest({**numbers, "": np.frombuffer(layers.encode(), np.uint8)})

    def takes_as_features(self, x: Tensor) -> bool:
        """Say whether inputs (B, ...) are features, and no images."""
        return tuple(x.shape[1:]) in (self.shape, self.stored)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the layers, which can then be moved to a device, and share the weights, which never change."""
        twin = type(self).__new__(type(self))
        memo |= {id(self): twin, **{id(buffer): buffer for buffer in self.stages.buffers()}}
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return super().train(False) if self.training else self

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        """Yield itself without its layers, which nobody else trains, hooks or refuses."""
        yield prefix, self

    def state_dict(self, *args: Any, destination: Any = None, **options: Any) -> Any:
        """Add nothing."""
        return OrderedDict() if destination is None else destination

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, *shape), from images (B, C, H, W) or from features."""
        if self.takes_as_features(x):
            return x.reshape(-1, *self.shape)
        if self.alone and not torch.compiler.is_compiling():  # an exported program takes any number at once
            return torch.cat([x.new_zeros(0, *self.shape), *map(self.stages, torch.split(x, 1)[: len(x)])])
        features: Tensor = self.stages(x)
        return features


def frozen_stages(stages: Sequence[str], train: str) -> tuple[str, ...]:
    """Return which of a model's stages `model.train` leaves as they are; a ConfigError if it names none."""
    first = {"all": stages[0], "head": stages[-1]}.get(train) or train.removeprefix("from:")
    one_of("the stage of model.train=from:STAGE", first, tuple(stages))
    return tuple(stages[: stages.index(first)])
