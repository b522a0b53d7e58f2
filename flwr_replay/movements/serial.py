"""Serial: one institution's visit is one exchange; a cycle, one pass, visits all."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
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

    itinerary: list[str]  # names of the institutions that make a cycle, fixed when the run begins
    missed: int = 0  # visits in a row that came to nothing

    @abstractmethod
    def visit(self, server_round: int, arrays: Weights) -> Request:
        """Return what the visited institution receives."""

    def order(self, cycle: int, names: list[str]) -> list[str]:
        """Return the order of visits in a cycle; the base keeps the order of the names."""
        return names

    def exchanges_per_round(self) -> int:
        """One visit for each institution that was there when the run began."""
        if not hasattr(self, "itinerary"):
            self.itinerary = self.members.names
        return len(self.itinerary)

    def visited(self, server_round: int) -> Member | None:
        """Return whose turn it is; None if that institution is not there."""
        cycle, turn = divmod(server_round - 1, self.exchanges_per_round())
        return self.members.get(self.order(cycle, self.itinerary)[turn])

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the model to the institution whose turn it is; a missing one is passed over."""
        member = self.visited(server_round)
        if member is None:
            return []
        return [self.message(member, self.visit(server_round, arrays), config)]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take the visited institution's model on; without an answer the visit goes to the next."""
        for member, reply in self.answers(replies):
            self.missed = 0
            answer = Trained.decode(reply.content) if member.ours else Trained.from_foreign(reply.content)
            self.recorder.saw(answer.examples_seen)
            told: dict[str, Any] = {} if answer.train_loss is None else {"train-loss": answer.train_loss}
            return array_record(answer.arrays), MetricRecord(told)
        self.missed += 1
        return None, None

    def forecast(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """One visit to each institution of the itinerary in every round."""
        self.exchanges_per_round()
        members = [member for member in self.members if member.name in self.itinerary]
        return [(member, self.visit(0, arrays), Trained.empty(arrays), num_rounds) for member in members]

    def stops_without_answers(self) -> bool:
        """Stop once a whole cycle of visits has come to nothing."""
        return self.missed + 1 >= self.exchanges_per_round()

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Keep the itinerary, so that a resumed run visits in the same order."""
        return {}, {"itinerary": self.itinerary}

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Take the itinerary back."""
        self.itinerary = list(values["itinerary"])
