"""Serial: an exchange is a visit to one institution; a cycle, which is one pass, visits all.

for each cycle:
    for each institution k of the itinerary, in the order of this cycle:        `exchanges`
        θ ← train θ at k                                                        one visit, one exchange
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
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
    """Base of the methods in which one model goes from institution to institution."""

    itinerary: Sequence[str] = ()  # names of the institutions in a cycle, fixed when the run begins
    missed: int = 0  # failed visits in a row
    turn: str = ""  # the institution whose turn it is

    @abstractmethod
    def train_request(self, server_round: int, arrays: Weights) -> Request:
        """Return the request to train for the visited institution."""

    def order(self, cycle: int, names: list[str]) -> list[str]:
        """Return the order of visits in a cycle; in the base class it is that of the names."""
        return names

    def begin_run(self) -> None:
        """Fix the itinerary: all institutions present, unless a checkpoint has named it."""
        self.itinerary = self.itinerary or self.members.names

    def exchanges_per_round(self) -> int:
        """One visit for each institution of the itinerary."""
        return len(self.itinerary)

    def exchanges(self, num_rounds: int) -> Iterator[int]:
        """In every cycle each institution has its turn, which is one exchange."""
        numbers = count(1)
        for cycle in range(num_rounds):
            for name in self.order(cycle, list(self.itinerary)):
                self.turn = name
                yield next(numbers)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the model to the institution whose turn it is, if it is present."""
        member = self.members.get(self.turn)
        if member is None:
            return []
        return [self.message(member, self.train_request(server_round, arrays), config)]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the visited institution's weights; without an answer the next institution gets the old ones."""
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
        answer = Trained.empty(arrays)
        return [(member, self.train_request(0, arrays), answer, num_rounds) for member in self.cycle_members()]

    def cycle_members(self) -> list[Member]:
        """Return the institutions of the itinerary that are present."""
        return [member for member in self.members if member.name in self.itinerary]

    def stops_without_answers(self) -> bool:
        """Stop after a whole cycle of failed visits."""
        return self.missed + 1 >= self.exchanges_per_round()

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return the itinerary, so that a resumed run visits in the same order."""
        return {}, {"itinerary": list(self.itinerary)}

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Restore the itinerary."""
        self.itinerary = list(values["itinerary"])
