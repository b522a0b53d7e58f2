"""The contracts of what others write: strategies, partitions, attacks."""

from flwr_replay.check.own_code import check_attack, check_partition
from flwr_replay.check.strategy import check_strategy

__all__ = ["check_attack", "check_partition", "check_strategy"]
