"""What is refused before a run begins, and what is said: options that do not fit the method."""

from collections.abc import Callable
from functools import partial
from typing import Any

from flwr_replay.config.catalogue import brought, choices
from flwr_replay.config.halves import load_strategy
from flwr_replay.config.sections import require
from flwr_replay.errors import ConfigError, refuse_each
from flwr_replay.learning.draws import frozen_features
from flwr_replay.learning.training import refuse_single_batches
from flwr_replay.movements.evaluating import RunState
from flwr_replay.payloads.fedstats import pairs_of
from flwr_replay.privacy.dpsgd import refuse_mixing
from flwr_replay.privacy.plan import GRADIENT, UPDATE
from flwr_replay.server.settings import Settings

__all__ = ["refuse_fraction", "refuse_options", "say_what_differs"]


def refuse_options(method: Any, settings: Settings) -> None:
    """Refuse replay, DP and tests before mixing where a method has none, and batches of one under batch norm."""
    traits, name, privacy = method.traits(), method.config_type.name, settings.privacy
    wanted = privacy.mechanisms if privacy else ()
    checks: list[Callable[[], object]] = [
        partial(_refuse_replay, method, settings),
        lambda: require(
            (traits.mixes and UPDATE not in wanted) or not settings.evaluate_before_mixing,
            "evaluate-before-mixing is for methods that average or mix models, not noisy updates; got strategy="
            f"{name}, mixes={traits.mixes}: leave it out",
        ),
        partial(refuse_fraction, method, settings),
    ]
    if privacy:
        checks.append(partial(privacy.check_method, name, traits.dp_mechanisms))
    if settings.model is not None:
        model, batch_size = settings.model(0), settings.training.batch_size
        if {"classifier", "encoder", "proxy", GRADIENT, UPDATE} & set(wanted):
            checks.append(partial(refuse_mixing, model))
        if privacy and privacy.institutions:
            checks.append(partial(privacy.check_room, sum(tensor.numel() for tensor in model.state_dict().values())))
        checks.append(partial(refuse_single_batches, model, batch_size, batch_size))
    refuse_each(*checks)


def _refuse_replay(method: Any, settings: Settings) -> None:
    replays = settings.replay_plan or (settings.synthesis and settings.synthesis.replays)
    if settings.replay_plan and settings.replay_plan.replay.name == "statistics":
        if not method.traits().supports_draws:
            raise ConfigError(
                f"replay=statistics is for strategy={methods_with('supports_draws')}; got {method.config_type.name} "
                "(no supports_draws in its Traits): choose one of them, or another replay"
            )
        if settings.model is not None:
            features = frozen_features(settings.model(0))
            if settings.privacy and settings.privacy.institutions:
                settings.privacy.check_room(pairs_of(features))
    elif replays and not method.traits().supports_replay:
        raise ConfigError(
            f"replay is for serial and parallel methods; got strategy={method.config_type.name} (no supports_"
            f"replay in its Traits): choose replay=none, or strategy={methods_with('supports_replay')}"
        )


def refuse_fraction(method: Any, settings: Settings) -> None:
    """Refuse a fraction where every institution must take part in every round."""
    if settings.fraction < 1 and not method.traits().takes_fraction:
        raise ConfigError(
            f"fraction is for methods that can train in a round with some of the institutions; got strategy="
            f"{method.config_type.name} (no takes_fraction in its Traits): leave it out, or choose strategy="
            f"{methods_with('takes_fraction')}"
        )


def say_what_differs(method: Any, run: RunState) -> None:
    """Log a learning rate that replaces the settings', and proxies without noise."""
    lr, privacy = run.train_config.get("lr"), method.settings.privacy
    if lr is not None and lr != method.settings.training.lr and method.members.ours:
        method.recorder.log(
            f"lr={lr!r} of train_config replaces training.lr={method.settings.training.lr:g} in all training at the "
            "institutions, generators for replay included: leave lr out of train_config if this is not meant"
        )
    if method.traits().dp_by_default == "proxy" and not (privacy and {"proxy", UPDATE} & {*privacy.mechanisms}):
        method.recorder.log(
            f"{type(method).__name__}: no privacy= that covers proxies: they are trained without noise, and have no "
            "epsilon"
        )


def methods_with(trait: str) -> str:
    """Return the names of this package's methods that have a trait, joined by commas."""
    ours = [name for name in choices("strategy") if name not in brought()["strategy"]]
    return ", ".join(name for name in ours if getattr(load_strategy(name)[1].traits, trait))
