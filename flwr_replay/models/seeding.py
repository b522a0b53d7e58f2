"""What draws from PyTorch's global generators, made to depend on a seed alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["seeded"]

CPU = torch.device("cpu")


@contextmanager
def seeded(seed: int, device: torch.device = CPU) -> Iterator[None]:
    """Let the global generators give, inside, what a seed says; outside they are as if nothing had been drawn.

    Parameters
    ----------
    seed : int
        0 to 2**64 - 1, of which PyTorch's CPU generator reads the lower 32 bits.
    device : torch.device
        Whose generator is seeded beside the CPU's.
    """
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        # Not torch.manual_seed: it would seed every accelerator's generator, and fork_rng restores only these.
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            torch.cuda.default_generators[gpu.index].manual_seed(seed)
        yield
