"""Between the wire and the ClientApp of a sealed institution: what leaves is sealed, what arrives is opened.

This is the only place where it happens, so no method knows of it. The guard calls `opened` before the ClientApp has a
request, and `closed` before an answer leaves. Arrays, of whatever kind, leave sealed or not at all. They arrive sealed
by an institution whose key is pinned, or not at all: a server can neither read weights nor make any. Weights from the
run's seed, with which a model begins, are made here.

A parcel is good for its run, once, in its place:

    deliver             of each sender one, of the exchange in which the receiver released its own; senders by name. Own
                        parcels that come back: of no model more than was sent away
    train               no older than the last model that came
    train-with-buffers, no older than the last of their kind that came from the same sender
    keep-buffer
    evaluate            of any exchange so far

An interrupted run repeats up to `REPEATS` exchanges. A parcel of these may then come again where it came before. A
server that asks for older exchanges once more can bring back older parcels, too: docs/sealed.md, known gaps.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Container
from typing import NamedTuple

from flwr.app import Array, ArrayRecord, Message, RecordDict
from torch import nn

from flwr_replay.config.binding import binding
from flwr_replay.config.run import RunConfig
from flwr_replay.errors import RefusedError
from flwr_replay.files.atomic import private_folder, read_json, write_json
from flwr_replay.files.tensors import nested
from flwr_replay.institution.owner import Institution
from flwr_replay.institution.seal import Opened, Seal
from flwr_replay.institution.state import StateStore
from flwr_replay.learning.pushsum import sender_name
from flwr_replay.models.zoo import backbone
from flwr_replay.payloads.relay import Deliver
from flwr_replay.rng import derived_seed
from flwr_replay.wire.fields import RECORD_OF
from flwr_replay.wire.payload import Payload, Request
from flwr_replay.wire.records import array_record, config_in, metrics_in, opened
from flwr_replay.wire.sealed import SEALED_NAME, is_sealed
from flwr_replay.wire.weights import to_arrays

__all__ = ["Sealing", "check_sealing"]

REPEATS = 3  # exchanges that a crash may lose, with the one that it interrupts
NOTES = "parcels.json"  # in a run's folder: which parcels came
KEPT = 2 * REPEATS  # exchanges of which all parcels are noted; of older ones each sender's last
TESTED, ONE = "evaluate", "train"  # stages: of a test; of training the only model that goes round
BEGUN = (TESTED, ONE, "train-with-buffers")  # stages in which a model may begin: no weights come then
TESTS = "model"  # in a run's folder: the model that was tested last, which the server cannot keep
EXACT = 1e-9  # rounding of shares


def check_sealing(institution: Institution, config: RunConfig, message: Message) -> None:
    """Refuse an unsealed run at a sealed institution, and the other way round; and parcels in an unsealed run.

    Raises
    ------
    RefusedError
        If they differ.
    """
    sealed = institution.read_seal is not None
    if sealed and not config.sealed:
        raise RefusedError(
            "this institution seals what it sends, for the institutions whose keys it has pinned; the run says "
            "sealed=false: nothing leaves; set sealed=true"
        )
    if config.sealed and not sealed:
        raise RefusedError(
            "a sealed run needs pinned keys; this institution has none: start its SuperNode with --node-config "
            """'… seal-peers="FILE"', or leave sealed out"""
        )
    if not sealed and message.has_content() and is_sealed(message.content.get("arrays", {})):
        raise RefusedError("arrays come in plain in this run; a sealed parcel came: refused; set sealed=true")


class Arrival(NamedTuple):
    """A parcel that came, and in which exchange."""

    asked: int
    sender: str
    exchange: int
    mark: str
    kind: str = "model"
    share: float = 0.0  # of an own parcel that came back


class Sealing:
    """Opens and seals one message of a run.

    Parameters
    ----------
    institution : Institution
        It has a seal.
    config : RunConfig
        The run's options.
    run : str
        The run's id.
    """

    def __init__(self, institution: Institution, config: RunConfig, run: str) -> None:
        assert institution.seal is not None
        self.seal: Seal = institution.seal
        self.config, self.run, self.store = config, run, StateStore(institution, binding(config))
        self.durable = institution.durable
        self.came: list[Arrival] = []
        self.tested: ArrayRecord | None = None

    # --- what arrives -------------------------------------------------------------------------------------------------

    def opened(self, message: Message, request: type[Request] | None) -> Message:
        """Return a message with its parcels opened; the message itself is unchanged.

        Raises
        ------
        RefusedError
            If arrays are not sealed, or a parcel is not one that may come here and now.
        """
        if request is None:
            raise RefusedError("a sealed institution answers the requests of its own method only; got another: refused")
        record, stage = message.content.get("arrays", ArrayRecord()), request.stage_name
        kinds = {field.kind for field in request.declared().values() if RECORD_OF[field.kind] == "arrays"}
        if not isinstance(record, ArrayRecord) or (record and not (kinds and is_sealed(record))):
            raise RefusedError(
                f"arrays come sealed by an institution whose key is pinned; those of stage {stage} came in plain: "
                "refused; set sealed=true at the server"
            )
        instructions = {**config_in(message.content), **metrics_in(message.content)}
        asked = int(instructions.get("server-round", 0))
        if stage == Deliver.stage_name:
            arrays = self._delivered(record, Deliver.of({}, instructions))
        elif record:
            arrays = self._single(record, stage, asked, kinds)
        elif stage in BEGUN:
            self._check_order(stage, Arrival(asked, self.seal.name, 0, ""))
            arrays = array_record(to_arrays(self._fresh()))
        else:
            return message
        self.tested = arrays if stage == TESTED and instructions.get("split", "test") == "test" else None
        copied = copy.copy(message)
        copied.content = RecordDict({**message.content, "arrays": arrays})
        return copied

    def _single(self, record: ArrayRecord, stage: str, asked: int, kinds: Container[str]) -> ArrayRecord:
        """Open the only parcel of a request."""
        if len(record) > 1:
            raise RefusedError(f"stage {stage} brings one parcel; got {len(record)}: refused")
        parcel = self._open(next(iter(record.values())), kinds)
        if parcel.head.exchange > asked:
            raise RefusedError(
                f"exchange {asked} brings what was sealed in it or before; a parcel of {parcel.head.sender} is of "
                f"exchange {parcel.head.exchange}: refused"
            )
        arrival = Arrival(asked, parcel.head.sender, parcel.head.exchange, parcel.mark, parcel.head.kind)
        if stage != TESTED:
            self._check_order(stage, arrival)
            self.came.append(arrival)
        return parcel.arrays

    def _delivered(self, record: ArrayRecord, request: Deliver) -> ArrayRecord:
        """Open the parcels of a delivery; none if they are mixed already, so that a repeated delivery does no harm."""
        own = self.seal.name
        if self.store.has("mixed", self.run, request.exchange):
            return ArrayRecord()
        names = [f"{sender_name(i)}.{SEALED_NAME}" for i in range(len(request.parcels))]
        if list(record) != names or not len(request.shares) == len(request.weights) == len(names):
            raise RefusedError(
                f"a delivery has a share and a weight for each of its parcels; got {len(record)}: refused"
            )
        before, found, last = self._arrivals(), dict[str, ArrayRecord](), ""
        back = defaultdict[int, float](float)  # by exchange: how much of the own model of that exchange has come back
        for one in before:
            back[one.exchange] += one.share
        for i, (array, w, share) in enumerate(zip(record.values(), request.weights, request.shares, strict=True)):
            parcel = self._open(array, ("model",))
            sender, exchange = parcel.head.sender, parcel.head.exchange
            if parcel.head.weight != w:
                raise RefusedError(
                    f"a parcel has the weight with which it was sealed; that of {sender} has {parcel.head.weight:g}, "
                    f"the server says {w:g}: refused"
                )
            if sender == own:
                back[exchange] += share
                if last or exchange >= request.exchange or back[exchange] > 1 + EXACT:
                    raise RefusedError(
                        f"no more of its own model comes back to an institution than it has sent; that of exchange "
                        f"{exchange} does, in exchange {request.exchange}: refused"
                    )
            elif exchange != request.exchange:
                raise RefusedError(
                    f"a delivery of exchange {request.exchange} has parcels of that exchange; one of {sender} is of "
                    f"exchange {exchange}: refused"
                )
            elif sender <= last or any(one.mark == parcel.mark for one in before):
                raise RefusedError(
                    f"a parcel comes once, and senders come in the order of their names; that of {sender} in exchange "
                    f"{exchange} does not: refused"
                )
            last = sender if sender != own else last
            found[sender_name(i)] = parcel.arrays
            self.came.append(
                Arrival(request.exchange, sender, exchange, parcel.mark, share=share if sender == own else 0.0)
            )
        arrays = ArrayRecord()
        arrays.update(nested(found))
        return arrays

    def _open(self, array: Array, kinds: Container[str]) -> Opened:
        parcel = self.seal.open(array)
        if parcel.head.run != self.run:
            raise RefusedError(
                f"a parcel is good in its own run; one of {parcel.head.sender} is of run {parcel.head.run[:60]!r}, "
                f"this is {self.run!r}: refused"
            )
        if parcel.head.kind not in kinds:
            raise RefusedError(f"a parcel of kind {parcel.head.kind[:40]!r} came in the place of another: refused")
        return parcel

    def _check_order(self, stage: str, arrival: Arrival) -> None:
        """Refuse a model that is older than what came before, and exchanges that no interruption repeats."""
        before = self._arrivals()
        newest = max((one.asked for one in before), default=0)
        if arrival.asked <= newest - REPEATS:
            raise RefusedError(
                f"an interrupted run repeats at most its last {REPEATS} exchanges; exchange {arrival.asked} was asked "
                f"for after {newest}: refused; begin a new run"
            )
        earlier = [one for one in before if one.asked < arrival.asked and stage != TESTED]
        if stage != ONE:
            earlier = [one for one in earlier if (one.sender, one.kind) == (arrival.sender, arrival.kind)]
        last = max((one.exchange for one in earlier), default=0)
        if arrival.exchange < last:
            raise RefusedError(
                f"no older model follows a newer one; that of {arrival.sender} is of exchange {arrival.exchange}, "
                f"after one of {last}: refused"
            )

    def _fresh(self) -> nn.Module:
        """Return the model with which a run begins: fresh, from the run's seed."""
        return backbone(self.config.model, self.config.task)(derived_seed(self.config.seed, "model"))

    # --- what came, on the disk ---------------------------------------------------------------------------------------

    def note(self, server_round: int) -> None:
        """Keep a tested model, and write down which parcels came: when they were used, before the answer leaves."""
        if self.tested is not None:
            self.store.save(TESTS, self.run, server_round, opened(self.tested), self.durable)
        if not self.came:
            return
        known = [*self._arrivals(), *self.came]
        newest = max(one.asked for one in known)
        last = {one.sender: one for one in known}  # of each sender
        kept = [one for one in known if one.asked > newest - KEPT or one is last[one.sender] or one.share]
        folder = private_folder(self.store.of_run(self.run))
        write_json(folder / NOTES, {"parcels": kept})

    def _arrivals(self) -> list[Arrival]:
        file = self.store.of_run(self.run) / NOTES
        return [Arrival(*one) for one in read_json(file, {"parcels": list})["parcels"]] if file.exists() else []

    # --- what leaves --------------------------------------------------------------------------------------------------

    def closed(self, reply: Message, answer: type[Payload], server_round: int) -> None:
        """Seal the arrays of an answer, in its place."""
        record = reply.content.array_records.get("arrays")
        if not record:
            return
        [kind] = {field.kind for field in answer.declared().values() if RECORD_OF[field.kind] == "arrays"}
        weight = float(metrics_in(reply.content).get("weight", 1.0))
        reply.content["arrays"] = self.seal.close(record, self.run, kind, server_round, weight)
