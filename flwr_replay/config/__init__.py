"""Options of a run: sections that validate their values, their composition, and the options a run is bound to."""

from __future__ import annotations

from flwr_replay.config.strategy import StrategyConfig, Traits

__all__ = ["StrategyConfig", "Traits"]
