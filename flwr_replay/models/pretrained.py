"""Weights from a user's file, of a model to begin with or of an encoder; nothing is downloaded."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file
from torch import Tensor, nn

from flwr_replay.errors import ConfigError
from flwr_replay.memory import remembered

__all__ = ["load_pretrained", "read_encoder", "read_weights"]

# Foreign names of layers, and ours: torchvision's ResNet, and Buda et al.'s U-Net for brain MRI.
NAMES: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (r"^conv1\.weight$", lambda m: "conv1.conv.weight"),
    (r"^bn1\.", lambda m: "conv1.norm."),
    (r"^fc\.", lambda m: "head.fc."),
    (r"^encoder1\.enc1", lambda m: "enc1."),
    (r"^encoder(\d)\.enc\d", lambda m: f"rest.down.{int(m[1]) - 2}."),
    (r"^bottleneck\.bottleneck", lambda m: "rest.down.3."),
    (r"^upconv(\d)\.", lambda m: f"rest.up.{int(m[1]) - 1}."),
    (r"^decoder(\d)\.dec\d", lambda m: f"rest.join.{int(m[1]) - 1}."),
    (r"^conv\.", lambda m: "head.conv."),
)


def load_pretrained(model: nn.Module, file: str) -> nn.Module:
    """Copy a file's weights into a model, in place; a head of another shape keeps its fresh weights.

    Parameters
    ----------
    model : nn.Module
        A backbone with named stages; the last is `head`.
    file : str
        A .safetensors file, or a .pt or .pth file of a state dict, with the model's names, torchvision's
        (ResNet) or those of Buda et al. 2019 (U-Net).

    Returns
    -------
    nn.Module
        The same model.

    Raises
    ------
    ConfigError
        If the file cannot be read, or if a weight outside the head is missing or has another shape.
    """
    found, own = _read(Path(file).expanduser().absolute()), model.state_dict()
    for name, tensor in own.items():
        fits = name in found and found[name].shape == tensor.shape
        if fits:
            tensor.copy_(found[name])
        elif name.startswith("head."):
            logging.getLogger("flwr").info("%s: %s keeps its fresh weights", file, name)
        elif not name.endswith("num_batches_tracked"):  # older files lack it
            has = f"has {tuple(found[name].shape)}" if name in found else "lacks it"
            raise ConfigError(f"model.weights must hold {name!r} with shape {tuple(tensor.shape)}; {file} {has}")
    return model


def read_weights(path: Path, option: str) -> dict[str, Tensor]:
    """Read a state dict from a .safetensors, .pt or .pth file.

    Raises
    ------
    ConfigError
        If the file cannot be read, or holds numbers that are not finite; `option` is who asked for it.
    """
    try:
        loaded = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
        weights = {str(name): torch.as_tensor(value) for name, value in loaded.items()}
    except Exception as error:  # a damaged file can raise any error
        line = f"{type(error).__name__} {' '.join(str(error).split())}"
        raise ConfigError(f"{option} must be a .safetensors or .pth file of weights; got {path}: {line}") from None
    for name, tensor in weights.items():
        if not torch.isfinite(tensor).all():
            raise ConfigError(f"{option} must hold finite numbers; {name!r} in {path} does not")
    return weights


def read_encoder(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[Any]]:
    """Read the encoder's weights from the user's file.

    Raises
    ------
    ConfigError
        If it is not a .safetensors file, or a weight before the cut is missing or has another shape.
    """
    try:
        arrays = load_arrays(path)
    except Exception as error:
        raise ConfigError(f"strategy.encoder-file must be a .safetensors file; got {path}: {error}") from None
    for name, shape in shapes.items():
        if name not in arrays or arrays[name].shape != shape:
            found = f"has {arrays[name].shape}" if name in arrays else "lacks it"
            raise ConfigError(f"strategy.encoder-file must hold {name!r} with shape {shape}; {path} {found}")
    return arrays


@remembered(maxsize=1)
def _read(path: Path) -> dict[str, Tensor]:
    weights = read_weights(path, "model.weights")
    for pattern, ours in NAMES:
        weights = {re.sub(pattern, ours, name): tensor for name, tensor in weights.items()}
    return weights
