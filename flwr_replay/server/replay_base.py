"""What every kind of replay does at the server: it prepares before each exchange, and knows what is missing."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from flwr_replay.config.sections import ReplayConfig
from flwr_replay.errors import RunError
from flwr_replay.server.exchange import Exchange, Exchanger
from flwr_replay.server.members import Member
from flwr_replay.wire.records import StateDict

__all__ = ["Replay"]


class Replay(ABC):
    """Sees to it that every institution holds what it is to replay."""

    stages: tuple[str, ...]  # that every institution is asked for, in addition to the method's own

    def __init__(self, exchanger: Exchanger, options: ReplayConfig) -> None:
        self.exchanger, self.options = exchanger, options
        self.missing: dict[str, str] = {}  # by institution: what is incomplete in the last round
        self.exchange = 0

    def begin_run(self) -> None:  # noqa: B027  most kinds of replay have nothing to say
        """Say what holds for the whole run, before anything leaves; called after the roll call."""

    def prepare(self, grid: Grid, exchange: int, arrays: StateDict, extra: ConfigRecord, last: bool) -> None:
        """Make the exchanges that are due; called before every exchange of the method.

        The run stops if no institution could train a generator, or if replay is incomplete for the last round and
        replay.missing=stop.
        """
        self.grid, self.exchange, self.extra = grid, exchange, extra
        self.complete(arrays)
        if not self.begun or (last and self.lacking() != self.missing):  # not again if already accepted
            self.complete(arrays)
        failures = self.exchanger.recorder.failures_line()
        if not self.begun:
            raise RunError(f"no institution could train the generator; {failures}: resume the run when one can")
        self.missing = self.lacking() if last else {}
        if self.missing and self.options.missing == "stop":
            lacks = "; ".join(f"{name} {what}" for name, what in self.missing.items())
            raise RunError(
                f"the last round needs all that is replayed; {lacks} ({failures}): resume the run when they answer, "
                "or with replay.missing=say"
            )

    @property
    @abstractmethod
    def begun(self) -> bool:
        """Whether an institution's generator is trained."""

    @abstractmethod
    def complete(self, arrays: StateDict) -> None:
        """Train what is to be trained, and send what institutions lack; `arrays` are the global weights."""

    @abstractmethod
    def lacking(self) -> dict[str, str]:
        """Return, by institution, what is incomplete."""

    @abstractmethod
    def holding(self, name: str) -> int:
        """Return how many examples an institution has for replay."""

    def instructions(self, name: str) -> dict[str, Any]:
        """Return, by the names of their fields, the instructions about replay in a request to train."""
        return {"replayed": self.holding(name)}

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold."""

    @abstractmethod
    def restore(self, values: dict[str, Any]) -> None:
        """Restore what `state` returned."""

    @abstractmethod
    def forecast(self, members: Sequence[Member]) -> list[Exchange]:
        """Return the exchanges if every institution stays; from then on the replay is as if they had been made."""
