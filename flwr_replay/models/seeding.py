"""Seeding of library code that draws from PyTorch's global generators."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial

import torch
from torch import nn

from flwr_replay.errors import ConfigError

__all__ = ["builder_of", "seeded"]

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


@lru_cache(maxsize=16)  # the same builder comes with every message, and what is kept for a model goes by its builder
def builder_of(model: Callable[..., nn.Module]) -> Callable[[int], nn.Module]:
    """Return a function of a seed that builds a model; one that is built without arguments is built under that seed.

    Raises
    ------
    ConfigError
        For what needs other arguments, or is a model itself.
    """
    if isinstance(model, nn.Module):
        raise ConfigError(_no_builder(f"a {type(model).__name__} that is built already"))
    if not callable(model):
        raise ConfigError(_no_builder(f"{model!r:.80} of type {type(model).__name__}"))
    signature = inspect.signature(model)
    network = inspect.isclass(model) and issubclass(model, nn.Module)
    first = next(iter(signature.parameters.values()), None)
    # A network's first argument may be its width, and one with a default may be anything.
    of_seed = first is not None and (first.name == "seed" or (not network and first.default is first.empty))
    try:
        signature.bind(*[0] * of_seed)
    except TypeError:
        raise ConfigError(_no_builder(getattr(model, "__name__", type(model).__name__))) from None
    return model if of_seed else partial(_built, model)


def _built(model: Callable[[], nn.Module], seed: int) -> nn.Module:
    with seeded(seed):
        return model()


def _no_builder(got: str) -> str:
    return (
        f"model must be what builds it: a class or function without arguments, or a function of a seed; got {got}: "
        "write def net(): return Net(…), and give net"
    )
