"""Steps of DP-SGD (Abadi et al. 2016, arXiv 1607.00133; Qu et al. 2022, Algorithm 3) on any module.

    every example joins a step with probability q = b/|D|                 poisson_batches
    ḡ = Σ_i g_i / max(1, ‖g_i‖₂ / C)                                      clipped_sums
    g = (ḡ + N(0, σ²C² I)) / b,   θ ← θ − η g                             noisy_step

Algorithm 3 as printed adds noise to each example's gradient; DP-SGD adds it once, to the sum. A batch may be of any
size, also empty: then only noise is released. The losses that these functions return are not differentially private.

`B` examples of a batch.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_replay.config.sections import require
from flwr_replay.errors import ConfigError
from flwr_replay.privacy import importing_opacus
from flwr_replay.privacy.accounting import SampledGaussian
from flwr_replay.privacy.ghost import Ghost, norms_of
from flwr_replay.privacy.secret import Stream

__all__ = [
    "ROUNDING",
    "add_clipped",
    "clipped_sums",
    "noisy_step",
    "poisson_batches",
    "refuse_chance",
    "refuse_mixing",
    "scales",
    "single_gradients",
    "trained_parameters",
]

MEMORY = 2**28  # bytes that the gradients of single examples may take at once
ROUNDING = 1 + 1e-5  # float32 must not carry a clipped norm above C

Losses = Callable[..., Tensor]


def refuse_mixing(module: nn.Module) -> None:
    """Raise `ConfigError` where clipping bounds nothing: a layer mixes the examples of a batch, or shares its weights.

    Such layers are batch norm and layers that keep statistics of their inputs: instance norm that tracks them,
    codebooks that move by averages. Layers in evaluation mode mix nothing, frozen ones
    included. A buffer that never changes must not be
    of floating point, or must not be persistent.
    """
    with importing_opacus():
        from opacus.validators import ModuleValidator

    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        require(
            parameter.requires_grad is False or id(parameter) not in names,
            "under differential privacy no two layers may share weights, whose gradients would be clipped one by one; "
            f"{name} is {names.get(id(parameter))}: give each layer its own",
        )
        names[id(parameter)] = name
    for name, layer in module.named_modules():
        require(
            not isinstance(layer, nn.modules.conv._ConvNd) or layer.padding_mode == "zeros",
            "under differential privacy convolutions are padded by zeros; "
            f"{name or 'the module'} has padding_mode={getattr(layer, 'padding_mode', '')}: choose zeros",
        )
        kept = [
            buffer
            for buffer, value in layer.named_buffers(recurse=False)
            if value.is_floating_point() and buffer not in layer._non_persistent_buffers_set
        ]
        if layer.training and (isinstance(layer, _BatchNorm) or kept):
            what = "normalises over the batch" if isinstance(layer, _BatchNorm) else f"keeps {kept[0]!r} of its batches"
            raise ConfigError(
                f"under differential privacy no layer may mix examples; {name or 'the module'} "
                f"({type(layer).__name__}) {what}: for a norm layer choose group norm, "
                "model.norm=group or another model, or freeze it, model.train=head; for a codebook set "
                "generator.codebook=gradient"
            )
    if faults := ModuleValidator.validate(module):
        raise ConfigError(f"the model must have gradients of single examples: {faults[0]}")


def poisson_batches(examples: int, cost: SampledGaussian, stream: Stream) -> Iterator[Tensor]:
    """Yield the row numbers of each step's batch, int64 (B,), ascending; B varies and may be 0.

    Parameters
    ----------
    examples : int
        |D|.
    cost : SampledGaussian
        As charged: its rate is every example's probability to join, its steps are the number of batches.
    stream : Stream
        The masks are as secret as the noise.
    """
    for _ in range(cost.steps):
        yield torch.nonzero(stream.uniform(examples) <= cost.rate).flatten()


def clipped_sums(
    module: nn.Module, losses: Losses, batch: tuple[Tensor, ...], clip: float, size: int = 0
) -> tuple[list[Tensor], Tensor]:
    """Sum the examples' gradients, each scaled down to an L2 norm of at most C over all parameters.

    Parameters
    ----------
    module : nn.Module
        In training mode; none of its layers mixes examples.
    losses : Callable
        Maps the tensors of a batch to the examples' losses, shape (B,), or to their sum, by way of `module`; each
        loss depends on its example alone.
    batch : tuple[Tensor, ...]
        Examples, labels, …, each of shape (B, ...); B may be 0.
    clip : float
        C; infinite: no clipping.
    size : int
        How many examples pass the module at a time; 0: as many as memory allows.

    Returns
    -------
    sums : list[Tensor]
        For each parameter that requires a gradient, in the module's order. Adding or removing one example changes
        them by at most C in the L2 norm. An example whose gradient is not finite adds nothing: noise would not hide
        it.
    loss : Tensor
        The sum of the losses, detached. It is not differentially private.

    Raises
    ------
    ConfigError
        If a layer mixes examples, or sees parts of an example as rows of its batch.
    """
    refuse_mixing(module)
    parameters = trained_parameters(module)
    sums, total = [torch.zeros_like(parameter) for parameter in parameters], parameters[0].new_zeros(())
    at_once = size or single_gradients(module)
    if Ghost.serves(module):
        ghost = Ghost(module)
        by_id = {id(parameter): summed for parameter, summed in zip(parameters, sums, strict=True)}
        for chunk in zip(*(torch.split(tensor, at_once) for tensor in batch), strict=True):
            if len(chunk[0]):
                total += ghost.add(by_id, losses, chunk, partial(scales, clip, len(chunk[0]), sums[0].dtype))
        return sums, total
    with _single_gradients(module) as forget, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # no gradient at the images is wanted
        for chunk in zip(*(torch.split(tensor, at_once) for tensor in batch), strict=True):
            if len(chunk[0]):
                loss = losses(*chunk).sum()
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
                add_clipped(sums, [parameter.grad_sample for parameter in parameters], clip, len(chunk[0]))
                forget()
    return sums, total


@contextmanager
def _single_gradients(module: nn.Module) -> Iterator[Callable[[], None]]:
    """Let backward passes fill each parameter's `grad_sample`; yield a function that empties it again."""
    with importing_opacus():
        from opacus import GradSampleModule

    def contiguous(layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.contiguous() for tensor in inputs)

    # Opacus 1.6 reads other examples' pixels into an example's gradient where a tensor is not contiguous.
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    hooks = [layer.register_forward_pre_hook(contiguous) for layer in convolutions]
    watched = GradSampleModule(module, loss_reduction="sum", strict=False)  # refuse_mixing checks buffers more closely
    try:
        yield lambda: watched.zero_grad(set_to_none=True)
    finally:
        watched.to_standard_module()
        for hook in hooks:
            hook.remove()
        for layer in module.modules():  # after an error Opacus leaves what its hooks kept, to the next batch
            layer.__dict__.pop("activations", None)
            layer.__dict__.pop("max_batch_len", None)


