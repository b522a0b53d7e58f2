"""Central: the server's half; the institution's half is `clients/central.py`.

Source: "Centrally hosted" in Qu et al. 2022, section 4.2; "Joint" in Kalra et al. 2023, section 4.
Idea: One institution has all data. This is the reference for what collaboration without sharing data can reach.
Travels: the weights, to the one institution that trains (`Train`) and back (`Trained`). All institutions evaluate on
their own test shards.

    for each round: θ ← train θ for max(1, ⌊|D|/b⌋) iterations on the union D

Deviations: None. In a deployment the one institution must really hold all data (nodes=1).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flwr_replay.config.sections import one_of
from flwr_replay.config.strategy import StrategyConfig, Traits
from flwr_replay.movements.serial import Serial
from flwr_replay.payloads.common import MOST, Train
from flwr_replay.server.members import Member
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import Weights

__all__ = ["Central", "CentralConfig"]


@dataclass(frozen=True, kw_only=True)
class CentralConfig(StrategyConfig):
    """Options of Central."""

    name = "central"
    traits = Traits(
        own_batches=True,
        pooled=True,
        dp_mechanisms=("classifier",),
        metrics_note="central trains one model on all data pooled: the reference, which needs the data in one place",
    )
    optimizer_state: str = "keep"  # keep: one uninterrupted training | reset: fresh momentum every round

    def __post_init__(self) -> None:
        one_of("strategy.optimizer-state", self.optimizer_state, ("keep", "reset"))

    def dp_passes(self, rounds: int) -> Mapping[str, int]:
        """One pass a round, over the examples of all institutions."""
        return {"classifier": rounds}


class Central(Serial):
    """One institution trains on all data."""

    config_type = CentralConfig
    config: CentralConfig

    def begin_run(self) -> None:
        """Fix a cycle of one visit: to the institution whose name is the first when the run begins."""
        self.itinerary = self.itinerary or self.members.names[:1]
        super().begin_run()

    def data_of(self, answered: list[str]) -> list[str]:
        """Return all institutions: the one that trains holds everybody's data."""
        return self.members.names

    def examples_of(self, member: Member, request: type[Request], instructions: dict[str, Any]) -> range:
        """Allow more than the roll call's total on the union: it also has the data of those that take no part."""
        if instructions.get("pooled") and request.message_type == "train":
            return range(sum(m.num_examples for m in self.members.known), MOST + 1)
        return super().examples_of(member, request, instructions)

    def train_request(self, exchange: int, arrays: Weights) -> Train:
        """Ask for one pass over the union; a single institution's own data are the union."""
        return Train(
            exchange=exchange,
            arrays=arrays,
            run=self.settings.run,
            lr=self.lr(exchange),
            optimizer_state=self.config.optimizer_state,
            pooled=len(self.members.names) > 1,
        )
