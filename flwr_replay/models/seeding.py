"""Seeding of library code that draws from PyTorch's global generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["seeded"]

CPU = torch.device("cpu")


@contextmanager
def seeded(seed: int, device: torch.device = CPU) -> Iterator[None]:
    """Seed PyTorch's global generators inside a `with` block; restore their state afterwards.

    Parameters
    ----------
    seed : int
        0 to 2**64 - 1, of which PyTorch's CPU generator reads the lower 32 bits.
    device : torch.device
        The device whose generator is seeded in addition to the CPU's.
    """
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        # Not torch.manual_seed, which seeds every accelerator's generator: fork_rng restores only these two.
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            torch.cuda.default_generators[gpu.index].manual_seed(seed)
        yield
