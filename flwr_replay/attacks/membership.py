"""Was this patient's image in the training? Scores of which a higher one says "member".

loss        −ℓ(x, y): what was trained on has small losses (Yeom et al. 2018, arXiv 1709.01604)
lira        (φ − μ) / σ: how much more confident the model is than models of the attacker's own, trained without x
            (Carlini et al. 2022, arXiv 2112.03570, section VI-C, "offline": one-sided)
nearest     how much nearer x is to what a generator drew than to other images (Chen et al. 2020, arXiv 1909.03935)

φ(x, y) = log(p_y / (1 − p_y)), whose distribution over models is nearly normal (Carlini et al., eq. 4). LiRA's own
score is 1 − P(Z > φ) for the normal distribution of μ and σ; this is its argument, which orders examples alike and does
not end at 1. With fewer than 64 reference models σ is one for all examples, as Carlini et al. recommend.

`n` examples asked about, `m` other images, `C` classes, `R` reference models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from flwr_replay.attacks.distances import distances
from flwr_replay.config.sections import TrainingConfig, require
from flwr_replay.generators.base import AT_ONCE
from flwr_replay.learning.training import batches, make_optimizer, step, torch_rng
from flwr_replay.models.layers import as_input
from flwr_replay.rng import derived_seed

__all__ = ["lira_scores", "logit_confidences", "loss_scores", "nearest_scores", "reference_models"]

ENOUGH = 64  # reference models for a σ of each example's own


def loss_scores(losses: Callable[[Tensor, Tensor], Tensor], x_n: Tensor, y_n: Tensor) -> Tensor:
    """Return −ℓ of each example, (n,).

    Parameters
    ----------
    losses : callable
        From examples and labels to each example's loss, (B,): a task's losses of a model in evaluation mode, a
        generator's loss, or a prior's nats.
    x_n, y_n : Tensor
        Examples and labels.
    """
    with torch.no_grad():
        parts = zip(torch.split(x_n, AT_ONCE), torch.split(y_n, AT_ONCE), strict=True)
        return torch.cat([-losses(as_input(x_B), y_B) for x_B, y_B in parts])


def logit_confidences(model: nn.Module, x_n: Tensor, y_n: Tensor) -> Tensor:
    """Return φ = log(p_y / (1 − p_y)) of a classifier in evaluation mode, (n,), computed from logits without p.

    The model's mode is put back.
    """
    training = model.training
    model.eval()
    found = []
    with torch.no_grad():
        for x_B, y_B in zip(torch.split(x_n, AT_ONCE), torch.split(y_n, AT_ONCE), strict=True):
            logits_BC = model(as_input(x_B)).double()
            own_B1 = y_B[:, None]
            others_B = logits_BC.scatter(1, own_B1, -torch.inf).logsumexp(1)
            found.append(logits_BC.gather(1, own_B1)[:, 0] - others_B)
    model.train(training)
    return torch.cat(found)


def lira_scores(model: nn.Module, references: Sequence[nn.Module], x_n: Tensor, y_n: Tensor) -> Tensor:
    """Return (φ − μ) / σ of each example, (n,), against reference models that saw none of them.

    Raises
    ------
    ConfigError
        If there are fewer than two reference models.
    """
    require(len(references) > 1, f"LiRA needs at least two reference models; got {len(references)}")
    without_Rn = torch.stack([logit_confidences(reference, x_n, y_n) for reference in references])
    spread_n = without_Rn.var(0)
    sigma = (spread_n if len(references) >= ENOUGH else spread_n.mean()).sqrt().clamp(min=1e-6)
    scores_n: Tensor = (logit_confidences(model, x_n, y_n) - without_Rn.mean(0)) / sigma
    return scores_n


def reference_models(
    build: Callable[[int], nn.Module],
    loss: Callable[[Tensor, Tensor], Tensor],
    auxiliary_m: Tensor,
    labels_m: Tensor,
    training: TrainingConfig,
    epochs: int,
    size: int,
    number: int,
    seed: int,
    seconds: float = float("inf"),
) -> list[nn.Module]:
    """Train models of the victim's architecture, each on as many random examples as the victim has, or on a half.

    Parameters
    ----------
    build : callable
        From a seed to a model with fresh weights, on the device of the data.
    loss : callable
        From outputs and labels to their mean loss.
    auxiliary_m, labels_m : Tensor
        Examples and labels, of which none is asked about later.
    training : TrainingConfig
        Optimizer, rate and batch size, as like the victim's as the attacker knows.
    epochs : int
        Passes over the examples.
    size : int
        The victim's number of examples; a model has no more than half of the auxiliary ones.
    number : int
        R.
    seed : int
        Of weights, halves and batches.
    seconds : float
        After these no further model is begun, if there are two.
    """
    begun = time.monotonic()
    models: list[nn.Module] = []
    for reference in range(number):
        if len(models) > 1 and time.monotonic() - begun > seconds:
            break
        model = build(derived_seed(seed, "reference", reference)).train()
        draws = torch_rng(seed, "reference", reference, "data")
        own = torch.randperm(len(labels_m), generator=draws)[: min(size, (len(labels_m) + 1) // 2)].to(labels_m.device)
        optimizer = make_optimizer(model, training, training.lr)
        for _ in range(epochs):
            for x_B, y_B in batches(auxiliary_m[own], labels_m[own], training.batch_size, draws):
                step(model, optimizer, loss(model(x_B), y_B))
        models.append(model.eval())
    return models


def nearest_scores(released_rCHW: Tensor, auxiliary_mCHW: Tensor, x_nCHW: Tensor) -> Tensor:
    """Return the log ratio of two distances, (n,): to the nearest auxiliary image, and to the nearest released one.

    Parameters
    ----------
    released_rCHW : Tensor
        What a generator drew and the institution sent, uint8 or in [0, 1].
    auxiliary_mCHW : Tensor
        Images that it was not trained on: they say how near an image like this lies to others anyway.
    x_nCHW : Tensor
        The images asked about.
    """
    nearest = [distances(as_input(x_nCHW), as_input(other)).amin(1) for other in (auxiliary_mCHW, released_rCHW)]
    return (nearest[0] + 1e-9).log() - (nearest[1] + 1e-9).log()
