"""Was this patient's image in the training? Scores of which a higher one says "member", and how well they tell.

loss        −ℓ(x, y): what was trained on has small losses (Yeom et al. 2018, arXiv 1709.01604)
lira        (φ − μ) / σ: how much more confident the model is than models of the attacker's own, trained without x
            (Carlini et al. 2022, arXiv 2112.03570, section VI-C, "offline": one-sided)
nearest     how much nearer x is to what a generator drew than to other images (Chen et al. 2020, arXiv 1909.03935)

φ(x, y) = log(p_y / (1 − p_y)), whose distribution over models is nearly normal (Carlini et al., eq. 4). LiRA's own
score is 1 − P(Z > φ) for the normal distribution of μ and σ; this is its argument, which orders examples alike and does
not end at 1. With fewer than 64 reference models σ is one for all examples, as Carlini et al. recommend.

`n` examples asked about, or members; `m` others; `C` classes, `R` reference models.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from torch import Tensor, nn

from flwr_replay.attacks.distances import distances
from flwr_replay.attacks.intervals import Estimate, auc_estimate, share
from flwr_replay.config.sections import TaskConfig, TrainingConfig, require
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.generators.autoencoder import VQVAE2
from flwr_replay.generators.base import AT_ONCE
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.generators.priors import CodePrior, example_nats
from flwr_replay.learning.tasks import make_task
from flwr_replay.learning.training import batches, make_optimizer, torch_rng
from flwr_replay.models.layers import as_input, step
from flwr_replay.rng import derived_rng, derived_seed

__all__ = [
    "MembershipScores",
    "auc",
    "bootstrapped",
    "equal_label_shares",
    "likelihood_scores",
    "lira_scores",
    "logit_confidences",
    "loss_scores",
    "membership",
    "nearest_scores",
    "reference_models",
    "task_scores",
]

ENOUGH = 64  # reference models for a σ of each example's own
RESAMPLES = 1000  # of the bootstrap


@dataclass(frozen=True)
class MembershipScores:
    """How well an attack's scores tell members from non-members."""

    members: int
    non_members: int
    auc: Estimate  # 0.5: chance
    tpr_at_1_percent: Estimate  # share of members found where at most 1 % of non-members are taken for members
    tpr_at_01_percent: Estimate  # the same at 0.1 %; with fewer than 1,000 non-members: at none


def loss_scores(losses: Callable[[Tensor, Tensor], Tensor], x_n: Tensor, y_n: Tensor, at_once: int = AT_ONCE) -> Tensor:
    """Return −ℓ of each example, (n,).

    `losses` is from examples and labels to each example's loss, (B,): a task's losses of a model in evaluation mode, a
    generator's loss, or a prior's nats. So many as `at_once` are handed over together.
    """
    with torch.no_grad():
        batches = zip(torch.split(x_n, at_once), torch.split(y_n, at_once), strict=True)
        return torch.cat([-losses(as_input(x_B), y_B) for x_B, y_B in batches])


def task_scores(model: nn.Module, config: TaskConfig, x_n: Tensor, y_n: Tensor) -> Tensor:
    """Return −ℓ of each example, (n,), of a task's model in evaluation mode."""
    losses = make_task(config).losses
    return loss_scores(lambda x_B, y_B: losses(model(x_B), y_B), x_n, y_n)


def likelihood_scores(
    prior: CodePrior, generator: VQVAE2, plan: ReplayPlan, x_n: Tensor, y_n: Tensor, at_once: int = AT_ONCE
) -> Tensor:
    """Return how likely a prior finds the codes of each example, (n,), nats; the generator came with the prior."""

    def nats(x_B: Tensor, y_B: Tensor) -> Tensor:
        return example_nats(prior, generator.encode(plan.generator_input(x_B, y_B)), y_B)

    return loss_scores(nats, x_n, y_n, at_once)


