"""Who takes part: the roll call, and institutions by name instead of Flower's random node ids."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from flwr_replay.errors import RunError, WireError
from flwr_replay.files import NAME
from flwr_replay.payloads.common import Failure, Present
from flwr_replay.wire import rows

__all__ = ["Member", "Members", "ask", "failure_of", "reason_of", "wait_for_nodes"]

EXPIRED = (3, 4)  # Flower's codes for a message, or its answer, that is not there, or no longer


@dataclass(frozen=True)
class Member:
    """One institution as the server knows it."""

    name: str
    node_id: int
    num_examples: int = 0
    raw_bytes: int = 0
    label_sum: float | None = None  # regression: over its training examples
    label_squares: float | None = None
    ours: bool = True  # False: a ClientApp that answers no roll call; its name is its node id


class Members:
    """The institutions that take part, always in the order of their names."""

    def __init__(self) -> None:
        self._by_name: dict[str, Member] = {}
        self._present: frozenset[int] = frozenset()
        self._asked: set[int] = set()

    def __iter__(self) -> Iterator[Member]:
        """Yield those present now, by name."""
        return (self._by_name[name] for name in sorted(self._by_name) if self._by_name[name].node_id in self._present)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, name: str) -> Member | None:
        """Return an institution that is present now."""
        member = self._by_name.get(name)
        return member if member and member.node_id in self._present else None

    @property
    def ours(self) -> bool:
        """Say whether any that ever took part runs this package's ClientApp."""
        return any(member.ours for member in self._by_name.values())

    @property
    def names(self) -> list[str]:
        """Names of all that ever took part, sorted: an order that does not change when one leaves for a while."""
        return sorted(self._by_name)

    def by_node(self, node_id: int) -> Member | None:
        """Return the institution behind a node id."""
        return next((member for member in self._by_name.values() if member.node_id == node_id), None)

    def newcomers(self, node_ids: Iterable[int]) -> list[int]:
        """Note which nodes are there now; return those that no roll call has reached yet, in ascending order."""
        self._present = frozenset(node_ids)
        unknown = sorted(self._present - self._asked)
        self._asked |= self._present
        return unknown

    def ask_again(self, node_id: int) -> None:
        """Forget that a node was asked: its answer was lost, and nobody can tell whose app it runs."""
        self._asked.discard(node_id)

    def check_same_data(self, before: Mapping[str, int]) -> None:
        """Refuse to go on with a run when an institution no longer has as many examples as it had.

        Raises
        ------
        RunError
            For the first that differs.
        """
        for member in self:
            had = before.get(member.name, member.num_examples)
            if had != member.num_examples:
                raise RunError(
                    f"a resumed run needs the data that it began with; {member.name} had {had} training examples and "
                    f"now has {member.num_examples}: use the same nodes, partition and files, or begin a new run"
                )

    def admit(self, node_id: int, reply: Message | None) -> None:
        """Enter an answer to the roll call; an institution that returns under a new node id keeps its name.

        Raises
        ------
        RunError
            If two nodes that are both present give the same name.
        WireError
            If the answer holds what cannot be.
        """
        try:
            list(rows(reply.content if reply is not None and not reply.has_error() else RecordDict(), Present))
            ours = reply is not None and not reply.has_error()
        except WireError:  # a user's own answer to queries
            ours = False
        if not ours or reply is None:
            self._by_name[str(node_id)] = Member(str(node_id), node_id, ours=False)
            return
        answer = Present.decode(reply.content)
        n, total, squares = answer.num_examples, answer.label_sum or 0.0, answer.label_squares or 0.0
        if n * squares < total**2 * (1 - 1e-9):
            raise WireError(
                f"{answer.name} tells sums of {n} labels that no labels have: {total:g}, squares {squares:g}"
            )
        told = (answer.num_examples, answer.raw_bytes, answer.label_sum, answer.label_squares)
        self.add(Member(answer.name, node_id, *told))

    def label_scale(self) -> tuple[float, float] | None:
        """Return mean and standard deviation of all labels, from the sums that institutions told; None without sums."""
        told = [m for m in self if m.label_sum is not None and m.label_squares is not None and m.num_examples]
        n = sum(member.num_examples for member in told)
        if not n:
            return None
        mean = sum(member.label_sum or 0.0 for member in told) / n
        variance = sum(member.label_squares or 0.0 for member in told) / n - mean**2
        return mean, math.sqrt(variance) if variance > 0 else 1.0

    def add(self, member: Member) -> None:
        """Enter an institution that is present."""
        if not NAME.fullmatch(member.name):
            raise RunError(
                "an institution's name has at most 160 letters, digits, spaces, dots, hyphens and underscores and "
                f"begins with a letter or digit; got {member.name!r}: change it in its --node-config or site column"
            )
        known = self.get(member.name)
        if known and known.node_id != member.node_id:
            raise RunError(
                f"every institution needs a name of its own; two SuperNodes answer as {member.name!r}: "
                "give each another name in its --node-config"
            )
        self._by_name[member.name] = member
        self._present |= {member.node_id}


def failure_of(message: Message) -> Failure | None:
    """Return the refusal or failure that an institution of ours sent instead of an answer."""
    if message.has_error() or "failure" not in message.content.get("config", {}):
        return None
    return Failure.decode(message.content)


def reason_of(message: Message, reply: Message | None) -> str:
    """Say why there is no answer to a message; of a traceback that is the last line."""
    about = message.metadata
    if reply is None or (reply.error.code in EXPIRED and time.time() >= about.created_at + about.ttl):
        return f"no answer within timeout={about.ttl:g} s"
    lines = (reply.error.reason or "no reason given").strip().splitlines()
    return f"error {reply.error.code}: {lines[-1]}"


def ask(grid: Grid, messages: list[Message], seconds: float) -> dict[str, Message]:
    """Send messages and wait for their replies; return these by the id of the message that they answer.

    Flower's own `send_and_receive` looks for replies of a deployment every three seconds only.
    """
    waiting = set(grid.push_messages(messages)) if messages else set()
    found: dict[str, Message] = {}
    deadline, pause = time.monotonic() + seconds, 0.02
    while waiting:
        found |= {reply.metadata.reply_to_message_id: reply for reply in grid.pull_messages(waiting)}
        waiting -= found.keys()
        if time.monotonic() >= deadline:
            break
        if waiting:
            time.sleep(pause)
            pause = min(0.2, 1.5 * pause)
    return found


def wait_for_nodes(grid: Grid, minimum: int, seconds: float) -> None:
    """Wait until enough nodes have joined.

    Raises
    ------
    RunError
        If fewer than `minimum` have joined when `seconds` are over.
    """
    deadline = time.monotonic() + seconds
    while (joined := len(set(grid.get_node_ids()))) < minimum:
        if time.monotonic() >= deadline:
            raise RunError(
                f"this run needs at least {minimum} institutions; {joined} joined within {seconds:g} s: "
                "start more SuperNodes (a simulation: --federation-config num-supernodes=N) or lower nodes"
            )
        time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))
