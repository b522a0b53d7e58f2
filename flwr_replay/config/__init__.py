"""Options of a run: sections that validate their values, their composition, and the options a run is bound to."""

from __future__ import annotations

from flwr_replay.config.privacy import PrivacyConfig
from flwr_replay.config.run import RunConfig
from flwr_replay.config.sections import (
    BATCH,
    PASSES,
    VIEWS,
    GeneratorConfig,
    ModelConfig,
    PartitionConfig,
    PriorConfig,
    ReplayConfig,
    TaskConfig,
    TrainingConfig,
    one_of,
    require,
    within,
)
from flwr_replay.config.strategy import StrategyConfig, Traits

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
    "StrategyConfig",
    "TaskConfig",
    "TrainingConfig",
    "Traits",
    "one_of",
    "require",
    "within",
]
