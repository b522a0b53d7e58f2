"""Options of a run: sections that validate, how they are composed, and which a run is bound to."""

from __future__ import annotations

from flwr_replay.config.privacy import PrivacyConfig
from flwr_replay.config.sections import (
    BATCH,
    PASSES,
    VIEWS,
    GeneratorConfig,
    ModelConfig,
    PartitionConfig,
    PriorConfig,
    ReplayConfig,
    RunConfig,
    TaskConfig,
    TrainingConfig,
    one_of,
    require,
    within,
)

__all__ = [
    "BATCH",
    "PASSES",
    "VIEWS",
    "GeneratorConfig",
    "ModelConfig",
    "PartitionConfig",
    "PriorConfig",
    "PrivacyConfig",
    "ReplayConfig",
    "RunConfig",
    "TaskConfig",
    "TrainingConfig",
    "one_of",
    "require",
    "within",
]
