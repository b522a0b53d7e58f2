"""What server and institutions must agree on."""

from __future__ import annotations

import torch
from task import Net

from flwr_replay.config.sections import TrainingConfig
from flwr_replay.learning.tasks import Classification

__all__ = ["TASK", "TRAINING", "net"]

TASK = Classification(classes=10)
TRAINING = TrainingConfig(optimizer="adam", lr=0.003, batch_size=32)


def net(seed: int) -> Net:
    """Build the model, with the weights of this seed."""
    torch.manual_seed(seed)
    return Net()
