"""What server and institutions must agree on: the training, ProxyFL's options, and the differential privacy."""

from __future__ import annotations

from flwr_replay.config.privacy import PrivacyConfig
from flwr_replay.config.sections import TrainingConfig
from flwr_replay.privacy.plan import Passes, PrivacyPlan
from flwr_replay.strategies.proxyfl import ProxyFLConfig

__all__ = ["OPTIONS", "PRIVACY", "ROUNDS", "TRAINING"]

ROUNDS = 4
TRAINING = TrainingConfig(optimizer="adam", lr=0.01, batch_size=32)
OPTIONS = ProxyFLConfig(beta=0)  # with beta > 0, as in the paper, epsilon is not proven
PRIVACY = PrivacyPlan(
    PrivacyConfig(dp="proxy", sigma=1.0), (Passes("proxy", ROUNDS, TRAINING.batch_size),), unproven=OPTIONS.unproven
)
