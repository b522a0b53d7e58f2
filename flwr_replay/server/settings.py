"""Settings: what every strategy needs in addition to its own options."""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from flwr_replay.config.hiding import Hiding
from flwr_replay.config.sections import SHARE, Named, TrainingConfig, one_of, require, within
from flwr_replay.config.strategy import StrategyConfig
from flwr_replay.errors import refuse_all
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.generators.synthesis import SynthesisPlan
from flwr_replay.learning.tasks import Task
from flwr_replay.models.seeding import builder_of
from flwr_replay.privacy.plan import PrivacyPlan

__all__ = ["Settings", "checked_arguments"]

KINDS: dict[str, type] = {  # of what a user's own app is likely to mistake
    "nodes": int,
    "training": TrainingConfig,
    "task": Task,
    "replay_plan": ReplayPlan,
    "synthesis": SynthesisPlan,
    "privacy": PrivacyPlan,
}


@dataclass(frozen=True, kw_only=True)
class Settings(Named):
    """What every strategy needs in addition to its own options.

    Raises
    ------
    ConfigError
        If an argument is of another type, or `model` builds none.
    """

    training: TrainingConfig = field(default_factory=TrainingConfig)
    nodes: int = 0  # institutions to wait for; 0: all that a simulation has
    roll_call: bool = False  # whether all nodes run this package's client, so that the server asks who they are
    seed: int = 0
    fraction: float = 1.0  # of the institutions that train in a round, in (0, 1]; all evaluate
    evaluate_every: int = 1  # rounds
    split: str = "test"  # examples by which rounds are judged: test | validation, then the last one on test, too
    external: bool = False  # with every evaluation, also evaluate on other institutions' examples
    evaluate_before_mixing: bool = False  # with every evaluation, also evaluate models as they were trained
    forgetting: bool = False  # after every exchange, also evaluate on each institution's training examples
    timeout: float = 3600  # seconds to wait for an institution's answer
    wait: float = 120  # seconds to wait for `nodes` institutions
    clinics: tuple[str, ...] = ()  # their names, so that who is missing is named; empty: not known
    # the run's id, which is unique: institutions keep their state under it
    run: str = field(default_factory=lambda: f"run-{secrets.token_hex(8)}")
    hiding: Hiding = Hiding.NOTHING  # what institutions hide from the server: by seals all, by masks all but a mean
    record: str = ""  # which messages the server keeps, as the roll call announces it: up, all, or empty for none
    task: Task | None = None  # loss and pooled metrics; None: metrics are means weighted by numbers of examples
    model: Callable[..., nn.Module] | None = None  # builds the backbone, for training at the server
    frozen: str = ""  # SHA-256 of what does not train in it, which institutions compare; empty: all of it trains
    private_models: tuple[Callable[[int], nn.Module], ...] = ()  # build the private models that the options name
    input_shape: tuple[int, ...] | None = None  # of one example
    device: str | torch.device = "cpu"  # of training at the server
    replay_plan: ReplayPlan | None = None  # None: no replay
    synthesis: SynthesisPlan | None = None  # None: institutions draw no images
    privacy: PrivacyPlan | None = None  # None: nothing is trained by DP-SGD

    def __post_init__(self) -> None:
        faults = []
        for name, kind in KINDS.items():
            value = getattr(self, name)
            if not (isinstance(value, kind) or (value is None and name not in ("nodes", "training"))):
                got = f"{value!r} of type {type(value).__name__}"
                faults.append(f"Settings({name}=…) must be of type {kind.__name__}; got {got}")
        refuse_all(faults)
        one_of("Settings(split=…)", self.split, ("test", "validation"))
        require(self.nodes >= 0, f"Settings(nodes=…) must be at least 0; got {self.nodes}")
        within("Settings: ", self, fraction=SHARE)
        if self.model is not None:
            object.__setattr__(self, "model", builder_of(self.model))


def checked_arguments(
    name: str,
    options: type[StrategyConfig],
    config: StrategyConfig | None,
    settings: Settings | None,
    unknown: Iterable[str],
) -> tuple[StrategyConfig, Settings]:
    """Return a strategy's options and settings, the defaults for None."""
    require(
        not unknown,
        f"{name} takes options, settings= and recorder=; got {', '.join(unknown)}: write {name}("
        f"{options.__name__}(…), settings=Settings(nodes=…)). Settings(fraction=…) says how many train in "
        "a round; all evaluate",
    )
    known_as = f"{name} takes its options, then settings=Settings(…); got"
    require(
        config is None or isinstance(config, options),
        f"{known_as} {type(config).__name__} as its options: give {options.__name__}(…), or name settings=",
    )
    require(
        settings is None or isinstance(settings, Settings),
        f"{known_as} settings={type(settings).__name__}: give Settings(…)",
    )
    return config or options(), settings or Settings()
