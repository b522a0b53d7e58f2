"""What server and institutions must agree on: the training, and how images are replayed."""

from __future__ import annotations

from flwr_replay.config.sections import ReplayConfig, TrainingConfig
from flwr_replay.generators.pixelcnn import PixelCNNConfig
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.generators.vqvae2 import VQVAE2Config

__all__ = ["REPLAY", "TRAINING"]

TRAINING = TrainingConfig(optimizer="adam", lr=0.003, batch_size=32)
REPLAY = ReplayPlan(
    ReplayConfig(name="vqvae2"),
    VQVAE2Config(name="vqvae2", width=8, lr=2e-3, lr_halving=0, decay=0.9, epochs=2),
    PixelCNNConfig(name="pixelcnn"),  # used with ReplayConfig(name="pixelcnn") only
    kind="classification",
    channels=1,
    size=8,
    classes=10,
    seed=0,
)