def logit_confidences(model: nn.Module, x_n: Tensor, y_n: Tensor) -> Tensor:
    """Return φ = log(p_y / (1 − p_y)) of a classifier in evaluation mode, (n,), computed from logits without p.

    The model's mode is put back.
    """

    def negative(x_B: Tensor, y_B: Tensor) -> Tensor:
        logits_BC: Tensor = model(x_B).double()
        own_B1 = y_B[:, None]
        return logits_BC.scatter(1, own_B1, -torch.inf).logsumexp(1) - logits_BC.gather(1, own_B1)[:, 0]

    training = model.training
    model.eval()
    found_n = loss_scores(negative, x_n, y_n)
    model.train(training)
    return found_n


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
    training, size : TrainingConfig, int
        As like the victim's as the attacker knows; a model has no more than half of the auxiliary examples.
    number : int
        R; after so many `seconds` no further model is begun, if there are two.
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

    A generator drew the latter, and the institution sent them. It was not trained on the auxiliary images: they say how
    near an image like this lies to others anyway.
    """
    nearest = [distances(as_input(x_nCHW), as_input(other)).amin(1) for other in (auxiliary_mCHW, released_rCHW)]
    return (nearest[0] + 1e-9).log() - (nearest[1] + 1e-9).log()


def equal_label_shares(
    member_labels_n: NDArray[np.int64], other_labels_m: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose as many members as non-members of every label: return rows of either, of equal length, sorted.

    Where labels are skewed, a score that tells labels apart would seem to tell members apart. The seed decides which
    are drawn where there are more.
    """
    rng, members, others = derived_rng(seed, "equal label shares"), [], []
    for label in np.intersect1d(member_labels_n, other_labels_m):
        own, foreign = np.flatnonzero(member_labels_n == label), np.flatnonzero(other_labels_m == label)
        size = min(len(own), len(foreign))
        members.append(rng.choice(own, size, replace=False))
        others.append(rng.choice(foreign, size, replace=False))
    if not members:
        raise ConfigError(
            "non-members must share a label with the members; got none that does: choose other auxiliary data"
        )
    return np.sort(np.concatenate(members)), np.sort(np.concatenate(others))


def auc(member_scores_n: NDArray[Any], other_scores_m: NDArray[Any]) -> float:
    """Return the probability that a member has the larger score than another; ties are half.

    It is 0.5 where there are no members, or no others.
    """
    n, m = len(member_scores_n), len(other_scores_m)
    if not n or not m:
        return 0.5
    ranks = rankdata(np.concatenate([member_scores_n, other_scores_m]))
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))


def bootstrapped(member_scores_n: NDArray[Any], other_scores_m: NDArray[Any], seed: int) -> Estimate:
    """Return the AUC with percentiles of a bootstrap, in which members and others are drawn anew."""
    rng, sides = np.random.default_rng(derived_seed(seed, "bootstrap")), (member_scores_n, other_scores_m)
    rows, columns = (rng.integers(0, len(side), (RESAMPLES, len(side))) for side in sides)
    drawn = [auc(member_scores_n[i], other_scores_m[j]) for i, j in zip(rows, columns, strict=True)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Estimate(auc(*sides), float(low), float(high))


def membership(member_scores_n: Tensor, other_scores_m: Tensor) -> MembershipScores:
    """Say how well an attack's scores tell members from others, drawn by `equal_label_shares`.

    Raises
    ------
    DataError
        If a score is not finite.
    """
    members_n, others_m = (scores.double().cpu().numpy() for scores in (member_scores_n, other_scores_m))
    if not np.isfinite(members_n).all() or not np.isfinite(others_m).all():
        raise DataError("the scores of an attack on membership must be finite; a model may have diverged")
    n, m = len(members_n), len(others_m)
    descending_m = np.sort(others_m)[::-1]

    def true_positives(at_most: float) -> Estimate:
        wrong = int(np.flatnonzero(np.arange(m) / m <= at_most)[-1])  # others that may be taken for members
        return share(int((members_n > descending_m[wrong]).sum()), n)

    return MembershipScores(
        members=n,
        non_members=m,
        auc=auc_estimate(auc(members_n, others_m), n, m),
        tpr_at_1_percent=true_positives(0.01),
        tpr_at_01_percent=true_positives(0.001),
    )
