"""Small shared training helpers. They compute; the loop of a method is in that method's file."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from flwr_replay.config.sections import TrainingConfig, require
from flwr_replay.errors import ConfigError, DivergedError, TrainingError
from flwr_replay.models import has_batch_norm
from flwr_replay.models.frozen import Frozen
from flwr_replay.models.layers import Prepared, as_input
from flwr_replay.rng import derived_seed
from flwr_replay.wire.records import StateDict

__all__ = [
    "at_once",
    "balanced_rows",
    "batches",
    "finite",
    "iterations",
    "late_steps",
    "learning_rate",
    "make_optimizer",
    "mean_loss",
    "refuse_single_batches",
    "select_device",
    "torch_rng",
    "unstepped",
]

DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
GATHERED = 32  # batches taken from a shard at a time
HELD_OUT = 10  # without a validation split, one of so many training examples is held out


def torch_rng(*purpose: object) -> torch.Generator:
    """Return a CPU generator derived from (seed, round, institution, purpose) or the like."""
    return torch.Generator().manual_seed(derived_seed(*purpose))


def select_device(device: str) -> torch.device:
    """Resolve `auto`; refuse a GPU that does not exist."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if not DEVICE.fullmatch(device):  # torch would import a module of that name
            raise RuntimeError("choose one of these")
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"device must be auto, cpu or an available cuda[:N]; got {device!r}: {reason}") from None
    return chosen


