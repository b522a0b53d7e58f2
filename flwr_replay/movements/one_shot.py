"""One-shot: each institution sends something once, and the server trains on that, one epoch in a round.

At the start of every round the server asks institutions that have not sent it yet. So a late or returning institution
still counts.
"""

from collections.abc import Iterable

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_replay.movements.base import Movement, Outcome

__all__ = ["OneShot"]


class OneShot(Movement):
    """Base of the methods in which the server trains; a method's `exchange_round` is its round."""

    def exchanges_per_round(self) -> int:
        """One epoch at the server; what it trains on comes before the first, or when a late institution joins."""
        return 1

    def data_of(self, answered: list[str]) -> list[str]:
        """Return none: the server trains on what all have sent."""
        return []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nobody to train the model."""
        return []

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Outcome:
        """Change nothing: only the server's training changes the global weights."""
        return None, None
