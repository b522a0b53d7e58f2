"""A classifier's batches and steps, with what all methods share: replayed examples, and DP.

A pass has max(1, ⌊n/b⌋) full batches of one shuffle. A step takes the task's mean loss: of classes the cross-entropy.
"""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flwr_replay.config.sections import require
from flwr_replay.errors import TrainingError
from flwr_replay.generators.sampler import ReplaySampler
from flwr_replay.institution.budget import DPTraining
from flwr_replay.institution.owner import Shard
from flwr_replay.learning.augment import Augment, changed
from flwr_replay.learning.tasks import Task
from flwr_replay.learning.training import balanced_rows, batches, mean_loss
from flwr_replay.models.layers import step

__all__ = ["Learner", "mixed_batches"]

SILENT = 30  # seconds between two lines in the log


class Learner:
    """Batches of real examples, with replayed ones where there is replay, and steps, by DP-SGD where it was charged.

    Parameters
    ----------
    model, optimizer : nn.Module, torch.optim.Optimizer
        As they are at the start of this training.
    task : Task
        Whose loss is minimised.
    batch_size : int
        b, real examples in a batch.
    sampler : ReplaySampler | None
        Draws the replayed examples; None: no replay.
    rng : torch.Generator
        Chooses the replayed examples of each batch.
    dp : DPTraining | None
        Charged steps of DP-SGD; None: plain steps on shuffled batches.
    augment : Augment | None
        Changes the images of a batch at random, and masks with them; None: they stay as they are.
    balanced : bool
        Draw classes equally often, with repetition; else every example once.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        task: Task,
        batch_size: int,
        sampler: ReplaySampler | None,
        rng: torch.Generator,
        dp: DPTraining | None = None,
        augment: Augment | None = None,
        balanced: bool = False,
    ) -> None:
        self.model, self.optimizer, self.task, self.batch_size = model, optimizer, task, batch_size
        self.sampler, self.rng, self.dp, self.augment, self.balanced = sampler, rng, dp, augment, balanced
        self.losses: list[Tensor] = []
        self.seen = 0  # examples, with repetition; under DP their expected number
        self.began = self.told = time.monotonic()
        self.steps = 0  # taken; under DP-SGD as many as were charged, whatever the Poisson batches hold

    def batches(self, data: Shard, shuffle: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield x_U and its labels, one pass over the real examples."""  # Qu et al. 2022, Alg. 1, lines 2-4
        require(not (self.balanced and self.dp), "batches=balanced is not for training under DP: leave one of them out")
        among = balanced_rows(data.y, shuffle) if self.balanced else None
        plain = batches(data.x, data.y, self.batch_size, shuffle, among=among)
        real = self.dp.batches(data) if self.dp else plain
        mixed = mixed_batches(real, self.sampler, self.batch_size, self.rng) if self.sampler else real
        return changed(mixed, self.augment)

    def step(self, x_B: Tensor, y_B: Tensor, penalty: Tensor | Callable[[], Tensor] | None = None) -> None:
        """Take a step on a batch: θ ← θ − η ∇(L(θ; x_U) + penalty). The reported loss has no penalty.

        A penalty that needs what the model made of the batch is a function, called after that. Under DP a penalty is a
        TrainingError: the clipped gradients of single examples do not hold it.
        """
        self.steps += 1
        if (now := time.monotonic()) - self.told >= SILENT:  # a visit may take hours
            pace = self.steps / (now - self.began)
            logging.getLogger("flwr").info("%s steps in this visit so far, %.3g a second", f"{self.steps:,}", pace)
            self.told = now
        num_replayed = self.sampler.beside(self.batch_size) if self.sampler else 0
        if self.dp:
            if penalty is not None:
                raise TrainingError("a step of DP-SGD has no penalty: leave classifier out of dp_mechanisms")
            self.dp.step(self.model, self.optimizer, self._losses, (x_B, y_B), self.batch_size, num_replayed)
            self.seen += self.batch_size + num_replayed
            return
        loss = self.task.loss(self.model(x_B), y_B)
        self.losses.append(loss.detach())
        extra = penalty() if callable(penalty) else penalty  # a Tensor is not callable
        step(self.model, self.optimizer, loss if extra is None else loss + extra)
        self.seen += len(y_B)

    @property
    def counts(self) -> dict[str, Any]:
        """What an answer says of this training: examples seen and steps taken."""
        return {"examples_seen": self.seen, "num_steps": self.steps}

    def train_loss(self) -> float | None:
        """Return the mean loss of the steps; None under DP, since it has no noise."""
        return None if self.dp else mean_loss(self.losses)

    def _losses(self, x_B: Tensor, y_B: Tensor) -> Tensor:
        return self.task.losses(self.model(x_B), y_B)


def mixed_batches(
    real: Iterator[tuple[Tensor, Tensor]], sampler: ReplaySampler, batch_size: int, rng: torch.Generator, first: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every batch of real examples with replayed ones before them: x_U ← {x^r, x_k} (Alg. 1, lines 2-4).

    The ratio applies to `batch_size`, b; `first` is the number of the first of these batches within the training.
    """
    replayed = sampler.batches(sampler.beside(batch_size), rng, first)  # decoded as they are drawn
    for x_B, y_B in real:
        x_R, y_R = sampler.example(*next(replayed))
        yield torch.cat([x_R.to(x_B.device), x_B]), torch.cat([y_R.to(y_B), y_B])
