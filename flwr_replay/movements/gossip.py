"""Gossip: all institutions train, then exchange models over a graph; each mixes the models that it receives.

Source: Kalra et al. 2023 (ProxyFL), Algorithm 1, lines 7-10, and section 3.4; P(t) is in
`topology.py`, the mixing in `flwr_replay/learning/pushsum.py`.
Idea: The server is a mailbox. It says who sends which share to whom, forwards models unchanged and averages nothing.

    in round t:
        deliver the parcels that are still waiting; an institution that does not acknowledge them does not train
        all others train, or those of them that are drawn for the round, and release θ_k with w_k
        P(t) over those that released, by name
        deliver to each k: its own share, and for every k' that sends to it the share, w_k' and θ_k'
        k mixes, saves (θ_k, w_k) and the parcels' numbers on its disk in one step, and acknowledges

Failures: Who does not release, undrawn or failed, takes no part in P(t): nobody sends to it, and it keeps all it has. A
parcel waits until its receiver acknowledges it, over several rounds and over a restart of the server. After `PATIENCE`
rounds it goes back to its sender, which adds it to its next mixing. If the receiver answers later, it continues with
all that it had released, like an institution that joins.

So communication conserves Σ_k w_k θ_k over the members, waiting parcels included, until an institution joins or leaves.
There is one exception: a receiver that mixed its parcels but could not acknowledge them for `PATIENCE` rounds. Its
senders then have them too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_replay.config.sections import one_of, require
from flwr_replay.config.strategy import StrategyConfig
from flwr_replay.errors import ConfigError, WireError, refuse_each
from flwr_replay.files.tensors import nested
from flwr_replay.learning.pushsum import sender_name
from flwr_replay.movements.base import Exchange, Outcome
from flwr_replay.movements.evaluating import SPLIT_OF
from flwr_replay.movements.relay import Relay
from flwr_replay.movements.topology import TOPOLOGIES, Matrix, checked, mixing_matrix, read_matrices, receivers
from flwr_replay.payloads.relay import Committed, Deliver, Released
from flwr_replay.rng import derived_seed
from flwr_replay.server.mailbox import Delivery, Mailbox, ModelShare
from flwr_replay.server.members import Member
from flwr_replay.server.settings import Settings
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import StateDict, Weights, array_record, opened, undecoded
from flwr_replay.wire.weights import form_of

__all__ = ["Gossip", "GossipConfig"]

PATIENCE = 3  # rounds without an acknowledgement, after which parcels go back to their senders


@dataclass(frozen=True, kw_only=True)
class GossipConfig(StrategyConfig):
    """Options of all methods that exchange models over a graph."""

    files = ("topology_file",)

    topology: str = "exponential"  # who sends to whom, see flwr_replay.movements.topology; file: topology-file
    topology_file: str = ""  # .npy, .json or .csv with one mixing matrix, or several that take turns
    optimizer_state: str = "keep"  # keep: optimizers keep their state | reset: fresh ones every round

    def __post_init__(self) -> None:
        one_of("strategy.topology", self.topology, TOPOLOGIES)
        one_of("strategy.optimizer-state", self.optimizer_state, ("keep", "reset"))


class Gossip(Relay):
    """Base of the methods in which institutions exchange models over a graph.

    Of a relay it has that the server holds no model, and who is drawn for a round.
    """

    config: GossipConfig
    answer: ClassVar[type[Released]]
    seed_of: ClassVar[str] = "model"  # the purpose from which the seed of the fresh weights is derived

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mailbox = Mailbox()
        self.releasing: set[str] = set()  # who has trained and released in this exchange
        self.exchanged = True  # whether any institution sends to another in this round
        self.released_form = self.roll.form  # of what institutions release: of the model, and what goes with it
        file = self.config.topology_file
        self.matrices = read_matrices(Path(file)) if file else None

    @classmethod
    def check(cls, config: GossipConfig, settings: Settings, names: Sequence[str] = ()) -> None:
        """Refuse an invalid topology before any training."""
        institutions = len(names) or settings.nodes
        refuse_each(
            partial(super().check, config, settings, names),
            lambda: require(
                settings.fraction == 1 or not config.topology_file,
                f"a file of mixing matrices is for all institutions in every round; got fraction={settings.fraction:g}"
                ": leave one of the two out",
            ),
            lambda: require(
                institutions > 0 or not config.topology_file,
                "a file of mixing matrices is for one number of institutions; got nodes=0: set nodes to their number",
            ),
        )
        matrices = read_matrices(Path(config.topology_file), institutions) if config.topology_file else None
        mixing_matrix(config.topology, max(1, institutions), 0, matrices=matrices)

    def instructions(self, exchange: int, member: Member) -> dict[str, Any]:
        """Return the instructions of every request to train."""
        return {
            "exchange": exchange,
            "run": self.settings.run,
            "lr": self.lr(exchange),
            "init_seed": derived_seed(self.settings.seed, self.seed_of),  # the same for all institutions
            "committed": self.mailbox.committed.get(member.name, 0),
            "exchanged": self.exchanged,
        }

    def has_edges(self, exchange: int, institutions: int) -> bool:
        """Return whether P(t) has an edge between two institutions; without one, no model leaves an institution."""
        p = self.agreed(exchange, institutions)
        return any(receivers(p, k)[0] for k in range(institutions))

    def evaluation_on(self, split: str, exchange: int, arrays: Weights) -> Request:
        """Return the request to evaluate on another split, or what was released before it was mixed."""
        request = super().evaluation_on(split, exchange, arrays)
        return replace(request, mixed=False) if split in SPLIT_OF else request  # type: ignore[call-arg]

    def tested_on(self, split: str, member: Member, arrays: Weights) -> Weights | None:
        """Return None before mixing where the institution has not trained in this exchange."""
        return None if split in SPLIT_OF and member.name not in self.releasing else arrays

    # --- a round ------------------------------------------------------------------------------------------------------

    def exchange_round(self, grid: Grid, exchange: int, arrays: ArrayRecord, config: ConfigRecord) -> Outcome:
        """Deliver what is waiting, have the others train, assign shares of what they release, deliver these."""
        self.bring(grid, exchange, config)
        if not self.mailbox.posted:
            self.shares(exchange, len(self.members))  # refuse an invalid matrix before anybody trains
        free = [member for member in self.trainers(exchange) if member.name not in self.mailbox.waiting]
        self.exchanged = self.has_edges(exchange, len(free))
        to_send = [self.message(member, self.train_request(exchange, member), config) for member in free]
        released: dict[str, Released] = {}

        def take(member: Member, reply: Message) -> None:
            released[member.name] = self.released(member, reply)

        self.exchanger(grid, exchange, to_send, needed=bool(to_send), take=take)
        self.count_missed()
        self.releasing = set(released)
        self.recorder.saw(sum(answer.examples_seen for answer in released.values()))
        self.deal(exchange, released)
        self.bring(grid, exchange, config)
        self.mailbox.keep(self.recorder.folder("mailbox"), self.settings.run)
        return ArrayRecord(), None

    def data_of(self, answered: list[str]) -> list[str]:
        """Return those that have trained and released; the last to answer have mixed."""
        return sorted(self.releasing)

    def released(self, member: Member, reply: Message) -> Released:
        """Decode and check what an institution has released; nobody receives a model of another form or w."""
        answer = self.answer.decode(reply.content)
        arrays, w = opened(answer.arrays), self.mailbox.weights.get(member.name, 1.0)
        known = self.roll.form and self.settings.hiding.readable  # a receiver checks the form of what it opens
        if self.exchanged and (not arrays or (known and form_of(arrays) != self.released_form)):
            raise WireError("released a model of another form than the common one")
        if abs(answer.weight - w) > 1e-9 * w:
            raise WireError(f"released a model with w = {answer.weight:g}; after its mixings it must be {w:g}")
        return replace(answer, arrays=undecoded(reply.content) or answer.arrays)  # the same bytes

    def deal(self, exchange: int, released: dict[str, Released]) -> None:
        """Put the shares of all senders into the mailbox; a sender's shares are its column of P(t)."""
        names = sorted(released)
        p = self.agreed(exchange, len(names)) if self.exchanged else np.eye(len(names))
        for k, name in enumerate(names):
            back = self.mailbox.coming_back.pop(name, [])
            self.mailbox.waiting[name] = Delivery(exchange, released[name].weight, float(p[k, k]), back)
        for k, name in enumerate(names):  # senders by name
            number, w = self.mailbox.post(array_record(released[name].arrays)), released[name].weight
            for to, share in receivers(p, k)[0].items():
                self.mailbox.waiting[names[to]].parcels.append(ModelShare(number, name, share, w))

    def agreed(self, exchange: int, institutions: int) -> Matrix:
        """Return P(t); if a user's own matrix has another size, all institutions keep what they have."""
        try:
            return self.shares(exchange, institutions)
        except ConfigError as error:
            self.recorder.log(f"exchange {exchange}: all keep what they have, since {error}")
            return np.eye(institutions)

    def shares(self, exchange: int, institutions: int) -> Matrix:
        """Return P(t), checked: a user's own method may override `matrix`."""
        if not institutions:
            return np.eye(0)
        p = np.asarray(self.matrix(exchange, institutions), np.float64)
        what = f"{type(self).__name__}.matrix"
        require(
            p.shape == (institutions, institutions),
            f"{what} must be square, one row and one column for each of {institutions} institutions; got {p.shape}",
        )
        matrix: Matrix = checked(p[None], what, stacked=False)[0]
        return matrix

    def matrix(self, exchange: int, institutions: int) -> Matrix:
        """Return P(t): P[k', k] is the share that k sends to k', institutions in the order of their names.

        A method may override it. If it raises a ConfigError, since not all have released, all keep what they have.
        """
        return mixing_matrix(self.config.topology, institutions, exchange - 1, self.settings.seed, self.matrices)

    def bring(self, grid: Grid, exchange: int, config: ConfigRecord) -> None:
        """Deliver what is waiting; forget what is acknowledged; return what nobody acknowledges for long."""
        present = [(member, self.mailbox.waiting.get(member.name)) for member in self.members]
        deliveries = (self.message(m, self.delivery(exchange, waiting), config) for m, waiting in present if waiting)
        acknowledged: dict[str, Sequence[int]] = {}

        def check(member: Member, reply: Message) -> None:
            numbers = Committed.decode(reply.content).parcels
            if not self.mailbox.can_hold(member.name, numbers):
                raise WireError(f"must acknowledge the parcels that it received; got {list(numbers)[:6]}")
            acknowledged[member.name] = numbers

        self.exchanger(grid, exchange, deliveries, needed=False, take=check)
        for name, held in sorted(acknowledged.items()):
            if doubled := self.mailbox.acknowledged(name, held):
                self.recorder.log(f"{name} has mixed {doubled} parcels that have also gone back to their senders")
        for name, waiting in self.mailbox.waiting.items():
            if exchange - waiting.exchange >= PATIENCE and waiting.parcels:
                self.recorder.log(f"{name} does not acknowledge: the parcels that wait for it go back to their senders")
                self.mailbox.give_back(name)

    def delivery(self, exchange: int, waiting: Delivery) -> Deliver:
        """Return the request that delivers an institution's parcels."""
        parcels = waiting.parcels
        models = ArrayRecord()
        models.update(nested({sender_name(i): self.mailbox.models[parcel.number] for i, parcel in enumerate(parcels)}))
        return Deliver(
            exchange=exchange,
            arrays=models,
            run=self.settings.run,
            released_in=waiting.exchange,
            kept=waiting.kept,
            parcels=[parcel.number for parcel in parcels],
            shares=[parcel.share for parcel in parcels],
            weights=[parcel.weight for parcel in parcels],
        )

    # --- what a checkpoint holds, and what will travel ----------------------------------------------------------------

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return the mailbox; the models in it are in files."""
        return {}, {"mailbox": self.mailbox.state()}

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Restore the mailbox."""
        self.mailbox = Mailbox.restored(values["mailbox"], self.recorder.folder("mailbox"), self.settings.run)

    def forecast(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """A release and a delivery for all that train in a round, by that round's matrix."""
        alike: dict[tuple[int | str, ...], list[int]] = {}  # rounds, by who trains, and how many send to each
        for exchange in range(1, num_rounds + 1):
            names = [member.name for member in self.trainers(exchange)]
            edges = self.agreed(exchange, len(names)) != 0
            senders = edges.sum(axis=1) - edges.diagonal()
            alike.setdefault((*names, *senders.tolist()), []).append(exchange)
        exchanges: list[Exchange] = []
        for (exchange, *_), times in ((rounds, len(rounds)) for rounds in alike.values()):
            members = self.trainers(exchange)
            self.mailbox, self.exchanged = Mailbox(), self.has_edges(exchange, len(members))
            answer = self.answer.blank(self.travelling(arrays) if self.exchanged else {}, weight=1.0)
            exchanges += [(member, self.train_request(exchange, member), answer, times) for member in members]
            self.deal(exchange, {member.name: answer for member in members})
            for member in members:
                request = self.delivery(exchange, self.mailbox.waiting[member.name])
                exchanges.append((member, request, Committed.blank(parcels=request.parcels), times))
        return exchanges