def learning_rate(training: TrainingConfig, completed_rounds: int) -> float:
    """Return the learning rate, divided by ten every `lr_step` rounds (Qu et al. 2022, section 4.1: every 35)."""
    return training.lr * (0.1 ** (completed_rounds // training.lr_step) if training.lr_step else 1.0)


@cache
def _eager(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """Return an optimizer's class without the hooks of `torch.compile` and of PyTorch's profiler.

    Nothing here is compiled. The former import a lot, the latter take a tenth of a small model's step. Its steps have
    the same bits, and hooks registered for steps are called.
    """
    hooked = ("add_param_group", "load_state_dict", "state_dict")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in hooked} | {"zero_grad": _drop_gradients}
    wrapped = {"step": torch.no_grad()(inspect.unwrap(kind.step)), "profile_hook_step": staticmethod(_hook_step)}
    return type(kind.__name__, (kind,), {**methods, **wrapped})


def _hook_step(step: Callable[..., Any]) -> Callable[..., Any]:
    def hooked(*args: Any, **kwargs: Any) -> Any:
        optimizer = args[0]
        for hook in (*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()):
            hook(optimizer, args, kwargs)
        loss = step(*args, **kwargs)
        for hook in (*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()):
            hook(optimizer, args, kwargs)
        return loss

    return hooked


def _drop_gradients(optimizer: torch.optim.Optimizer, _: bool = True) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def make_optimizer(module: nn.Module, training: TrainingConfig, lr: float) -> torch.optim.Optimizer:
    """Build the configured optimizer over the parameters that train."""
    # A group, which may be empty: all that lies before a cut may be frozen.
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    parameters = [{"params": trained}]
    if training.optimizer == "adam":
        # In one pass over the numbers: on the CPU three times as fast as PyTorch's default.
        return _eager(torch.optim.Adam)(parameters, lr=lr, weight_decay=training.weight_decay, fused=True)
    options = {"lr": lr, "momentum": training.momentum, "weight_decay": training.weight_decay}
    if all(parameter.device.type == "cpu" for parameter in trained):
        options["foreach"] = False  # PyTorch's own choice there, which it would make anew at each step
    return _eager(torch.optim.SGD)(parameters, **options)


def unstepped(module: nn.Module, training: TrainingConfig) -> StateDict:
    """Return the state of the configured optimizer from before its first step, named as by `optimizer_arrays`.

    It is zeros: PyTorch's Adam and SGD take the same first step from them as from no state. SGD without momentum has
    no state, so it is empty.
    """
    adam = training.optimizer == "adam"
    slots = ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",) if training.momentum else ()
    state: StateDict = {}
    for index, parameter in enumerate(p for p in module.parameters() if p.requires_grad):
        zeros = np.zeros(parameter.shape, parameter.detach().cpu().numpy().dtype)
        state |= {f"{index}.step": np.zeros((), np.float32)} if adam else {}
        state |= {f"{index}.{slot}": zeros for slot in slots}
    return state


def finite(of: nn.Module | torch.optim.Optimizer) -> bool:
    """Say whether all numbers of a model are finite, or all that an optimizer trains, and its state."""
    if isinstance(of, nn.Module):
        tensors = [*of.state_dict().values()]
    else:
        tensors = [parameter for group in of.param_groups for parameter in group["params"]]
        tensors += [slot for slots in of.state.values() for slot in slots.values() if isinstance(slot, Tensor)]
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def at_once(x: Tensor, most: int, model: nn.Module | None = None) -> int:
    """Return how many examples may pass a model at once: at most `most`, with at most four million input values.

    A model that brings images to a size of its own has so many of these.
    """
    values = math.prod(x.shape[1:])
    for layer in model.modules() if model else ():
        prepared = layer.prepared if isinstance(layer, Frozen) and not layer.takes_as_features(x) else layer
        if isinstance(prepared, Prepared):
            values = max(values, prepared.channels * prepared.size**2)
    return max(1, min(most, 4_000_000 // max(1, values)))


def iterations(examples: int, batch_size: int) -> int:
    """Return Qu et al.'s iterations per visit, max(1, ⌊n/b⌋).

    >>> [iterations(n, 16) for n in (5, 33, 70)]
    [1, 2, 4]
    """
    return max(1, examples // batch_size)


def batches(
    x: Tensor,
    y: Tensor,
    batch_size: int,
    shuffle: torch.Generator,
    only: slice = slice(None),
    among: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield max(1, ⌊n/b⌋) full batches of one fresh shuffle: Qu et al.'s iterations per visit.

    Parameters
    ----------
    x : Tensor
        Examples, shape (n, ...), any dtype that `as_input` takes.
    y : Tensor
        Labels, shape (n,).
    batch_size : int
        b; with fewer than b examples the only batch holds all n.
    shuffle : torch.Generator
        On the CPU; it decides the order.
    only : slice
        Which of these batches to yield.
    among : Tensor | None
        The rows of the examples that take part, int64; None: all. Nothing is copied but the batches.
    """
    number = len(y) if among is None else len(among)
    order = torch.randperm(number, generator=shuffle)
    order = (order if among is None else among[order]).to(y.device)
    size = min(batch_size, number)
    chosen = range(iterations(number, batch_size))[only]
    together = max(1, at_once(x, GATHERED * size) // size)
    for first in range(chosen.start, chosen.stop, together):  # several at a time, which is faster
        rows = order[first * size : min(first + together, chosen.stop) * size]
        yield from zip(torch.split(as_input(x.index_select(0, rows)), size), torch.split(y[rows], size), strict=True)


def balanced_rows(labels: Tensor, draws: torch.Generator) -> Tensor:
    """Draw as many rows as there are labels, (n,), with repetition: every class that occurs is equally likely.

    Balanced batches of Alhamoud et al. 2024 (FedMedICL, arXiv:2407.08822), where they rival methods made for shifts.

    Raises
    ------
    ConfigError
        If the labels are no classes.
    """
    require(
        labels.ndim == 1 and not labels.is_floating_point(),
        "batches=balanced draws classes equally often; the labels of this task are no classes: leave it out",
    )
    _, classes, counts = torch.unique(labels.cpu(), return_inverse=True, return_counts=True)
    return torch.multinomial(1 / counts[classes], len(labels), replacement=True, generator=draws)


def held_out(examples: int, shuffle: torch.Generator) -> tuple[Tensor, Tensor]:
    """Hold out a tenth of the examples, at least one: return the rows that are kept and those that are held out.

    A single example is both.
    """
    order = torch.randperm(examples, generator=shuffle)
    cut = max(1, examples // HELD_OUT) if examples > 1 else 0
    return order[cut:], order[: max(1, cut)]


def refuse_single_batches(model: nn.Module, examples: int, batch_size: int) -> None:
    """Raise `TrainingError` where batch norm would normalise over a batch of one."""
    if min(examples, batch_size) < 2 and has_batch_norm(model):
        raise TrainingError(
            f"batch norm needs batches of at least two examples; got {examples} examples in batches of {batch_size}: "
            "choose group norm, model.norm=group or another model, or a larger training.batch-size where there "
            "are more examples"
        )


def late_steps(
    part: nn.Module, optimizer: torch.optim.Optimizer, outputs: Sequence[Tensor], gradients: Sequence[Tensor]
) -> None:
    """Take one optimizer step for each gradient at a part's outputs, all of which were computed before the first step.

    An output and the gradient of its loss there have one shape. The part's parameters step; the optimizer may be over
    others, too, which stay. Inputs that require a gradient find it in `.grad`.
    """
    gradients_of = []
    for output, gradient in zip(outputs, gradients, strict=True):
        if output.requires_grad:  # nothing of the part may train
            torch.autograd.backward(output, gradient)
        gradients_of.append([parameter.grad for parameter in part.parameters()])
        part.zero_grad()
    for taken in gradients_of:
        for parameter, gradient_of in zip(part.parameters(), taken, strict=True):
            parameter.grad = gradient_of
        optimizer.step()
    optimizer.zero_grad()


def mean_loss(losses: list[Tensor]) -> float:
    """Average the losses of a training (one transfer from the device); raise `DivergedError` if one is not finite."""
    mean = float(torch.stack(losses).mean())
    if mean != mean or mean in (float("inf"), float("-inf")):
        raise DivergedError(f"the loss must stay finite; got {mean} in training: lower training.lr and run again")
    return mean
