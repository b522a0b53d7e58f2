"""Replay of synthetic images; the institution's half is `flwr_replay/institution/synthesis.py`.

Source: Pennisi et al. 2023, section III-B, for the buffers; Qu et al. 2022, Algorithm 1, lines 1-6, for the batches.
Idea: Before a method's first round every institution trains a generator, alone. A buffer of images that it draws goes
up once, and to every other institution once. The method's rounds follow; their batches hold real images and images of
the others' buffers.

Failures: Who has no buffer, or has not received the others', is asked again before every exchange. The run stops before
its last round if replay is still incomplete, as with `replay.py`.
"""

from __future__ import annotations

from typing import Any

from flwr_replay.generators.synthesis import SynthesisPlan
from flwr_replay.server.exchange import Exchanger
from flwr_replay.server.replay_base import Replay
from flwr_replay.server.synthesis import STAGES, Buffers
from flwr_replay.wire.records import StateDict

__all__ = ["BufferReplay"]


class BufferReplay(Replay):
    """Collects a buffer of every institution, and hands it on to all others."""

    stages = STAGES  # type: ignore[assignment]

    def __init__(self, exchanger: Exchanger, plan: SynthesisPlan) -> None:
        super().__init__(exchanger, plan.replay)
        self.buffers = Buffers(exchanger, plan, plan.replay.images)

    @property
    def begun(self) -> bool:
        """Whether there is a buffer."""
        return bool(self.buffers.numbers)

    def complete(self, arrays: StateDict) -> None:
        """Have generators trained and buffers drawn where they lack; deliver them to those who lack them."""
        self.buffers.prepare(self.grid, self.exchange, self.extra, self.givers())
        wanted = {member.name: self.others(member.name) for member in self.exchanger.members}
        self.buffers.deliver(self.grid, self.exchange, wanted, self.extra)

    def givers(self) -> list[str]:
        """Return all that are there, if others are known, who may be away now; one institution alone draws nothing."""
        return [member.name for member in self.exchanger.members] if len(self.ours()) > 1 else []

    def ours(self) -> set[str]:
        """Return the institutions that are there, and those that have been."""
        members = self.exchanger.members
        return {member.name for member in members.known if member.ours} | {member.name for member in members}

    def others(self, name: str) -> list[int]:
        """Return the numbers of the others' buffers."""
        return sorted(number for other, number in self.buffers.numbers.items() if other != name)

    def held(self, name: str) -> list[int]:
        """Return the numbers of the others' buffers that an institution has."""
        return [number for number in self.others(name) if number in self.buffers.held.get(name, ())]

    def lacking(self) -> dict[str, str]:
        """Return who is not replayed, and who lacks others' buffers."""
        members = self.exchanger.members
        found = {m.name: "has received no replays" for m in members if self.held(m.name) != self.others(m.name)}
        ours = self.ours()
        silent = dict.fromkeys(ours - {*self.buffers.numbers}, "is not replayed") if len(ours) > 1 else {}
        return dict(sorted((found | silent).items()))

    def holding(self, name: str) -> int:
        """Return how many images of others an institution has."""
        return len(self.held(name)) * self.options.images

    def instructions(self, name: str) -> dict[str, Any]:
        """Return how many images the institution has, and the numbers of their buffers."""
        return {"replayed": self.holding(name), "buffers": self.held(name)}

    def state(self) -> dict[str, Any]:
        """Return what is known of buffers, which are in files."""
        return {"buffers": self.buffers.state(), "missing": self.missing}

    def restore(self, values: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.buffers.restore(values["buffers"])
        self.missing = values["missing"]
