"""Relay: every institution trains a model; the server has no global one and averages nothing.

Models stay (Local), are mixed with others' over a graph (`gossip.py`), or hop from place to place (FedER, `hops.py`).
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_replay.config.sections import require
from flwr_replay.movements.base import Exchange, Outcome
from flwr_replay.movements.participation import AtOnce, number_chosen
from flwr_replay.server.members import Member
from flwr_replay.wire.payload import Payload, Request
from flwr_replay.wire.records import StateDict

__all__ = ["Relay"]


class Relay(AtOnce):
    """Base of the methods without a global model; in this base each institution keeps its own."""

    answer: ClassVar[type[Payload]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "config_type" in vars(cls):
            require(
                cls.config_type.traits.own_models and not cls.config_type.traits.global_model,
                f"in a relay institutions have models of their own, and the server none; {cls.config_type.__name__} "
                "does not say so: write own_models=True, global_model=False in its traits",
            )

    @abstractmethod
    def train_request(self, exchange: int, member: Member) -> Request:
        """Return the request to train for one institution."""

    def begin_run(self) -> None:
        """Say, and note for the result, that a fraction of one institution leaves nobody to exchange models with."""
        fraction, among = self.settings.fraction, len(self.members)
        if self.traits().relayed and number_chosen(among, fraction) == 1 < among:
            note = f"fraction={fraction:g} draws one of {among} institutions for a round: no model goes to another"
            self.recorder.notes["draws-one"] = note
            self.recorder.log(note)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask all that train in this round."""
        trainers = self.trainers(server_round)
        return (self.message(member, self.train_request(server_round, member), config) for member in trainers)

    def forecast(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """One exchange with every institution in every round in which it trains; no weights."""
        answer = self.answer.blank()
        return self.every_round(((m, self.train_request(0, m), answer, 1) for m in self.members), num_rounds)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Outcome:
        """Count the examples used; there are no weights to aggregate."""
        self.count_missed()
        for _, reply in self.answers(replies):
            self.recorder.saw(self.answer.decode(reply.content).examples_seen)  # type: ignore[attr-defined]
        return ArrayRecord(), None
