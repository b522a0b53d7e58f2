"""Options and checks of the methods with a private model and a proxy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from flwr_replay.config.sections import (
    BATCH,
    NOT_NEGATIVE,
    PASSES,
    Range,
    TaskConfig,
    TrainingConfig,
    one_of,
    require,
    within,
)
from flwr_replay.config.strategy import StrategyConfig, Traits
from flwr_replay.errors import ConfigError
from flwr_replay.learning.tasks import Classification
from flwr_replay.learning.training import unstepped
from flwr_replay.server.settings import Settings
from flwr_replay.wire.records import StateDict

__all__ = ["MutualConfig", "check_pair", "first_state"]


UNPROVEN = (
    "An epsilon here is what the paper counts, and no proof: with beta > 0 the proxy learns from a private model that "
    "has seen all examples without noise, so clipping does not bound what one changes: choose beta=0 for a proof."
)


@dataclass(frozen=True, kw_only=True)
class MutualConfig(StrategyConfig):
    """Options of the methods with a private model and a proxy; the proxy's own are those of `training`."""

    traits = Traits(
        mixes=True,
        takes_fraction=True,
        needs_roll_call=True,
        one_form=True,
        own_models=True,
        private_key="pair",
        supports_draws=True,
        dp_mechanisms=("proxy", "statistics"),
        dp_by_default="proxy",
        metrics_note="with a private model and a proxy, metrics are the private models', which no epsilon covers; an "
        "epsilon in the same column covers only what dp names. The proxies' metrics are named proxy-…",
    )
    chosen_later = ("private_lr", "private_batch_size")  # empty: as training has them
    from_training: ClassVar[Mapping[str, str]] = {"private_optimizer": "optimizer"}

    alpha: float = 0.5  # weight of the proxy's predictions in the private model's loss; paper: 0.5
    beta: float = 0.5  # weight of the private model's predictions in the proxy's loss; paper: 0.5; 0: epsilon is proven
    private_models: tuple[str, ...] = ()  # of conf/model, by turns over the institutions; empty: as the proxy
    private_optimizer: str = ""  # sgd | adam; empty: as training.optimizer
    private_lr: float = 0.0  # 0: as training.lr; falls with it, by lr-step
    private_epochs: int = 0  # passes that the private model trains alone, with the received proxy as its teacher
    private_batch_size: int = 0  # in these passes; 0: as training.batch-size
    listen: str = "loss"  # loss: by alpha | pool: answers are pooled, with weights that fit held-out examples
    holdout: float = 0.1  # listen=pool: share of the own examples that are held out where there is no validation split
    private_shift: int = 0  # largest shift of a batch in these passes, pixels; it gives more predictions to learn from
    optimizer_state: str = "keep"  # keep: both optimizers keep their state | reset: fresh ones every round
    proxy_optimizer: str = "stays"  # stays: as optimizer-state says | travels: with the proxy | reset: every round

    def __post_init__(self) -> None:
        weight = Range(0, 1, "lies in [0, 1]")
        within("strategy.", self, alpha=weight, beta=weight)
        one_of("strategy.listen", self.listen, ("loss", "pool"))
        within("strategy.", self, holdout=Range(0, 1, "is a share between 0 and 1", "()"))
        require(
            self.listen == "loss" or (self.alpha == 0 and self.private_epochs > 0),
            "with listen=pool the private model learns from labels, in passes of its own; got "
            f"alpha={self.alpha:g} and private-epochs={self.private_epochs}: set alpha=0 private-epochs=1",
        )
        one_of("strategy.private-optimizer", self.private_optimizer, ("", "sgd", "adam"))
        within("strategy.", self, private_lr=NOT_NEGATIVE, private_shift=NOT_NEGATIVE)
        within("strategy.", self, private_epochs=(0, PASSES), private_batch_size=(0, BATCH))
        one_of("strategy.optimizer-state", self.optimizer_state, ("keep", "reset"))
        one_of("strategy.proxy-optimizer", self.proxy_optimizer, ("stays", "travels", "reset"))
        require(
            self.proxy_optimizer != "travels" or self.optimizer_state == "keep",
            "a state that travels is kept; got proxy-optimizer=travels with optimizer-state=reset: choose "
            "optimizer-state=keep, or proxy-optimizer=reset",
        )

    def dp_passes(self, rounds: int) -> Mapping[str, int]:
        """The proxy makes one pass a round; the private model needs no DP, since it never leaves."""
        return {"proxy": rounds}

    @property
    def own_images(self) -> bool:
        """Shifted images are others."""
        return super().own_images and not self.private_shift

    @property
    def unproven(self) -> str:
        """Why epsilon is not proven for these options; empty if it is."""
        return UNPROVEN if self.beta > 0 else ""

    def check_task(self, task: TaskConfig) -> None:
        """Refuse to shift examples that are not images, or images by more pixels than they have."""
        shift = self.private_shift
        require(
            not shift or (task.size > 1 and task.format != "bags"),
            f"strategy.private-shift moves images; task={task.name} has none: set private-shift=0",
        )
        require(
            not shift or shift < task.size,
            f"strategy.private-shift moves images by some of their {task.size} pixels; got {shift}: choose fewer",
        )

    def instructions(self, training: TrainingConfig, lr: float) -> dict[str, Any]:
        """Return these options as a request to train states them; private_lr falls with `lr`."""
        return {
            "alpha": self.alpha,
            "beta": self.beta,
            "proxy_optimizer": self.proxy_optimizer,
            "private_optimizer": self.private_optimizer or training.optimizer,
            "private_lr": self.private_lr * lr / training.lr if self.private_lr else lr,
            "private_epochs": self.private_epochs,
            "private_batch_size": self.private_batch_size or training.batch_size,
            "private_shift": self.private_shift,
            **self.listening,
        }

    @property
    def listening(self) -> dict[str, Any]:
        """How private models listen to proxies, as requests state it."""
        return {"listen": self.listen, "holdout": self.holdout}


def check_pair(config: MutualConfig, settings: Settings) -> None:
    """Refuse a task without classes, private models that cannot be built for it, and no state that could travel."""
    training = settings.training
    require(
        config.proxy_optimizer != "travels" or training.optimizer != "sgd" or training.momentum > 0,
        "strategy.proxy-optimizer=travels sends an optimizer's state; optimizer=sgd with momentum=0 has none: set "
        "momentum, choose optimizer=adam, or proxy-optimizer=stays",
    )
    require(
        settings.task is None or isinstance(settings.task, Classification),
        f"strategy={config.name} compares answers as probabilities of classes; got another kind of task: choose a "
        "classification",
    )
    for fresh in settings.private_models:
        fresh(0)


def first_state(config: MutualConfig, settings: Settings) -> StateDict:
    """Return the state of the proxy's optimizer with which a run begins; empty unless it travels."""
    if config.proxy_optimizer != "travels":
        return {}
    if settings.model is None:
        raise ConfigError(
            f"strategy={config.name} with proxy-optimizer=travels needs the proxy: give Settings(model=…)"
        )
    return unstepped(settings.model(0), settings.training)
