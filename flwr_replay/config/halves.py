"""Found by name: a method's halves, ours or another package's; the options of a generator or prior."""

import importlib
import sys
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import Any

from flwr_replay.config.catalogue import choices, package_of
from flwr_replay.config.own_code import OURS, import_allowed
from flwr_replay.config.sources import declared, place_of
from flwr_replay.config.strategy import StrategyConfig
from flwr_replay.errors import ConfigError, nearest

__all__ = ["declared_options", "load_client", "load_options", "load_strategy"]

OF_OTHERS = {"strategies": "strategy", "clients": "client"}  # modules in another package, by our packages


@cache
def load_strategy(name: str) -> tuple[type[Any], type[StrategyConfig]]:
    """Return a strategy's class and its config dataclass, found by name in `flwr_replay.strategies`.

    Raises
    ------
    ConfigError
        If the config is not a `StrategyConfig`, which declares what its options mean, or has another name.
    """
    strategy, module = _half("strategies", name, "")
    config = vars(module).get(f"{strategy.__name__}Config")
    if not (isinstance(config, type) and issubclass(config, StrategyConfig)):
        raise ConfigError(
            f"strategy={name} must declare what its options mean: let {strategy.__name__}Config in "
            f"{module.__file__} extend flwr_replay.config.StrategyConfig"
        )
    if getattr(config, "name", "") != name:
        raise ConfigError(
            f"{config.__name__} in {module.__file__} must have the strategy's name: write name = {name!r}"
        )
    return strategy, config


def load_options(group: str, name: str) -> type[Any]:
    """Return the dataclass of a strategy's, generator's or prior's own options."""
    if group == "strategy":
        return load_strategy(name)[1]
    module = vars(importlib.import_module(place_of(group, name)))
    return next(value for key, value in module.items() if key.lower() == f"{name}config")  # type: ignore[no-any-return]


@cache
def declared_options(group: str, name: str) -> type[Any]:
    """Return a class that takes and refuses what that of `load_options` does, without PyTorch if it is ours."""
    place = place_of(group, name)
    if place.startswith(OURS) and place not in sys.modules:
        with suppress(Exception):  # what only importing tells
            return declared(place, f"{name}config")  # type: ignore[no-any-return]
    return load_options(group, name)


@cache
def load_client(name: str, replay: str = "none") -> type[Any]:
    """Return the institution's half of a strategy, found by name in `flwr_replay.clients`, and of drawn features."""
    client, _ = _half("clients", name, "client")
    if replay != "statistics":
        return client
    _, module = _half("clients", "fedstats", "client")
    return type(client.__name__, (module.DrawsClient, client), {})


def _half(package: str, name: str, suffix: str) -> tuple[type[Any], ModuleType]:
    """Return one half of a method, found by its name, and its module."""
    full, file = f"flwr_replay.{package}.{name}", f"{package}/{name}.py"
    if other := package_of(name):
        full = f"{other.package}.{OF_OTHERS[package]}"
        file = f"{full} of the package {other.distribution}"
        module = import_allowed(other.code, full, f"strategy={name}: {file}")
    else:
        try:
            module = importlib.import_module(full)
        except ModuleNotFoundError as error:
            if error.name != full:
                raise
            raise ConfigError(f"a method {name!r} has a file {file}: {nearest(name, choices('strategy'))}") from None
        except TypeError as error:
            if "frozen dataclass" not in str(error):
                raise
            raise ConfigError(f"{file}: {error}: write @dataclass(frozen=True, kw_only=True)") from None
    classes: list[type[Any]] = [value for key, value in vars(module).items() if key.lower() == f"{name}{suffix}"]
    if not classes:
        raise ConfigError(
            f"{file} must have a class of the strategy's name; got none called {name}{suffix}, in any case"
        )
    return classes[0], module
