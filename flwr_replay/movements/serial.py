"""Serial: an exchange is a visit to one institution; a cycle, which is one pass, visits all, or a fraction of them.

for each cycle:
    for each institution k of this cycle, in its order:                         `visits`
        θ ← train θ at k                                                        `visited`: one visit, one exchange

Failures: Who is absent, or gives no valid answer, is passed over, and the next institution gets the old weights. The
run stops, and can be resumed, once visits to all have failed since the last that succeeded.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_replay.movements.base import Exchange, Movement, Outcome
from flwr_replay.movements.evaluating import own_metrics, trained_metrics
from flwr_replay.movements.participation import participants
from flwr_replay.payloads.common import Trained
from flwr_replay.server.members import Member
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import StateDict, Weights, array_record

__all__ = ["Serial"]


class Serial(Movement):
    """Base of the methods in which one model goes from institution to institution."""

    itinerary: Sequence[str] = ()  # names of the institutions that are visited, fixed when the run begins
    missed: frozenset[str] = frozenset()  # whose visits have not succeeded since the last that did

    @abstractmethod
    def train_request(self, exchange: int, arrays: Weights) -> Request:
        """Return the request to train for the visited institution."""

    def order(self, cycle: int, names: list[str]) -> list[str]:
        """Return the order of visits in a cycle; in the base class it is that of the names."""
        return names

    def visits(self, cycles: Iterable[int]) -> Iterator[tuple[int, str]]:
        """Go through the visits of these cycles, counted from 0: the cycle, and the institution's name."""
        drawn = self.itinerary, self.settings.fraction, self.settings.seed
        for cycle in cycles:
            for institution in self.order(cycle, participants(*drawn, cycle)):
                yield cycle, institution

    def begin_run(self) -> None:
        """Fix the itinerary: all institutions present, unless a checkpoint has named it."""
        self.itinerary = self.itinerary or self.members.names
        self.listed, self.coming = list[str](), self.visits(count())
        self.in_cycle = len([*self.visits([0])])

    def exchanges_per_round(self) -> int:
        """As many as a cycle has visits."""
        return self.in_cycle

    def visited(self, exchange: int) -> Member | None:
        """Return the institution that an exchange visits, if it is present; its visit counts as missed till it ends."""
        while len(self.listed) < exchange:
            self.listed.append(next(self.coming)[1])
        institution = self.listed[exchange - 1]
        self.missed |= {institution}
        return self.members.get(institution)

    def trains_in(self, num_rounds: int) -> Mapping[str, Sequence[int]]:
        """Return the cycles in which each institution is visited, from 1; without a fraction these are all."""
        if self.settings.fraction == 1:
            return super().trains_in(num_rounds)
        cycles: dict[str, list[int]] = {}
        for cycle, name in self.visits(range(num_rounds)):
            cycles.setdefault(name, []).append(cycle + 1)
        return cycles

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the model to the institution whose turn it is, if it is present."""
        member = self.visited(server_round)
        return [self.message(member, self.train_request(server_round, arrays), config)] if member else []

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Outcome:
        """Return the visited institution's weights; without an answer the next institution gets the old ones."""
        for member, reply in self.answers(replies):
            self.missed = frozenset()
            answer = Trained.decode(reply.content) if member.ours else Trained.from_foreign(reply.content)
            self.recorder.saw(answer.examples_seen)
            return array_record(answer.arrays), trained_metrics([(answer, own_metrics(member, reply))])
        return None, None

    def forecast(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """One visit in every cycle that an institution belongs to; in a sealed run the first gets no weights."""
        travelling = self.travelling(arrays)
        request, answer = self.train_request(0, travelling), Trained.blank(travelling)
        exchanges = self.every_round(((m, request, answer, 1) for m in self.cycle_members()), num_rounds)
        if not self.settings.hiding.readable:
            first = self.members.get(next(self.visits([0]))[1])
            exchanges = [(m, request, reply, number - (m is first)) for m, request, reply, number in exchanges]
            exchanges += [(first, self.train_request(0, {}), answer, 1)] if first else []
        return exchanges

    def cycle_members(self) -> list[Member]:
        """Return the institutions of the itinerary that are present."""
        visited = {*self.itinerary}
        return [member for member in self.members if member.name in visited]

    def stops_without_answers(self) -> bool:
        """Stop once visits to all have failed in a row: in another order the same one may be visited twice."""
        return self.missed >= {*self.itinerary}

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return the itinerary, so that a resumed run visits in the same order."""
        return {}, {"itinerary": list(self.itinerary)}

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Restore the itinerary."""
        self.itinerary = list(values["itinerary"])