def refuse_chance(module: nn.Module) -> None:
    """Raise `ConfigError` where a layer draws from PyTorch's rng, which is no secret, for each row anew."""
    for name, layer in module.named_modules():
        require(
            not isinstance(layer, nn.modules.dropout._DropoutNd) or not layer.p,
            f"dp=gradient takes all examples in every step, and drops nothing by chance; {name} is a "
            f"{type(layer).__name__}: leave it out",
        )


def single_gradients(module: nn.Module) -> int:
    """Return of how many examples the gradients fit into the memory that they may take at once."""
    size = sum(p.numel() * p.element_size() for p in trained_parameters(module))
    return max(1, MEMORY // int(size))


def trained_parameters(module: nn.Module) -> list[Any]:
    """Return the parameters that require a gradient, in the module's order."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def scales(clip: float, examples: int, dtype: torch.dtype, norms_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor of each example's gradient, and whether the gradient is finite.

    Norms are in float64. A factor that is subnormal in `dtype` would be inexact, and becomes 0.
    """
    require(
        len(norms_B) == examples,
        "every layer must see an example as one row of its batch; some layer sees parts of examples as rows, which "
        "would be clipped one by one: do not fold other axes into the batch's",
    )
    factors_B = (clip / (norms_B * ROUNDING)).clamp(max=1)
    return factors_B.where(factors_B >= torch.finfo(dtype).tiny, 0).to(dtype), norms_B.isfinite()


def add_clipped(sums: list[Tensor], gradients: list[Tensor | None], clip: float, examples: int) -> None:
    """Add the clipped gradients of some examples, each (B, ...); None where the loss does not depend on a parameter."""
    kept = [(summed, gradient) for summed, gradient in zip(sums, gradients, strict=True) if gradient is not None]
    norms = [norms_of(gradient) for _, gradient in kept]
    scale_B, finite_B = scales(clip, examples, sums[0].dtype, torch.linalg.vector_norm(torch.stack(norms), dim=0))
    for summed, gradient in kept:
        summed += torch.tensordot(scale_B[finite_B], gradient if finite_B.all() else gradient[finite_B], dims=1)


def noisy_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: Losses,
    batch: tuple[Tensor, ...],
    *,
    clip: float,
    sigma: float,
    batch_size: int,
    stream: Stream,
    public: tuple[Tensor, ...] = (),
    sums_of: Callable[..., tuple[list[Tensor], Tensor]] = clipped_sums,
) -> Tensor:
    """Take one step of DP-SGD; charge for it first.

    Parameters
    ----------
    module, losses, batch, clip
        As for `clipped_sums`.
    optimizer : torch.optim.Optimizer
        Over the module's parameters. Its use of the noisy gradient adds nothing to epsilon.
    sigma : float
        Noise multiplier; 0 draws none.
    batch_size : int
        b, by which the noisy sum is divided: the expected size, since the batch's own is not public. All public
        examples are counted in it.
    stream : Stream
        Draws the noise.
    public : tuple[Tensor, ...]
        Other examples in the form of a batch, such as replayed ones. Their gradients are neither clipped nor noised.
    sums_of : Callable
        `clipped_sums`, or in an audit one that adds canaries' clipped gradients to its sums.

    Returns
    -------
    Tensor
        The sum of the losses divided by b, detached: the mean loss on average. It is not differentially private.
    """
    parameters = trained_parameters(module)
    plain: Sequence[Tensor | None] = [None] * len(parameters)
    if public and len(public[0]):
        plain = torch.autograd.grad(losses(*public).sum(), parameters, allow_unused=True)
    sums, total = sums_of(module, losses, batch, clip)
    for parameter, summed, added in zip(parameters, sums, plain, strict=True):
        noisy = summed.double()  # the rounding afterwards hides which doubles the noise can be (Mironov 2012)
        if sigma:
            noisy.add_(stream.normal(summed.shape).to(summed.device), alpha=sigma * clip)
        if added is not None:
            noisy += added
        parameter.grad = noisy.div_(batch_size).to(parameter.dtype)
    optimizer.step()
    optimizer.zero_grad()
    return total / batch_size
