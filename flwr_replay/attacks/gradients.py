"""Images and labels from a gradient, or from the change of weights after some local steps.

A gradient is the change of weights after one step of SGD with rate 1, so one attack serves FedSGD's gradients and the
weights that FedAvg's institutions send back. It looks for images whose simulated training changes the weights in the
same direction:

    arg min over x̃ of 1 − ⟨Δ(x̃), Δ⟩ / (‖Δ(x̃)‖ ‖Δ‖) + α TV(x̃),  Δ = θ sent − θ back     (Qu et al. 2022, eq. 1)

This is Geiping et al. 2020 (arXiv 2003.14053, eq. 4, and section 6 for local steps). Labels are inferred first, from
the head's bias (Zhao et al. 2020, arXiv 2001.02610; counts as in Yin et al. 2021, arXiv 2104.07586, section 3.1).

Where only a part of the network comes back, Δ is the change of that part; the steps are of all of it.

Where batch norm's statistics come back, they may join: ‖r(x̃) − r‖² / ‖r − r sent‖², summed over layers, where r are a
layer's running means and variances (Yin et al. 2021, eq. 9, who match means and variances of a batch).

What is approximate: the order of an institution's examples over its batches is unknown; here all batches are taken in
the order of the labels given, in every pass. Momentum and weight decay are simulated as PyTorch's SGD does them, from a
fresh optimizer. Adam's steps are simulated as SGD's: the cosine does not see their length, but does see that Adam's
first step has the same size for every weight. DP's clipping and noise are not modelled.

`N` an institution's examples, `n` those behind a message, `C` channels or classes, `H` height, `W` width.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from flwr_replay.attacks.search import Search, minimise, total_variation
from flwr_replay.errors import ConfigError
from flwr_replay.models.layers import Standardize

__all__ = [
    "LocalSteps",
    "change_of",
    "first_input",
    "has_linear_input",
    "invert",
    "is_statistic",
    "label_counts",
    "labels_at_cut",
]

Arrays = Mapping[str, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
PASSED = (Standardize, nn.Flatten)  # layers before the first that has weights


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """The training between two messages; the defaults make its change of weights the gradient."""

    steps: int = 1
    batch_size: int = 0  # 0: all examples
    lr: float = 1.0  # per step
    momentum: float = 0.0
    weight_decay: float = 0.0
    pull: float = 0.0  # μ of FedProx, toward the weights sent

    def rows(self, step: int, examples: int) -> slice:
        """Return the rows of a step's batch: each pass takes max(1, ⌊n/b⌋) batches, in the same order."""
        size = min(self.batch_size or examples, examples)
        place = step % max(1, examples // size)
        return slice(place * size, (place + 1) * size)

    def gradients(self, model: nn.Module, change: Arrays) -> dict[str, Tensor]:
        """Return the gradient behind a change of weights, by name: of one step exactly, of more about the mean.

        Momentum counts a gradient again in each later step; weight decay adds the weights that were sent.
        """
        counted = sum((self.steps - later) * self.momentum**later for later in range(self.steps))
        sent = {name: p.detach() for name, p in model.named_parameters() if name in change}
        return {name: change[name] / (self.lr * counted) - self.weight_decay * p for name, p in sent.items()}


def change_of(
    model: nn.Module, loss: Loss, x_nCHW: Tensor, y_n: Tensor, local: LocalSteps, differentiable: bool = False
) -> dict[str, Tensor]:
    """Simulate local steps: return θ sent − θ back by parameter name, and the running statistics that come back.

    Parameters
    ----------
    model : nn.Module
        The weights sent, in the mode in which institutions train. It is not changed.
    loss : callable
        From outputs and labels to their mean loss.
    x_nCHW, y_n : Tensor
        Examples and labels.
    local : LocalSteps
        The steps.
    differentiable : bool
        Whether gradients are to flow to the images.

    Returns
    -------
    dict of str to Tensor
        One array for each parameter that trains, and for the running means and variances of batch norm.
    """
    sent = {name: p for name, p in model.named_parameters() if p.requires_grad}
    weights = {name: p.detach().requires_grad_() for name, p in sent.items()}
    running = {name: b.detach().clone() for name, b in model.named_buffers() if is_statistic(name)}
    velocity: dict[str, Tensor] = {}
    for step in range(local.steps):
        rows = local.rows(step, len(y_n))
        with _statistics(model, running):
            buffers = {name: b.clone() for name, b in model.named_buffers()}
            value = loss(functional_call(model, {**weights, **buffers}, (x_nCHW[rows],)), y_n[rows])
        gradients = torch.autograd.grad(value, list(weights.values()), create_graph=differentiable, allow_unused=True)
        for (name, weight), gradient in zip(list(weights.items()), gradients, strict=True):
            moved = torch.zeros_like(weight) if gradient is None else gradient
            moved = moved + local.weight_decay * weight if local.weight_decay else moved
            moved = moved + local.pull * (weight - sent[name].detach()) if local.pull else moved
            if local.momentum:
                moved = local.momentum * velocity[name] + moved if step else moved
                velocity[name] = moved
            weights[name] = weight - local.lr * moved
        if not differentiable:
            weights = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
    changes = {name: sent[name].detach() - weight for name, weight in weights.items()}
    arrays = {**changes, **running}
    return arrays if differentiable else {name: array.detach() for name, array in arrays.items()}


def invert(
    model: nn.Module,
    loss: Loss,
    change: Arrays,
    labels_n: Tensor,
    form: tuple[int, int, int],
    local: LocalSteps,
    search: Search,
    seed: int,
) -> Tensor:
    """Look for images whose training changes the weights in the same direction: eq. 1.

    Model, loss and local steps are those of `change_of`, on the device of all arrays. The rate matters where there is
    more than one step.

    Parameters
    ----------
    change : mapping of str to Tensor
        The gradient, or θ sent − θ back, by parameter name; with `search.statistics`, batch norm's running means and
        variances as they came back. Of a network that came back in part, that part.
    labels_n : Tensor
        The labels, as far as the attacker knows or infers them (`label_counts`), or what else the loss takes.
    form : tuple of int
        (C, H, W) of an image.
    search : Search
        α, steps, restarts and the weight of the statistics; choose them by `flwr_replay.attacks.search.tuned`.

    Returns
    -------
    Tensor
        (n, C, H, W) in [0, 1]; in an order that has no meaning.
    """
    model = copy.deepcopy(model)
    names = [name for name, p in model.named_parameters() if p.requires_grad and name in change]
    wanted = torch.cat([change[name].flatten() for name in names])
    sent = {
        name: b.clone()
        for name, b in model.named_buffers()
        if search.statistics and name in change and is_statistic(name)
    }

    def objective(x_nCHW: Tensor) -> Tensor:
        simulated = change_of(model, loss, x_nCHW, labels_n, local, differentiable=True)
        moved = torch.cat([simulated[name].flatten() for name in names])
        cosine = moved @ wanted / (moved.norm() * wanted.norm()).clamp(min=1e-12)
        value: Tensor = 1 - cosine + search.alpha * total_variation(x_nCHW).mean()
        for name, before in sent.items():
            scale = (change[name] - before).square().sum().clamp(min=1e-12)
            value = value + search.statistics * (simulated[name] - change[name]).square().sum() / scale
        return value

    return minimise(objective, (len(labels_n), *form), search, seed, wanted.device)


def first_input(model: nn.Module, gradient: Arrays, form: tuple[int, int, int]) -> Tensor:
    """Return the image behind the gradient of one example, exactly, where the first layer is linear.

    For a unit i of that layer, ∂L/∂W_i = (∂L/∂b_i) x (Phong et al. 2018, doi 10.1109/TIFS.2017.2787987; Geiping et al.
    2020, proposition 3.1). The least-squares solution over all units is x = Σ_i ∂L/∂b_i ∂L/∂W_i / Σ_i (∂L/∂b_i)².

    Parameters
    ----------
    model : nn.Module
        Whose first layers are: perhaps Standardize, perhaps Flatten, Linear with a bias.
    gradient : mapping of str to Tensor
        By parameter name. A change of weights after one step of SGD is as good without weight decay: scale cancels.
    form : tuple of int
        (C, H, W) of the image.

    Returns
    -------
    Tensor
        (1, C, H, W), in the data's own units; so rows of tables come out, too. Of several examples it is a mixture.

    Raises
    ------
    ConfigError
        If the first layer is not linear with a bias, or none of its units was active.
    """
    name, first = next((name, layer) for name, layer in _layers(model) if not isinstance(layer, PASSED))
    if not has_linear_input(model):
        raise ConfigError(f"analytic inversion needs a linear first layer with a bias; got {first}: use matching")
    slopes_K, products_KF = gradient[f"{name}.bias"].double(), gradient[f"{name}.weight"].double()
    squares = slopes_K.square().sum()
    if not squares > 0:
        raise ConfigError("analytic inversion needs an active unit in the first layer; got a gradient of zeros")
    x_1CHW = (slopes_K @ products_KF / squares).float().reshape(1, *form)
    _, entry = _layers(model)[0]
    if isinstance(entry, Standardize):
        x_1CHW = x_1CHW * entry.std_C11 + entry.mean_C11
    return x_1CHW


def has_linear_input(model: nn.Module) -> bool:
    """Say whether `first_input` applies: the image goes into a linear layer with a bias, which trains."""
    first = next(layer for _, layer in _layers(model) if not isinstance(layer, PASSED))
    return isinstance(first, nn.Linear) and isinstance(first.bias, nn.Parameter)


def labels_at_cut(
    head: nn.Module,
    inputs_B: Tensor,
    gradients_B: Tensor,
    losses: Callable[[Tensor, Tensor], Tensor],
    classes: int,
) -> Tensor:
    """Infer labels (B,), int64, where they stay at the institution (SplitNN, share-labels=false).

    The server has sent the head's input s to the institution, gets ∂L/∂s back, and has handed the head on from
    institution to institution itself. It tries every class: the label is the one whose gradient has the largest cosine
    with that which came back (Erdoğan et al. 2022, UnSplit, arXiv 2108.09033, section 3.3). The institution's head
    steps after every batch; only that of the visit's beginning is known.

    Parameters
    ----------
    head : nn.Module
        What follows the cut at the institution. Its layers must not mix examples; it is run in evaluation mode.
    inputs_B : Tensor
        What the head got, (B, ...).
    gradients_B : Tensor
        ∂L/∂s as it came back, (B, ...). Its scale, such as 1 / B, does not matter.
    losses : callable
        From outputs and labels to each example's loss, (B,).
    classes : int
        C.
    """
    head = copy.deepcopy(head).eval()
    cosines = []
    for label in range(classes):
        s_B = inputs_B.detach().clone().requires_grad_()
        labels_B = torch.full((len(s_B),), label, device=s_B.device)
        (gradient_B,) = torch.autograd.grad(losses(head(s_B), labels_B).sum(), s_B)
        cosines.append(F.cosine_similarity(gradient_B.flatten(1), gradients_B.flatten(1), eps=1e-20))
    return torch.stack(cosines, dim=1).argmax(1)


def label_counts(bias_gradient_C: Tensor, examples: int, shares_C: Tensor) -> Tensor:
    """Infer how many examples of each class are behind a gradient of the mean cross-entropy.

    The gradient at the head's bias is g_c = mean over examples of p_c − n_c / n, so n_c = n (p̄_c − g_c). The mean
    prediction p̄ is not known; that on auxiliary images, or on any, stands in. A negative g_c proves that class c is
    there: of one example, only its own class has one, so that its label is certain.

    Parameters
    ----------
    bias_gradient_C : Tensor
        ∂L/∂b of the head, (C,). After local steps, that of `LocalSteps.gradients`, roughly.
    examples : int
        n, which travels with the gradient.
    shares_C : Tensor
        p̄, the model's mean softmax, (C,).

    Returns
    -------
    Tensor
        Counts (C,), int64, that sum to n: the nearest to n (p̄ − g), and at least 1 where g is negative, largest
        counts first.
    """
    wanted_C = (examples * (shares_C - bias_gradient_C).double()).clamp(min=0).cpu()
    counts_C = torch.zeros_like(wanted_C, dtype=torch.int64)
    certain = torch.argsort(bias_gradient_C.cpu())[:examples]
    counts_C[certain[bias_gradient_C.cpu()[certain] < 0]] = 1
    for _ in range(examples - int(counts_C.sum())):  # each goes where most is still missing
        counts_C[(wanted_C - counts_C).argmax()] += 1
    return counts_C


@contextmanager
def _statistics(model: nn.Module, running: dict[str, Tensor]) -> Iterator[None]:
    """Move `running` as batch norm in training mode moves its statistics, but with gradients."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
        def move(layer: nn.Module, inputs: tuple[Tensor]) -> None:
            if not layer.training or not isinstance(layer.momentum, float):
                return
            over = [axis for axis in range(inputs[0].ndim) if axis != 1]
            seen = {"running_mean": inputs[0].mean(over), "running_var": inputs[0].var(over)}
            for kind, value in seen.items():
                running[f"{name}.{kind}"] = torch.lerp(running[f"{name}.{kind}"], value, layer.momentum)

        return move

    norms = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, _BatchNorm)]
    handles = [layer.register_forward_pre_hook(hook(name)) for name, layer in norms]
    yield
    for handle in handles:
        handle.remove()


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, layer) for name, layer in model.named_modules() if not list(layer.children())]


def is_statistic(name: str) -> bool:
    """Say whether an array of a state dict is a running mean or variance of batch norm."""
    return name.endswith((".running_mean", ".running_var"))
