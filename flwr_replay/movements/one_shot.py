"""One-shot: each institution uploads once, then the server trains, one epoch a round.

Who has not uploaded yet is asked at the start of every round, so that a late or returning institution still counts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flwr_replay.movements.base import Movement
from flwr_replay.server.members import Member
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import StateDict, array_record, opened

__all__ = ["OneShot"]


class OneShot(Movement):
    """Base of the methods in which data-like uploads stand in for the institutions' data."""

    failed_before: int = 0  # number of failures when this round's uploads began
    at_once: int | None = None  # uploads under way, and so in memory; None: as many as there are institutions

    @abstractmethod
    def prepare(self, grid: Grid, server_round: int, arrays: StateDict, config: ConfigRecord) -> None:
        """Do what must be done once before any upload; called at the start of every round."""

    @abstractmethod
    def missing(self, member: Member, server_round: int) -> Request | None:
        """Return the request for what an institution has yet to upload; None if all is there."""

    @abstractmethod
    def keep(self, member: Member, reply: Message) -> None:
        """Store one upload as it arrives.

        Raises
        ------
        WireError
            If it is not what was asked for.
        """

    @abstractmethod
    def learn(self, server_round: int, arrays: StateDict) -> tuple[StateDict, float]:
        """Train one epoch at the server; return the whole model's weights and the mean training loss."""

    def exchanges_per_round(self) -> int:
        """One epoch at the server; uploads precede the first, or come with a late institution."""
        return 1

    def data_of(self, answered: list[str]) -> list[str]:
        """Nobody's: the server trains on what all have uploaded."""
        return []

    def stops_without_answers(self) -> bool:
        """Go on with the uploads that are there; `learn` stops the run if there are none."""
        return False

    def exchange_round(
        self, grid: Grid, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Collect what is missing, chunk by chunk, then train one epoch."""
        weights = opened(arrays)
        self.prepare(grid, server_round, weights, config)
        self.failed_before = len(self.recorder.failures)
        while requests := self.requests(server_round):
            messages = (self.message(member, request, config) for member, request in requests)
            self.exchange(grid, server_round, messages, take=self.keep, at_once=self.at_once)
            if not self.answered:  # who is missing stays missing until the next round
                break
        trained, loss = self.learn(server_round, weights)
        return array_record(trained), MetricRecord({"train-loss": loss})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask each institution for the next chunk that is missing."""
        return [self.message(member, request, config) for member, request in self.requests(server_round)]

    def requests(self, server_round: int) -> list[tuple[Member, Request]]:
        """Return who is asked for what is missing; one that failed to send it is asked again next round."""
        failed = {failure["institution"] for failure in self.recorder.failures[self.failed_before :]}
        pairs = [(member, self.missing(member, server_round)) for member in self.members if member.name not in failed]
        return [(member, request) for member, request in pairs if request is not None]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Change nothing: uploads are stored as they arrive, and the global weights change in `learn` only."""
        return None, None
