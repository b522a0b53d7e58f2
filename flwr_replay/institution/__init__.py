"""The institution's half of every method: what it owns, what it lets leave, how it trains and what it remembers."""

from flwr_replay.institution.owner import Institution, Shard

__all__ = ["Institution", "Shard"]
