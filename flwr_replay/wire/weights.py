"""Modules and optimizers as named arrays, and back."""

import re
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import nn

from flwr_replay.errors import DivergedError, WireError
from flwr_replay.files.tensors import nested, unnested
from flwr_replay.wire.bounds import NEVER_NEGATIVE, STATE, bounded, most_of
from flwr_replay.wire.records import StateDict, Weights, array_record, opened

__all__ = [
    "check_weights",
    "encoded",
    "form_of",
    "joined",
    "load_arrays",
    "load_optimizer_arrays",
    "optimizer_arrays",
    "parted",
    "to_arrays",
]

MOMENT = re.compile(rf"(.*\.)?{STATE}\d+\.exp_avg")  # Adam's running mean m of gradients; v is that of their squares
# By Cauchy and Schwarz m² <= (1 - β1)² / ((1 - β2)(1 - β1² / β2)) v for any gradients: 52.9 v with β 0.9 and 0.999.
# Means over institutions keep it. The rest is for rounding.
MOST_MEAN, ROUNDING = 60.0, 1e-16


def optimizer_arrays(optimizer: torch.optim.Optimizer) -> StateDict:
    """Flatten an optimizer's tensors into named arrays: `<parameter index>.<name>`."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    slots = {
        str(index): {
            name: value.detach().cpu().numpy()
            for name, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        }
        for index, parameter in enumerate(parameters)
    }
    return nested(slots)


def load_optimizer_arrays(optimizer: torch.optim.Optimizer, arrays: StateDict) -> None:
    """Load named arrays into an optimizer of the same parameters, which then writes into these arrays.

    The optimizer's settings, such as the learning rate, are unchanged. Each array is laid out in its parameter's memory
    order, since PyTorch's fused Adam (2.15) assumes equal orders and does not check.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for index, named in unnested(arrays).items():
        parameter, slots[int(index)] = parameters[int(index)], {}
        for slot, array in named.items():
            value = torch.from_numpy(array)
            if value.shape == parameter.shape and not parameter.is_contiguous():
                value = torch.empty_like(parameter, dtype=value.dtype, device="cpu").copy_(value)
            slots[int(index)][slot] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": slots})


def joined(weights: Weights, state: StateDict, under: str = STATE) -> Weights:
    """Add what travels beside a model's weights, such as its optimizer's state; return the weights if there is none."""
    if not state:
        return weights
    record = array_record(weights)
    record.update(array_record({f"{under}{name}": array for name, array in state.items()}))
    return record


def parted(weights: Weights, under: str = STATE) -> tuple[StateDict, StateDict]:
    """Undo `joined`: return the model's weights, and what is beside them, which may be empty."""
    arrays = opened(weights)
    state = {name.removeprefix(under): array for name, array in arrays.items() if name.startswith(under)}
    return {name: array for name, array in arrays.items() if not name.startswith(under)}, state


def to_arrays(module: nn.Module) -> StateDict:
    """Copy a module's weights and buffers into named arrays."""
    return {name: value.detach().cpu().numpy().copy() for name, value in module.state_dict().items()}


def encoded(module: nn.Module) -> ArrayRecord:
    """Encode a module's weights and buffers for a message, with one copy; the module may change afterwards."""
    return array_record({name: value.detach().cpu().numpy() for name, value in module.state_dict().items()})


def form_of(arrays: StateDict) -> str:
    """Return a digest of a model's names, shapes and dtypes."""
    return _digest(tuple((name, array.shape, array.dtype) for name, array in sorted(arrays.items())))


@lru_cache(maxsize=64)
def _digest(form: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]) -> str:
    return sha256("\n".join(f"{name} {shape} {dtype}" for name, shape, dtype in form).encode()).hexdigest()[:16]


def check_weights(arrays: StateDict) -> None:
    """Refuse unusable weights before they are applied to data, since their outputs could reveal the data.

    Raises
    ------
    DivergedError
        If they are not finite, or too large.
    WireError
        If a norm layer's variance is negative: its outputs would be no numbers. If the state of an optimizer beside
        them has negative step counts or squares of gradients, or a mean of gradients that these squares cannot have:
        a step would be as large as its sender likes.
    """
    for name, array in arrays.items():
        most = most_of(name)
        if array.dtype.kind == "f" and not bounded(array, most):
            raise DivergedError(
                f"weights must be finite and at most {most:g} in size; {name!r} is not: lower training.lr"
            )
        if NEVER_NEGATIVE.fullmatch(name) and (array < 0).any():
            raise WireError(
                f"variances, step counts and an optimizer's second moments must not be negative; {name!r} is: send the "
                "state as institutions released it, or its mean, uncorrected"
            )
        squares = arrays.get(f"{name}_sq") if MOMENT.fullmatch(name) else None
        if squares is None or squares.shape != array.shape:  # another form is refused elsewhere
            continue
        if (np.square(array, dtype=np.float64) > MOST_MEAN * np.abs(squares) + ROUNDING).any():
            raise WireError(
                f"a mean of gradients is at most eight times the root of their mean square; {name!r} is larger: send "
                "the state as institutions released it"
            )


def load_arrays(module: nn.Module, weights: Weights) -> None:
    """Copy weights into a module; the names and shapes must be the module's own."""
    arrays, own = opened(weights), module.state_dict()
    if faults := sorted(own.keys() ^ arrays.keys()) or [  # numbers that are not floating have no limit
        n for n in own if own[n].shape != arrays[n].shape or own[n].is_floating_point() != (arrays[n].dtype.kind == "f")
    ]:
        raise WireError(  # a deployed institution sends this text to the server
            f"weights must have the model's own names, shapes and kinds of number; they differ at {faults[0]!r}: use "
            "one model, for examples of one form and one number of classes, everywhere"
        )
    for name, tensor in own.items():
        if tensor.device.type == "cpu":
            np.copyto(tensor.numpy(), arrays[name])
        else:
            tensor.copy_(torch.from_numpy(arrays[name].copy()))
