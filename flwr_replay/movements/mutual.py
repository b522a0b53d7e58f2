"""Options and checks of the methods with a private model and a proxy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flwr_replay.config.sections import BATCH, PASSES, TrainingConfig, one_of, require, within
from flwr_replay.learning.tasks import Classification
from flwr_replay.server.settings import Settings

__all__ = ["MutualConfig", "check_pair"]


@dataclass(frozen=True, kw_only=True)
class MutualConfig:
    """Options of the methods with a private model and a proxy; the proxy's own are those of `training`."""

    dp_by_default: ClassVar[str] = "proxy"

    alpha: float = 0.5  # weight of the proxy's answers in the private model's loss; paper: 0.5
    beta: float = 0.5  # weight of the private model's answers in the proxy's loss; paper: 0.5; 0: epsilon is proven
    private_models: tuple[str, ...] = ()  # of conf/model, by turns over the institutions; empty: as the proxy
    private_optimizer: str = ""  # sgd | adam; empty: as training.optimizer
    private_lr: float = 0.0  # 0: as training.lr; falls with it, by lr-step
    private_epochs: int = 0  # passes of the private model alone, learning from the proxy that arrived
    private_batch_size: int = 0  # in these passes; 0: as training.batch-size
    private_shift: int = 0  # pixels by which a batch of these passes is shifted at most, to learn from more answers

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            require(0 <= getattr(self, name) <= 1, f"strategy.{name} lies in [0, 1]; got {getattr(self, name)}")
        one_of("strategy.private-optimizer", self.private_optimizer, ("", "sgd", "adam"))
        for name in ("private_lr", "private_epochs", "private_batch_size", "private_shift"):
            option = f"strategy.{name.replace('_', '-')}"
            require(getattr(self, name) >= 0, f"{option} must not be negative; got {getattr(self, name)}")
        within("strategy.", self, private_epochs=(0, PASSES), private_batch_size=(0, BATCH))

    def instructions(self, training: TrainingConfig, lr: float) -> dict[str, Any]:
        """Return what a request to train says of these options; a learning rate falls as training.lr does."""
        return {
            "alpha": self.alpha,
            "beta": self.beta,
            "private_optimizer": self.private_optimizer or training.optimizer,
            "private_lr": self.private_lr * lr / training.lr if self.private_lr else lr,
            "private_epochs": self.private_epochs,
            "private_batch_size": self.private_batch_size or training.batch_size,
            "private_shift": self.private_shift,
        }


def check_pair(strategy: str, settings: Settings) -> None:
    """Refuse a task without classes, and private models that cannot be built for it."""
    require(
        settings.task is None or isinstance(settings.task, Classification),
        f"strategy={strategy} compares answers as probabilities of classes; got another kind of task: choose a "
        "classification",
    )
    for fresh in settings.private_models:
        fresh(0)
