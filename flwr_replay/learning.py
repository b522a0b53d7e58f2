"""A classifier's steps at an institution: what a batch is, and what a step on it is.

The loop over the batches stands in each method's file; what is chosen by options that all methods share stands here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flwr_replay.institution import Shard
from flwr_replay.replay.replayer import Replayer
from flwr_replay.training import batches, step

__all__ = ["Learner"]


class Learner:
    """Batches of real examples, with replayed ones beside them if there are any, and plain steps.

    Parameters
    ----------
    model, optimizer : nn.Module, torch.optim.Optimizer
        As they begin this visit.
    task : Any
        Whose loss is minimised.
    batch_size : int
        b, real examples in a batch.
    replayer : Replayer | None
        What is replayed.
    draws : torch.Generator
        Of what is replayed when.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        task: Any,
        batch_size: int,
        replayer: Replayer | None,
        draws: torch.Generator,
    ) -> None:
        self.model, self.optimizer, self.task, self.batch_size = model, optimizer, task, batch_size
        self.replayer, self.draws = replayer, draws

    def batches(self, data: Shard, shuffle: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield x_U and its labels, one pass over the real examples."""  # Qu et al. 2022, Alg. 1, lines 2-4
        real = batches(data.x, data.y, self.batch_size, shuffle)
        return self.replayer.beside(real, self.batch_size, self.draws) if self.replayer else real

    def step(self, x_B: Tensor, y_B: Tensor) -> Tensor:
        """Take a step on a batch: θ ← θ − η ∇L(θ; x_U); return the loss, detached."""
        return step(self.model, self.optimizer, self.task.loss(self.model(x_B), y_B))
