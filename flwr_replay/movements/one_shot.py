"""One-shot: each institution uploads once, then the server trains, one epoch in a round.

At the start of every round the server asks institutions that have not uploaded yet. So a late or returning institution
still counts.
"""

from abc import abstractmethod
from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flwr_replay.movements.base import Movement, Outcome
from flwr_replay.server.members import Member
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import StateDict, array_record, opened

__all__ = ["AtServer", "OneShot"]


class AtServer(Movement):
    """Base of the methods in which the server trains, one epoch in a round, on what institutions have sent before."""

    def exchanges_per_round(self) -> int:
        """One epoch at the server; what it trains on comes before the first, or when a late institution joins."""
        return 1

    def data_of(self, answered: list[str]) -> list[str]:
        """Return none: the server trains on what all have sent."""
        return []

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Outcome:
        """Change nothing: only the server's training changes the global weights."""
        return None, None


class OneShot(AtServer):
    """Base of the methods in which the server trains on uploads in place of the institutions' data."""

    failed_before: int = 0  # how many failures there were before this round's uploads
    at_once: int | None = None  # uploads requested, and so in memory, at a time; None: those of all institutions

    @abstractmethod
    def prepare(self, grid: Grid, exchange: int, arrays: StateDict, config: ConfigRecord) -> None:
        """Do what must be done once before any upload; called at the start of every round."""

    @abstractmethod
    def missing(self, member: Member, exchange: int) -> Request | None:
        """Return the request for the next upload of an institution; None if all its uploads are there."""

    @abstractmethod
    def keep(self, member: Member, reply: Message) -> None:
        """Store one upload as it arrives; a WireError if it is not what was requested."""

    @abstractmethod
    def learn(self, exchange: int, arrays: StateDict) -> tuple[StateDict, float]:
        """Train one epoch at the server; return the whole model's weights and the mean training loss."""

    def stops_without_answers(self) -> bool:
        """Continue with the uploads that are there; `learn` stops the run if there are none."""
        return False

    def exchange_round(self, grid: Grid, exchange: int, arrays: ArrayRecord, config: ConfigRecord) -> Outcome:
        """Collect the missing uploads, chunk by chunk, then train one epoch."""
        weights = opened(arrays)
        self.prepare(grid, exchange, weights, config)
        self.failed_before = len(self.recorder.failures)
        while requests := self.requests(exchange):
            messages = (self.message(member, request, config) for member, request in requests)
            self.exchanger(grid, exchange, messages, take=self.keep, at_once=self.at_once)
            if not self.exchanger.answered:  # those that failed are asked again in the next round
                break
        trained, loss = self.learn(exchange, weights)
        return array_record(trained), MetricRecord({"train-loss": loss})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask each institution for its next missing chunk."""
        return [self.message(member, request, config) for member, request in self.requests(server_round)]

    def requests(self, exchange: int) -> list[tuple[Member, Request]]:
        """Return the institutions with missing uploads, and their requests; without those that failed in this round."""
        failed = {failure["institution"] for failure in self.recorder.failures[self.failed_before :]}
        pairs = [(member, self.missing(member, exchange)) for member in self.members if member.name not in failed]
        return [(member, request) for member, request in pairs if request is not None]
