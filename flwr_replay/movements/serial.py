"""Serial: one institution's visit is one exchange; a cycle, one pass, visits all.

for each cycle:
    for each institution k of the itinerary, in the order of this cycle:        `turns`
        θ ← train θ at k                                                        one visit, one exchange
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flwr_replay.movements.base import Exchange, Movement
from flwr_replay.payloads.common import Trained
from flwr_replay.server.members import Member
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import StateDict, Weights, array_record

__all__ = ["Serial"]


class Serial(Movement):
    """Base of the methods in which the model itself goes from institution to institution."""

    itinerary: Sequence[str] = ()  # names of the institutions that make a cycle, fixed when the run begins
    turns: Sequence[str]  # whose turn it is in each exchange of the run
    missed: int = 0  # visits in a row that came to nothing

    @abstractmethod
    def train_request(self, server_round: int, arrays: Weights) -> Request:
        """Return what the institution whose turn it is receives."""

    def order(self, cycle: int, names: list[str]) -> list[str]:
        """Return the order of visits in a cycle; the base keeps the order of the names."""
        return names

    def begin_run(self, num_rounds: int) -> None:
        """Fix the itinerary, all that are there unless it is known already, and from it all turns of the run."""
        self.itinerary = self.itinerary or self.members.names
        self.turns = [name for cycle in range(num_rounds) for name in self.order(cycle, list(self.itinerary))]

    def exchanges_per_round(self) -> int:
        """One visit for each institution of the itinerary."""
        return len(self.itinerary)

    def whose_turn(self, server_round: int) -> Member | None:
        """Return the institution that is visited in an exchange; None if it is not there."""
        return self.members.get(self.turns[server_round - 1])

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the model to the institution whose turn it is; a missing one is passed over."""
        member = self.whose_turn(server_round)
        if member is None:
            return []
        return [self.message(member, self.train_request(server_round, arrays), config)]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take the visited institution's model on; without an answer the visit goes to the next."""
        for member, reply in self.answers(replies):
            self.missed = 0
            answer = Trained.decode(reply.content) if member.ours else Trained.from_foreign(reply.content)
            self.recorder.saw(answer.examples_seen)
            metrics: dict[str, Any] = {} if answer.train_loss is None else {"train-loss": answer.train_loss}
            return array_record(answer.arrays), MetricRecord(metrics)
        self.missed += 1
        return None, None

    def forecast(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """One visit to each institution of the itinerary in every round."""
        request, answer = self.train_request(0, arrays), Trained.empty(arrays)
        return [(member, request, answer, num_rounds) for member in self.cycle_members()]

    def cycle_members(self) -> list[Member]:
        """Return who of the itinerary is there."""
        return [member for member in self.members if member.name in self.itinerary]

    def stops_without_answers(self) -> bool:
        """Stop once a whole cycle of visits has come to nothing."""
        return self.missed + 1 >= self.exchanges_per_round()

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Keep the itinerary, so that a resumed run visits in the same order."""
        return {}, {"itinerary": list(self.itinerary)}

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Take the itinerary back."""
        self.itinerary = list(values["itinerary"])
