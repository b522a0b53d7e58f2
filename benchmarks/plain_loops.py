"""FedReplay and ProxyFL without messages, ledgers, policies and files: what an engine's runs are compared with.

One process, one institution after another. The steps of DP-SGD are the package's own; no account is charged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from flwr_replay.config.run import RunConfig
from flwr_replay.institution.budget import DPTraining
from flwr_replay.institution.mutual import Learning, MutualLearner
from flwr_replay.institution.owner import Shard
from flwr_replay.learning.tasks import make_task
from flwr_replay.learning.training import iterations, make_optimizer, torch_rng
from flwr_replay.models import split
from flwr_replay.models.layers import as_input, step
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.topology import mixing_matrix
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.privacy.secret import Stream
from flwr_replay.rng import derived_seed
from flwr_replay.wire.weights import load_arrays, to_arrays

__all__ = ["fedreplay", "proxyfl"]

Owned = Sequence[tuple[Shard, Shard]]  # each institution's training and test examples


def fedreplay(config: RunConfig, owned: Owned) -> Iterator[None]:
    """Train on the union of the latents of an encoder as it begins; each step is an epoch, and a test by all."""
    strategy: Any = config.strategy
    task, size = make_task(config.task), config.training.batch_size
    model = backbone(config.model, config.task)(derived_seed(config.seed, "primary"))
    encoder, primary = split(model, strategy.cut)
    with torch.no_grad():
        latents = torch.cat([encoder.eval()(as_input(train.x)) for train, _ in owned])
    labels = torch.cat([train.y for train, _ in owned])
    whole, optimizer = nn.Sequential(encoder, primary), make_optimizer(primary, config.training, config.training.lr)
    for exchange in range(config.rounds):
        primary.train()
        order = torch.randperm(len(labels), generator=torch_rng(config.seed, exchange))
        for i in range(iterations(len(labels), size)):
            rows = order[i * size : (i + 1) * size]
            step(primary, optimizer, task.loss(primary(latents[rows]), labels[rows]))
        task.pool([task.evaluate(whole, test.x, test.y) for _, test in owned])
        yield


def proxyfl(config: RunConfig, owned: Owned) -> Iterator[None]:
    """Train private models and proxies, mix the proxies, and test both; each step is a round."""
    task, plan, size = make_task(config.task), PrivacyPlan.of(config), config.training.batch_size
    strategy: Any = config.strategy
    assert plan is not None

    def learning(purpose: str) -> Learning:
        model = backbone(config.model, config.task)(derived_seed(config.seed, purpose))
        return Learning(model, make_optimizer(model, config.training, config.training.lr))

    pairs = [(learning("model"), learning("proxy")) for _ in owned]
    for t in range(config.rounds):
        for (phi, theta), (train, _) in zip(pairs, owned, strict=True):
            cost = plan.cost("proxy", len(train), 1)
            dp = DPTraining(plan.config.clip_of("proxy"), cost, Stream(os.urandom(32)))
            learner = MutualLearner(phi, theta, task, strategy, size, dp)
            phi.model.train()
            theta.model.train()
            for x_B, y_B in learner.batches(train, torch_rng(config.seed, t)):
                learner.step(x_B, y_B)
        released = [to_arrays(theta.model) for _, theta in pairs]
        shares = mixing_matrix(strategy.topology, len(pairs), t)
        for k, (_, theta) in enumerate(pairs):
            kept = [(float(shares[k][j]), arrays) for j, arrays in enumerate(released) if shares[k][j]]
            load_arrays(theta.model, {name: sum(p * models[name] for p, models in kept) for name in released[k]})
        for models in zip(*pairs, strict=True):  # the private models, then the proxies
            task.pool(
                [task.evaluate(half.model, test.x, test.y) for half, (_, test) in zip(models, owned, strict=True)]
            )
        yield
