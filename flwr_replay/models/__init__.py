"""Backbones: every model is an ordered list of named stages, and can be cut after each of them.

>>> from flwr_replay.config.model import ModelConfig
>>> from flwr_replay.config.sections import TaskConfig
>>> task = TaskConfig(name="digits", format="digits", channels=1, size=8, classes=10)
>>> model = build(ModelConfig(name="mlp", width=200), task, seed=0)
>>> encoder, primary = split(model, "hidden1")
>>> encoder.stages, primary.stages
(('hidden1',), ('hidden2', 'head'))
"""

from flwr_replay.models.layers import Prepared
from flwr_replay.models.staged import Part, StagedModel, has_batch_norm, placed, split, split_before_head, staged
from flwr_replay.models.zoo import build

__all__ = [
    "Part",
    "Prepared",
    "StagedModel",
    "build",
    "has_batch_norm",
    "placed",
    "split",
    "split_before_head",
    "staged",
]
