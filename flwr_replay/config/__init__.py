"""Options of a run: sections that validate their values, their composition, and the options a run is bound to."""

from flwr_replay.config.strategy import StrategyConfig, Traits

__all__ = ["StrategyConfig", "Traits"]
