"""Seeding of library code that draws from PyTorch's global generators."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import nn

from flwr_replay.errors import ConfigError

__all__ = ["require_builder", "seeded"]

CPU = torch.device("cpu")


@contextmanager
def seeded(seed: int, device: torch.device = CPU) -> Iterator[None]:
    """Seed PyTorch's global generators, the CPU's and a GPU's, inside a `with` block; restore their state afterwards.

    Of a seed, 0 to 2**64 - 1, PyTorch's CPU generator reads the lower 32 bits.
    """
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        # Not torch.manual_seed, which seeds every accelerator's generator: fork_rng restores only these two.
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            torch.cuda.default_generators[gpu.index].manual_seed(seed)
        yield


@lru_cache(maxsize=16)  # the same builder comes with every message
def require_builder(model: Callable[[int], nn.Module]) -> None:
    """Raise `ConfigError` for what cannot be called with a seed alone, such as a network's class without arguments."""
    name = getattr(model, "__name__", type(model).__name__)
    try:
        inspect.signature(model).bind(0)
        if isinstance(model, nn.Module):
            raise TypeError("its forward takes no seed")
    except TypeError:
        raise ConfigError(
            f"a model must be a function of a seed that returns an nn.Module; got {name}: write "
            f"def net(seed): torch.manual_seed(seed); return {name}(), and give net"
        ) from None
