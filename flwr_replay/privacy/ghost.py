"""Sums of examples' clipped gradients; at linear layers without computing each example's gradient.

At a linear layer the gradient of one example is the outer product of the layer's input and the gradient at its output.
So its norm is the product of their norms (Goodfellow 2015, arXiv 1510.01799), and the clipped sum is one product of
matrices, from the same backward pass (Bu et al. 2023, arXiv 2210.00038). At a convolution an example's gradient is a
sum of such products over places, and is computed.

    for each example i, at each layer:  a_i the input, (p, T);  g_i = ∂loss_i / ∂out_i, (q, T)
    ‖∂loss_i/∂W‖ = ‖a_i‖ ‖g_i‖              where T = 1
                 = ‖g_i a_iᵀ‖                elsewhere
    Σ_i c_i ∂loss_i/∂W = Σ_i c_i g_i a_iᵀ

T is 1 for a linear layer and the number of places for a convolution. Inner products of places would also give the
norm (Bu et al. 2022, arXiv 2205.10683). But in float32 they cancel where activations share a large mean: the norm then
seems to be 0, and nothing is clipped.

This is right where every parameter belongs to a layer that the model calls once, as in `StagedModel`s. All other models
are left to Opacus' hooks (`flwr_replay.privacy.dpsgd`).

Legend: B examples, T places, p inputs, q outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_replay.config.sections import require
from flwr_replay.models.staged import StagedModel

__all__ = ["Ghost", "norms_of"]

UNDERFLOW = 1.5e-154  # a number whose square is subnormal is smaller


@dataclass
class LayerSeen:
    """What one layer has seen of a batch."""

    inputs: Tensor
    outputs: Tensor
    a_BpT: Tensor = field(init=False)
    g_BqT: Tensor = field(init=False)
    g_Bq: Tensor = field(init=False)  # the same, summed over places: the gradients of the bias
    single_Bqp: Tensor | None = None  # of a layer with several places, the examples' own gradients


class Ghost:
    """Clipped sums of one model, for which `serves` is true."""

    def __init__(self, module: nn.Module) -> None:
        self.layers = [layer for layer in layers_of(module) if any(p.requires_grad for p in layer.parameters())]

    @staticmethod
    def serves(module: nn.Module) -> bool:
        """Say whether all trained parameters are those of linear layers and plain convolutions, each called once."""
        parameters = [parameter for layer in layers_of(module) for parameter in layer.parameters(recurse=False)]
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return isinstance(module, StagedModel) and len(trained) == len({*map(id, trained)} & {*map(id, parameters)})

    def add(
        self, sums: dict[int, Tensor], losses: Callable[..., Tensor], batch: tuple[Tensor, ...], scales: Scales
    ) -> Tensor:
        """Add the clipped gradients of some examples to the sums, by the parameters' ids; return their summed loss.

        Parameters
        ----------
        sums : dict[int, Tensor]
            For each trained parameter.
        losses : Callable
            As for `flwr_replay.privacy.dpsgd.clipped_sums`.
        batch : tuple[Tensor, ...]
            Examples, labels, ….
        scales : Callable
            Maps norms (B,) to factors (B,), and to which examples count, bool (B,).

        Raises
        ------
        ConfigError
            From `scales`, if a layer sees parts of an example as rows of its batch.
        """
        with self._watched() as seen:
            loss = losses(*batch).sum()
        called = [(layer, seen[layer]) for layer in self.layers if layer in seen]
        gradients = torch.autograd.grad(loss, [call.outputs for _, call in called], allow_unused=True)
        used = [(*pair, g) for pair, g in zip(called, gradients, strict=True) if g is not None]
        norms_of_layers: list[Tensor] = []
        for layer, call, g in used:
            call.a_BpT, call.g_BqT = matrices(layer, call.inputs, g)
            norms_of_layers.append(norms(call, layer.weight.requires_grad, trains_bias(layer)))
        factors_B, counts_B = scales(torch.linalg.vector_norm(torch.stack(norms_of_layers), dim=0))
        rows = slice(None) if counts_B.all() else counts_B
        for layer, call, _ in used:
            if layer.weight.requires_grad:
                sums[id(layer.weight)] += summed(call, factors_B, rows).reshape(layer.weight.shape)
            if trains_bias(layer):
                sums[id(layer.bias)] += factors_B[rows] @ call.g_Bq[rows]
        return loss.detach()

    @contextmanager
    def _watched(self) -> Iterator[dict[nn.Module, LayerSeen]]:
        """Note each layer's input and output."""
        seen: dict[nn.Module, LayerSeen] = {}

        def note(layer: nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> None:
            require(
                layer not in seen,
                "under differential privacy every layer is called once for a batch; one is called twice: give the "
                "second call a layer of its own",
            )
            seen[layer] = LayerSeen(inputs[0].detach(), outputs)

        hooks = [layer.register_forward_hook(note) for layer in self.layers]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()


Scales = Callable[[Tensor], tuple[Tensor, Tensor]]
Rows = slice | Tensor


def layers_of(module: nn.Module) -> list[nn.Linear | nn.Conv2d]:
    """Return the layers whose gradients are outer products."""
    return [
        layer
        for layer in module.modules()
        if type(layer) is nn.Linear
        or (
            type(layer) is nn.Conv2d
            and layer.groups == 1
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
        )
    ]


def trains_bias(layer: nn.Linear | nn.Conv2d) -> bool:
    """Say whether a layer has a bias that is trained."""
    return layer.bias is not None and layer.bias.requires_grad


def matrices(layer: nn.Linear | nn.Conv2d, inputs: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return a layer's input, (B, p, T), and the gradient at its output, (B, q, T)."""
    if isinstance(layer, nn.Linear):
        a_BTp, g_BTq = (tensor.reshape(len(tensor), -1, tensor.shape[-1]) for tensor in (inputs, gradients))
        return a_BTp.transpose(1, 2), g_BTq.transpose(1, 2)
    a_BpT = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # type: ignore[arg-type]
    return a_BpT, gradients.flatten(2)


def norms(seen: LayerSeen, weight: bool, bias: bool) -> Tensor:
    """Return each example's gradient norm at a layer, (B,), float64: products of squares leave float32's range."""
    seen.g_Bq = seen.g_BqT.squeeze(2) if seen.g_BqT.shape[2] == 1 else seen.g_BqT.sum(2)
    of_bias_B = norms_of(seen.g_Bq)
    norms_of_layers = [of_bias_B] if bias else []
    if weight and seen.a_BpT.shape[2] == 1:
        norms_of_layers.append(norms_of(seen.a_BpT) * of_bias_B)
    elif weight:
        seen.single_Bqp = seen.g_BqT @ seen.a_BpT.transpose(1, 2)
        norms_of_layers.append(norms_of(seen.single_Bqp))
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms_of_layers), dim=0)
    return whole


def norms_of(rows: Tensor) -> Tensor:
    """Return the L2 norm of each row's numbers, (B,), float64; never less than it is where squares leave float64."""
    numbers = rows.flatten(1)
    least = UNDERFLOW * numbers.shape[1] ** 0.5
    norms_B: Tensor = torch.linalg.vector_norm(numbers, dim=1, dtype=torch.float64) + least
    return norms_B


def summed(seen: LayerSeen, factors_B: Tensor, rows: Rows) -> Tensor:
    """Return the sum of the examples' gradients times their factors, (q, p)."""
    if seen.single_Bqp is not None:
        total: Tensor = torch.tensordot(factors_B[rows], seen.single_Bqp[rows], dims=1)
        return total
    weighted_BqT = seen.g_BqT[rows] * factors_B[rows, None, None]
    # Smaller numbers are rounded by more than their last bit, up to twice their size. The input may be so large that
    # their product matters. Without them the product is smaller, never larger.
    weighted_BqT = F.hardshrink(weighted_BqT, torch.finfo(weighted_BqT.dtype).tiny)
    return weighted_BqT.transpose(0, 1).flatten(1) @ seen.a_BpT[rows].transpose(1, 2).flatten(0, 1)
