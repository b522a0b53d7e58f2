"""Which parcels came to an institution in a sealed run, and what may still come.

An institution notes every request before it answers it, and every parcel before it is used. So a crash in between
changes nothing: what is asked again may bring the same parcels to the same place, and nothing else may bring them.

    any request         of an exchange that is new, or one of the last `REPEATS`: an interrupted run repeats these
    a parcel to mix     once, into the last release of the own model; again only if that mixing was not finished
    a model to train    no older than what came before: of any sender where one model goes round, else of the same one
    an own model        in shares that never exceed the whole: what is kept, and what comes back of what was given away
"""

import secrets
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from flwr_replay.errors import DamagedError, RefusedError
from flwr_replay.files.atomic import private_folder, read_json, write_json
from flwr_replay.files.disk import there
from flwr_replay.state.store import StateStore

__all__ = ["REPEATS", "Arrival", "Arrivals"]

REPEATS = 3  # exchanges that a crash may lose, with the one that it interrupts
NOTES = "parcels.json"  # in a run's folder
KEPT = 2 * REPEATS  # exchanges of which every parcel is noted; of older ones the newest of each sender and kind
TRIES = 100  # how often an exchange may be mixed anew
LATE = 1000  # exchanges after which no own model comes back; gossip gives it back after a few
EXACT = 1e-9  # rounding of shares


class Arrival(NamedTuple):
    """A parcel that came, or a share of the own model that stayed."""

    asked: int  # the exchange of the request
    sender: str
    exchange: int  # in which it was sealed
    kind: str = "model"
    mark: str = ""  # no other parcel has it
    into: str = ""  # the release with which it is mixed
    share: float = 0.0  # of the own model


class Arrivals:
    """What an institution, whose name is `own`, has noted of one run; damaged notes are refused."""

    def __init__(self, store: StateStore, run: str, own: str) -> None:
        self.file, self.own = store.of_run(run) / NOTES, own
        form = {"newest": int, "released": int, "release": str, "parcels": list, "shares": list}
        try:
            noted = read_json(self.file, form) if there(self.file) else {name: kind() for name, kind in form.items()}
        except DamagedError:
            raise RefusedError(
                f"an institution knows which parcels came in a run; its notes, {NOTES}, are damaged or of another "
                "version: refused; begin a new run"
            ) from None
        self.newest: int = noted["newest"]
        self.released, self.release = int(noted["released"]), str(noted["release"])  # the last: its exchange, a name
        self.known = [Arrival(*values) for values in noted["parcels"]]
        self.shares: dict[int, float] = dict(noted["shares"])  # of own models, in exchanges before the last `KEPT`

    def ask(self, asked: int) -> None:
        """Note a request; refuse one that is older than an interrupted run repeats."""
        if asked <= self.newest - REPEATS:
            raise RefusedError(
                f"an interrupted run repeats at most its last {REPEATS} exchanges; exchange {asked} was asked for "
                f"after {self.newest}: refused; begin a new run"
            )
        self.newest = max(self.newest, asked)

    def begin(self, asked: int, committed: int) -> None:
        """Note that the own model is trained on, from the mixing `committed`, to be released: later ones are undone.

        An exchange that was mixed too often is refused.
        """
        if sum(bool(noted.into) and noted.asked == asked and noted.sender == self.own for noted in self.known) >= TRIES:
            raise RefusedError(
                f"an interrupted exchange is repeated at most {TRIES} times; exchange {asked} was: refused; begin a "
                "new run"
            )
        self.released, self.release = asked, secrets.token_hex(8)
        self.known = [noted._replace(share=0.0) if noted.asked > committed else noted for noted in self.known]

    def follow(self, arrival: Arrival, one_model: bool) -> None:
        """Note a model to go on from; refuse one that is older than what an earlier exchange brought.

        With `one_model` a single one goes round, so that all senders count.
        """
        earlier = [noted for noted in self.known if noted.asked < arrival.asked and noted.kind == arrival.kind]
        last = max((noted.exchange for noted in earlier if one_model or noted.sender == arrival.sender), default=0)
        if arrival.exchange < last:
            raise RefusedError(
                f"no older model follows a newer one; that of {arrival.sender} is of exchange {arrival.exchange}, "
                f"after one of {last}: refused"
            )
        place = (arrival.asked, arrival.sender, arrival.kind)
        same = [noted for noted in self.known if not noted.into and (noted.asked, noted.sender, noted.kind) == place]
        self.known = [noted for noted in self.known if noted not in same]
        self.known.append(max([*same, arrival], key=lambda each: each.exchange))

    def mix(self, exchange: int, kept: float, parcels: Sequence[Arrival]) -> None:
        """Note a delivery, with the own share that is kept.

        A parcel that may not come is refused, and so is a delivery for an older release of its own.
        """
        if exchange != self.released:
            raise RefusedError(
                f"parcels are mixed with the model that was released last; got a delivery of exchange {exchange} after "
                f"a release in {self.released}: refused"
            )
        into, last = self.release, ""
        before = [p for p in self.known if (p.asked, p.into) != (exchange, into)]  # without an unfinished try
        mixed, marks = [Arrival(exchange, self.own, exchange, into=into, share=kept)], {p.mark for p in before}
        for parcel in parcels:
            if parcel.sender == self.own:
                self._check_back(parcel, before + mixed, bool(last))
            elif parcel.exchange != exchange:
                raise RefusedError(
                    f"a delivery of exchange {exchange} has parcels of that exchange; one of {parcel.sender} is of "
                    f"exchange {parcel.exchange}: refused"
                )
            elif parcel.sender <= last or parcel.mark in marks:
                raise RefusedError(
                    f"a parcel comes once, and senders come in the order of their names; that of {parcel.sender} in "
                    f"exchange {exchange} does not: refused"
                )
            else:
                last = parcel.sender
            mixed.append(parcel._replace(into=into))
        self.known = before + mixed

    def _check_back(self, parcel: Arrival, before: Sequence[Arrival], late: bool) -> None:
        """Refuse an own parcel that comes back if no such share was sent away."""
        gone = defaultdict[int, float](float, self.shares)
        for earlier in before:
            gone[earlier.exchange] += earlier.share
        old = parcel.exchange <= self.newest - LATE
        if late or old or parcel.exchange >= parcel.asked or gone[parcel.exchange] + parcel.share > 1 + EXACT:
            raise RefusedError(
                f"no more of its own model comes back to an institution than it has sent; that of exchange "
                f"{parcel.exchange} does, in exchange {parcel.asked}: refused"
            )

    def write(self) -> None:
        """Write the notes down, whole and bounded."""
        recent, newest = list[Arrival](), dict[tuple[str, str], Arrival]()
        for parcel in self.known:
            if parcel.asked > self.newest - KEPT or parcel.asked == self.released:
                recent.append(parcel)
                continue
            if parcel.share:
                self.shares[parcel.exchange] = self.shares.get(parcel.exchange, 0.0) + parcel.share
            before = newest.get((parcel.sender, parcel.kind), parcel)
            newest[parcel.sender, parcel.kind] = max(before, parcel._replace(share=0.0), key=lambda each: each.exchange)
        private_folder(self.file.parent)
        values = {
            "newest": self.newest,
            "released": self.released,
            "release": self.release,
            "parcels": [*newest.values(), *recent],
            "shares": [pair for pair in self.shares.items() if pair[0] > self.newest - LATE],
        }
        write_json(self.file, values)
