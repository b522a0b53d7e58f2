"""The institutions that take part: the roll call, and members by name instead of Flower's random node ids.

For the whole run a name belongs to the node that answered with it first. A SuperNode with a key keeps its node id. A
SuperNode without one gets another id when it restarts. It then proves that it is the same institution
(`flwr_replay/state/store.py`); a node that cannot is refused.
"""

import hmac
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256

from flwr.app import Message

from flwr_replay.config.sections import LABEL
from flwr_replay.errors import RunError, WireError
from flwr_replay.files.atomic import NAME
from flwr_replay.payloads.common import MOST, Present
from flwr_replay.wire.payload import rows

__all__ = ["Member", "Members", "present"]


@dataclass(frozen=True)
class Member:
    """One institution as the server knows it."""

    name: str
    node_id: int
    num_examples: int = 0
    raw_bytes: int = 0
    label_sum: float | None = None  # regression: sum over its training examples
    label_squares: float | None = None
    ours: bool = True  # False: a ClientApp that answers no roll call; its name is its node id
    proof: str = ""  # SHA-256 of its first proof of identity
    pins: str = ""  # sealed or masked run: SHA-256 of the public keys that it has pinned, with their names


def present(node_id: int, reply: Message, pinned: bool) -> Member:
    """Read an answer to the roll call; any other answer than `Present` is that of a user's own ClientApp.

    Pins count in a sealed or masked run only: in any other, nobody can have others refused by stating some.
    """
    try:
        declared = not reply.has_error() and all(rows(reply.content, Present))
    except WireError:  # a user's own answer
        declared = False
    if not declared:
        return Member(str(node_id), node_id, ours=False)
    answer = Present.decode(reply.content)
    n, total, squares = answer.num_examples, answer.label_sum, answer.label_squares
    if not NAME.fullmatch(answer.name):
        raise WireError(
            "an institution's name has at most 160 letters, digits, spaces, dots, hyphens and underscores and "
            f"begins with a letter or digit; got {answer.name[:160]!r}: change it in its --node-config or site column"
        )
    if not 1 <= n <= MOST:
        raise WireError(f"an institution has from 1 to {MOST:,} training examples; {answer.name} reports {n}")
    if (total is None) != (squares is None):
        raise WireError(f"sums of labels and of their squares go together; {answer.name} reports one of them")
    if total is not None and squares is not None:
        possible = abs(total) <= n * LABEL and 0 <= squares <= n * LABEL**2
        if not possible or n * squares < total**2 * (1 - 1e-9):
            raise WireError(
                f"{answer.name} reports sums of {n} labels that no labels below {LABEL:g} have: {total:g}, "
                f"squares {squares:g}"
            )
    digest = sha256(answer.proof.encode()).hexdigest() if answer.proof else ""
    pins = answer.pins[:64] if pinned else ""
    return Member(answer.name, node_id, n, answer.raw_bytes, total, squares, proof=digest, pins=pins)


