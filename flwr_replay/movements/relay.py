"""Relay: all institutions train, then parcels pass between them; the server is a mailbox and averages nothing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flwr_replay.movements.base import Movement
from flwr_replay.wire import Request

__all__ = ["Relay"]


class Relay(Movement):
    """Base of the methods in which institutions exchange parcels over a graph, or nothing at all."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.mailbox: dict[str, list[Message]] = {}  # receiver's name to the replies that wait for it

    @abstractmethod
    def parcel(self, server_round: int, waiting: list[Message]) -> Request:
        """Return what an institution receives: the parcels that wait for it."""

    @abstractmethod
    def receivers(self, server_round: int, sender: str) -> list[str]:
        """Return the names of those to whom a sender's parcel goes; none without a graph."""

    @abstractmethod
    def report(self, reply: Message) -> None:
        """Take note of the numbers in a reply."""

    def exchanges_per_round(self) -> int:
        """One."""
        return 1

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Deliver what waits; every institution trains, whether it received anything or not."""
        return [
            self.message(member, self.parcel(server_round, self.mailbox.pop(member.name, [])), config)
            for member in self.members
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Put each parcel into its receivers' mailboxes."""
        for member, reply in self.answers(replies):
            self.report(reply)
            for receiver in self.receivers(server_round, member.name):
                self.mailbox.setdefault(receiver, []).append(reply)
        return ArrayRecord(), None  # the server has no model
