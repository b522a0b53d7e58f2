"""What every strategy needs beside its own options."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import Field, dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from flwr_replay.config.sections import TrainingConfig
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.learning.tasks import Task
from flwr_replay.privacy.plan import PrivacyPlan

__all__ = ["Settings", "StrategyConfig"]


class StrategyConfig(Protocol):
    """A strategy's own options: any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def new_id() -> str:
    """Name a run as no other is named: an institution keeps what a run has left from the next one's."""
    return f"run-{secrets.token_hex(8)}"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every strategy needs beside its own options."""

    training: TrainingConfig = field(default_factory=TrainingConfig)
    nodes: int = 1  # institutions to wait for
    seed: int = 0
    evaluate_every: int = 1  # rounds
    external: bool = False  # whenever a model is tested, test it on other institutions' examples too
    forgetting: bool = False  # after every exchange, evaluate on each institution's own training examples too
    timeout: float = 3600  # seconds to wait for an institution's answer
    wait: float = 120  # seconds to wait for `nodes` institutions
    run: str = field(default_factory=new_id)  # what institutions know the run by; their state is kept under it
    task: Task | None = None  # loss and pooled metrics; None: means weighted by number of examples
    model: Callable[[int], nn.Module] | None = None  # builds the backbone from a seed, for strategies that train it
    private_models: tuple[Callable[[int], nn.Module], ...] = ()  # the same of those that never leave, where named
    input_shape: tuple[int, ...] | None = None  # of one example
    device: str | torch.device = "cpu"  # of training at the server
    replay_plan: ReplayPlan | None = None  # what is replayed at the institutions; None: nothing
    privacy: PrivacyPlan | None = None  # what is trained by DP-SGD; None: nothing
