"""What travels in FedBN: the weights down, and up all of them but batch norm's, which stay at the institution."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from flwr_replay.payloads.common import Train, Trained
from flwr_replay.wire.fields import model
from flwr_replay.wire.records import Weights

__all__ = ["TrainShared", "TrainedShared", "of_norms", "shared"]

T = TypeVar("T")
STATISTICS = ".running_mean"  # ends a name in each of PyTorch's batch norms


def of_norms(arrays: Mapping[str, T]) -> dict[str, T]:
    """Return batch norm's weights, biases and statistics: whatever lies beside a running mean."""
    layers = {name.removesuffix(STATISTICS) for name in arrays if name.endswith(STATISTICS)}
    return {name: array for name, array in arrays.items() if name.rpartition(".")[0] in layers}


def shared(arrays: Mapping[str, T]) -> dict[str, T]:
    """Return all the others."""
    own = of_norms(arrays)
    return {name: array for name, array in arrays.items() if name not in own}


@dataclass(frozen=True, kw_only=True)
class TrainedShared(Trained):
    """Trained weights without batch norm's."""

    arrays: Weights = model(part=shared)


@dataclass(frozen=True, kw_only=True)
class TrainShared(Train, stage="train-shared", answer=TrainedShared):
    """Train these weights with your own batch norm, if you have one; keep it."""
