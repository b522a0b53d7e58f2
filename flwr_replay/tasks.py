"""What is learned: the loss, the sums an institution reports over its test shard, and the metrics pooled from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from flwr_replay.config import TaskConfig
from flwr_replay.payloads.common import Evaluation
from flwr_replay.training import as_input

__all__ = ["Classification", "make_task"]


@dataclass(frozen=True)
class Classification:
    """One label of C per example; cross-entropy; accuracy leads."""

    classes: int
    metric = "accuracy"
    higher_is_better = True

    def loss(self, logits_BC: Tensor, y_B: Tensor) -> Tensor:
        """Return the mean cross-entropy, nats."""
        return functional.cross_entropy(logits_BC, y_B)

    def evaluate(self, model: nn.Module, x: Tensor, y: Tensor, batch_size: int = 512) -> Evaluation:
        """Sum up a model's answers over a test shard, in evaluation mode.

        Parameters
        ----------
        model : nn.Module
            Maps (B, ...) to logits (B, C).
        x, y : Tensor
            The shard: examples (n, ...) and labels (n,).
        batch_size : int
            Examples per forward pass; it bounds memory and changes no result.
        """
        model.eval()
        confusion = torch.zeros(self.classes * self.classes, dtype=torch.int64, device=y.device)
        loss = torch.zeros((), device=y.device)
        with torch.inference_mode():
            for x_B, y_B in zip(torch.split(x, batch_size), torch.split(y, batch_size), strict=True):
                logits_BC = model(as_input(x_B))
                loss += functional.cross_entropy(logits_BC, y_B, reduction="sum")
                pairs_B = y_B * self.classes + logits_BC.argmax(1)
                confusion += torch.bincount(pairs_B, minlength=self.classes * self.classes)
        return Evaluation(num_examples=len(y), loss=float(loss) / len(y), confusion=confusion.tolist())

    def empty(self) -> Evaluation:
        """Return the evaluation of nothing: what an answer weighs before there is one."""
        return Evaluation(num_examples=0, loss=0.0, confusion=[0] * self.classes**2)

    def pool(self, evaluations: Sequence[Evaluation]) -> dict[str, float]:
        """Compute each metric from the summed confusion matrices: never an average of averages.

        Balanced accuracy and macro-F1 average over the classes that the pooled shards hold.

        >>> a = Evaluation(num_examples=4, loss=0.5, confusion=[3, 0, 1, 0])
        >>> b = Evaluation(num_examples=1, loss=1.0, confusion=[0, 0, 0, 1])
        >>> {name: round(value, 3) for name, value in Classification(2).pool([a, b]).items()}
        {'accuracy': 0.8, 'balanced-accuracy': 0.75, 'macro-f1': 0.762, 'loss': 0.6}
        """
        confusion_CC = np.sum([e.confusion for e in evaluations], axis=0).reshape(self.classes, self.classes)
        n = int(confusion_CC.sum())
        hits_C, labels_C, guesses_C = confusion_CC.diagonal(), confusion_CC.sum(1), confusion_CC.sum(0)
        held = labels_C > 0
        return {
            "accuracy": float(hits_C.sum() / n),
            "balanced-accuracy": float((hits_C[held] / labels_C[held]).mean()),
            "macro-f1": float((2 * hits_C[held] / (labels_C + guesses_C)[held]).mean()),
            "loss": float(sum(e.loss * e.num_examples for e in evaluations) / n),
        }


def make_task(config: TaskConfig) -> Any:
    """Build the task that a configuration names."""
    return Classification(config.classes)