class Members:
    """The institutions that take part, always in the order of their names."""

    def __init__(self) -> None:
        self._by_name: dict[str, Member] = {}
        self._known: dict[str, Member] = {}  # these, and those that took part before the run was resumed
        self._names: dict[int, str] = {}  # by node id: the institution's name
        self._sorted = True  # whether the first two are in the order of names
        self.online: frozenset[int] = frozenset()  # nodes at the last look
        self._gone: set[int] = set()  # nodes that have gone since `left` was called
        self._asked: set[int] = set()
        self._here: set[int] = set()  # nodes that have answered the roll call since they joined or returned
        self._waiting: set[int] = set()  # nodes that were refused because their name was in use
        self._remembered: dict[str, Member] = {}  # those from before the run was resumed
        self.complete = True  # whether all numbers of examples are known; an institution's forecast has its own alone
        self.contested = False  # whether a node was refused for other pins than those had that answered before it

    def __iter__(self) -> Iterator[Member]:
        """Yield the institutions that are present, by name."""
        self._sort()
        return (member for member in list(self._by_name.values()) if member.node_id in self._here)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, name: str) -> Member | None:
        """Return an institution if it is present, else None."""
        member = self._by_name.get(name)
        return member if member and member.node_id in self._here else None

    @property
    def ours(self) -> bool:
        """Whether any institution that ever took part runs this package's ClientApp."""
        return any(member.ours for member in self._by_name.values())

    @property
    def names(self) -> list[str]:
        """Names of all that ever took part, sorted; the order does not change when one leaves for a while."""
        self._sort()
        return list(self._by_name)

    @property
    def known(self) -> list[Member]:
        """All institutions that ever took part, before the run was resumed too, by name."""
        self._sort()
        return list(self._known.values())

    def by_node(self, node_id: int) -> Member | None:
        """Return the institution of a node id, None if there is none."""
        member = self._by_name.get(self._names.get(node_id, ""))
        return member if member and member.node_id == node_id else None

    def called(self, node_id: int) -> str:
        """Return a node's name, from before the run was resumed too; empty if it has none, or another node has it."""
        return next((member.name for member in self._known.values() if member.node_id == node_id), "")

    def newcomers(self, node_ids: Iterable[int]) -> list[int]:
        """Note the nodes that are online; return, ascending, those to ask: new and returning ones."""
        online = frozenset(node_ids)
        if gone := self.online - online:
            self._here -= gone
            self._asked -= gone | self._waiting  # a name may be free now
            self._waiting.clear()
        unknown = sorted(online - self._asked)
        self.online = online
        self._gone |= gone
        self._asked |= online
        return unknown

    def left(self) -> list[str]:
        """Return, sorted, the institutions whose node has gone since the last call of this, and is not replaced."""
        gone, self._gone = self._gone, set()
        return sorted({name for node in gone if (name := self._names.get(node)) and not self.get(name)})

    def not_back(self) -> list[str]:
        """Return, sorted, the institutions from before the run was resumed that have not answered since."""
        return sorted(self._remembered.keys() - self._by_name.keys())

    def unasked(self, node_ids: Iterable[int]) -> list[Member]:
        """Enter the nodes of a user's own app, which are not asked who they are; return the new and returning ones.

        They are called node-1, node-2, … by their ids, and those that join later by what follows.
        """
        for node_id in (joined := self.newcomers(node_ids)):
            self._enter(Member(self.called(node_id) or f"node-{len(self._known) + 1}", node_id, ours=False))
        return [member for node_id in joined if (member := self.by_node(node_id))]

    def ask_again(self, node_id: int) -> None:
        """Forget that a node was asked: its answer was lost, so it is not known which app it runs."""
        self._asked.discard(node_id)

    def remember(self, examples: Mapping[str, int], bindings: Mapping[str, tuple[int, str]]) -> None:
        """Restore the members of a run that is resumed: numbers of examples, node ids and proofs."""
        for name, n in examples.items():
            node_id, proof = bindings.get(name, (0, ""))  # older checkpoints have none
            self._known[name] = self._remembered[name] = Member(name, node_id, n, proof=proof)
        self._sorted = False

    def ask_all_again(self) -> None:
        """Forget who has answered in this process, but not under which name, and have all asked once more."""
        self._by_name, self._known = {}, dict(self._remembered)
        self._asked, self._here, self._waiting = set(), set(), set()
        self._sorted = self.contested = False

    def admit(self, arrived: Iterable[Member]) -> dict[int, str]:
        """Enter the institutions that have answered the roll call; return, by node id, why one may not take part."""
        faults, fit = {}, []
        for member in arrived:
            if fault := self._fault(member):
                faults[member.node_id] = fault
            else:
                fit.append(member)
        answering = Counter(member.name for member in fit)
        before = Counter(member.pins for member in self._by_name.values())
        pinned = before or Counter(member.pins for member in fit)
        usual = max(pinned, key=pinned.__getitem__, default="")
        for member in fit:
            if member.pins != usual:
                self.contested |= bool(before)
                self._waiting.add(member.node_id)
                faults[member.node_id] = (
                    f"all institutions of a sealed or masked run pin the same keys; most have {usual[:16]}…, "
                    f"{member.name} has {member.pins[:16]}…: compare the files of pinned keys by `flwr-replay deploy "
                    "seal-key`"
                )
            elif answering[member.name] > 1:  # no one has a better claim to the name
                self._waiting.add(member.node_id)
                faults[member.node_id] = _twice(member.name)
            else:
                self._enter(member)
        return faults

    def add(self, member: Member) -> None:
        """Enter an institution that is present; a RunError if it may not take part."""
        if fault := self._fault(member):
            raise RunError(fault)
        self._enter(member)

    def _enter(self, member: Member) -> None:
        known = self._known.get(member.name)
        if known and known.proof:
            member = replace(member, proof=known.proof)  # its first proof
        self._sorted &= member.name in self._by_name
        self._by_name[member.name] = self._known[member.name] = member
        self._names[member.node_id] = member.name
        self._here.add(member.node_id)

    def _sort(self) -> None:
        """Sort once after institutions were entered, and not in each of many exchanges."""
        if not self._sorted:
            self._by_name, self._known = dict(sorted(self._by_name.items())), dict(sorted(self._known.items()))
            self._sorted = True

    def _fault(self, member: Member) -> str:
        """Return why an institution may not take part under this name; empty if it may."""
        name, known = member.name, self._known.get(member.name)
        before = self._names.get(member.node_id) or self.called(member.node_id) or name
        if before != name:
            return f"a node keeps its name in a run; it was {before!r} and now answers as {name!r}: begin a new run"
        here = self.get(name)
        if here and here.node_id != member.node_id:
            self._waiting.add(member.node_id)
            return _twice(name)
        if known is None:
            return ""
        if known.num_examples != member.num_examples:
            return (
                f"a run continues with the data that it began with; {name} had {known.num_examples} training examples "
                f"and now has {member.num_examples}: use the same nodes, partition and files, or begin a new run"
            )
        proven = bool(known.proof) and hmac.compare_digest(known.proof, member.proof)
        if known.node_id and known.node_id != member.node_id and not proven:
            return (
                "an institution that returns as another node must prove to be the same institution, by identity.key in "
                f"its state directory; {name!r} does not: restore the state directory, or begin a new run"
            )
        return ""

    def label_scale(self) -> tuple[float, float] | None:
        """Return mean and standard deviation of all labels, computed from the institutions' sums; None without sums."""
        summed = [m for m in self if m.label_sum is not None and m.label_squares is not None and m.num_examples]
        n = sum(member.num_examples for member in summed)
        if not n:
            return None
        mean = sum(member.label_sum or 0.0 for member in summed) / n
        variance = sum(member.label_squares or 0.0 for member in summed) / n - mean**2
        return mean, math.sqrt(variance) if variance > 0 else 1.0


def _twice(name: str) -> str:
    return (
        f"every institution needs a name of its own; two SuperNodes answer as {name!r}: give each another name in its "
        "--node-config"
    )
