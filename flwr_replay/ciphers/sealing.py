"""Between the wire and the ClientApp of a sealed institution: what leaves is sealed, what arrives is opened.

This is the only place where it happens, so no method knows of it. The guard calls `opened` before the ClientApp has a
request, and `closed` before an answer leaves. Arrays, of whatever kind, leave sealed or not at all. They arrive sealed
by an institution whose key is pinned, or not at all: a server can neither read weights nor make any. Weights from the
run's seed, with which a model begins, are made here.

A parcel is good for its run and its options, and comes once, in its place:

    deliver             of each sender one, of the exchange in which the receiver released its own; senders by name. Own
                        parcels that come back: of no model more than was sent away
    train               no older than the last model that came
    train-with-buffers, no older than the last of their kind that came from the same sender
    keep-buffer
    evaluate            of any exchange so far

`flwr_replay/ciphers/arrivals.py` has the notes by which this is decided. A parcel to mix that holds no model of the
common form, or numbers that are not finite, counts as the receiver's own model: whoever sealed it stops nobody.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from logging import WARNING
from typing import Any, Protocol

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common.logger import log
from torch import nn

from flwr_replay.ciphers.arrivals import Arrival, Arrivals
from flwr_replay.ciphers.seal import Opened, Seal
from flwr_replay.config.binding import binding, shared_digest
from flwr_replay.config.run import RunConfig
from flwr_replay.errors import RefusedError
from flwr_replay.files.atomic import alone, private_folder
from flwr_replay.files.tensors import nested, unnested
from flwr_replay.learning.pushsum import sender_name
from flwr_replay.models.zoo import backbone
from flwr_replay.payloads.common import RollCall
from flwr_replay.payloads.relay import Deliver
from flwr_replay.rng import derived_seed
from flwr_replay.state.store import Owner, StateStore
from flwr_replay.wire.fields import RECORD_OF
from flwr_replay.wire.payload import Payload, Request
from flwr_replay.wire.records import StateDict, array_record, config_in, metrics_in, opened, undecoded
from flwr_replay.wire.sealed import SEALED_NAME, is_sealed
from flwr_replay.wire.weights import check_weights, form_of, to_arrays

__all__ = ["Cover", "Sealing", "check_sealing"]

TESTED, ONE = "evaluate", "train"  # stages: of a test; of training the only model that goes round
BEGUN = (TESTED, ONE, "train-with-buffers")  # stages in which a model may begin: no weights come then
LOCKED = "parcels"  # in a run's folder: a folder with a lock
TESTS = "tested"  # in a run's folder: the model that was tested last, which the server cannot keep


def check_sealing(institution: KeyOwner, config: RunConfig, message: Message) -> None:
    """Refuse a run that is neither sealed nor masked where keys are pinned, the reverse, and parcels in plain runs."""
    pinned = institution.read_seal is not None
    if pinned and not config.hiding.pinned:
        raise RefusedError(
            "this institution has pinned keys, so no server reads its weights alone; the run says sealed=false and "
            "masked=false: nothing leaves; set one of the two"
        )
    if config.hiding.pinned and not pinned:
        raise RefusedError(
            f"a {config.hiding} run needs pinned keys; this institution has none: start its "
            """SuperNode with --node-config '… seal-peers="FILE"', or leave sealed and masked out"""
        )
    if config.hiding.readable and message.has_content() and is_sealed(message.content.get("arrays", {})):
        raise RefusedError("arrays come in plain in this run; a sealed parcel came: refused; set sealed=true")


class KeyOwner(Owner, Protocol):
    """An institution's name, state and data, and its keys."""

    read_seal: Callable[[], Seal] | None  # what reads the keys; None if none are pinned

    @property
    def seal(self) -> Seal | None:
        """What seals and opens parcels; None if it seals nothing."""


class Cover:
    """What stands between the wire and the ClientApp for one message of a run in which keys are pinned."""

    def __init__(self, institution: KeyOwner, config: RunConfig, run: str) -> None:
        assert institution.seal is not None
        self.seal: Seal = institution.seal
        self.config, self.run, self.options = config, run, shared_digest(config)
        self.bound = binding(config)
        self.store, self.durable = StateStore(institution, self.bound), institution.durable

    def alone(self) -> AbstractContextManager[None]:
        """Answer one message of a run at a time: two at once could both pass before either is noted."""
        return alone(private_folder(self.store.of_run(self.run) / LOCKED), wait=True)


class Sealing(Cover):
    """Opens and seals one message of a run."""

    tested: ArrayRecord | None = None

    # --- what arrives -------------------------------------------------------------------------------------------------

    def opened(self, message: Message, request: type[Request] | None) -> Message:
        """Return a message with its parcels opened; the message itself is unchanged.

        Arrays that are not sealed are refused, and so is a parcel that may not come here and now.
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
        if stage == RollCall.stage_name:
            return message
        instructions = {**config_in(message.content), **metrics_in(message.content)}
        asked = int(instructions.get("server-round", 0))
        self.store.bind(self.run, self.bound)  # under other options nothing is noted
        notes = Arrivals(self.store, self.run, self.seal.name)
        notes.ask(asked)
        if any(RECORD_OF[field.kind] == "arrays" for field in request.answer.declared().values()):
            committed = int(instructions.get("committed", asked - 1))
            if committed >= asked:
                raise RefusedError(f"a model is mixed after it is released; exchange {asked} is mixed already: refused")
            notes.begin(asked, committed)
            self.store.forget_after("mixed", self.run, committed)  # what the notes say of these is undone
            self.store.forget_after("released", self.run, asked - 1)
        arrays = self._arrived(record, stage, instructions, kinds, notes)
        notes.write()  # before anything is used
        if arrays is None:
            return message
        self.tested = arrays if stage == TESTED and instructions.get("split", "test") == "test" else None
        copied = copy.copy(message)
        copied.content = RecordDict({**message.content, "arrays": arrays})
        return copied

    def _arrived(
        self, record: ArrayRecord, stage: str, instructions: Mapping[str, Any], kinds: Container[str], notes: Arrivals
    ) -> ArrayRecord | None:
        """Open what a request brings, and note it; None if it brings nothing."""
        asked = int(instructions.get("server-round", 0))
        if stage == Deliver.stage_name:
            return self._delivered(record, Deliver.of({}, instructions), notes)
        if not record and stage not in BEGUN:
            return None
        if not record:
            if stage != TESTED:
                notes.follow(Arrival(asked, self.seal.name, 0), one_model=stage == ONE)
            return array_record(to_arrays(self._fresh()))
        if len(record) > 1:
            raise RefusedError(f"stage {stage} brings one parcel; got {len(record)}: refused")
        parcel = self._open(next(iter(record.values())), kinds)
        head = parcel.head
        if head.exchange > asked:
            raise RefusedError(
                f"exchange {asked} brings what was sealed in it or before; a parcel of {head.sender} is of exchange "
                f"{head.exchange}: refused"
            )
        if stage != TESTED:
            arrival = Arrival(asked, head.sender, head.exchange, head.kind, parcel.mark)
            notes.follow(arrival, one_model=stage == ONE)
        return parcel.arrays

    def _delivered(self, record: ArrayRecord, request: Deliver, notes: Arrivals) -> ArrayRecord:
        """Open the parcels of a delivery; none if they are mixed already, so that a repeated delivery does no harm."""
        if self.store.has("mixed", self.run, request.released_in):
            return ArrayRecord()
        request.check_shares()
        names = [f"{sender_name(i)}.{SEALED_NAME}" for i in range(len(request.parcels))]
        if list(record) != names or not len(request.shares) == len(request.weights) == len(names):
            raise RefusedError(
                f"a delivery has a share and a weight for each of its parcels; got {len(record)}: refused"
            )
        released = self.store.at("released", self.run, request.released_in) or {}
        own = unnested(released).get("theta", {})
        arrivals, models = list[Arrival](), dict[str, ArrayRecord]()
        for i, (array, w, share) in enumerate(zip(record.values(), request.weights, request.shares, strict=True)):
            parcel = self._open(array, ("model",))
            head = parcel.head
            if head.weight != w:
                raise RefusedError(
                    f"a parcel has the weight with which it was sealed; that of {head.sender} has {head.weight:g}, the "
                    f"server says {w:g}: refused"
                )
            of_own = share if head.sender == self.seal.name else 0.0
            arrivals.append(
                Arrival(request.released_in, head.sender, head.exchange, head.kind, parcel.mark, share=of_own)
            )
            theirs = _model(parcel, own)
            models[sender_name(i)] = array_record(own) if theirs is None else theirs
            if theirs is None:
                log(WARNING, "%s sealed no model of the common form: the own model stands in its place", head.sender)
        notes.mix(request.released_in, request.kept, arrivals)
        arrays = ArrayRecord()
        arrays.update(nested(models))
        return arrays

    def _open(self, array: Array, kinds: Container[str]) -> Opened:
        parcel = self.seal.open(array)
        if (parcel.head.run, parcel.head.options) != (self.run, self.options):
            raise RefusedError(
                f"a parcel is good in its own run; one of {parcel.head.sender} is of run {parcel.head.run[:60]!r}, or "
                f"of other options, this is {self.run!r}: refused"
            )
        if parcel.head.kind not in kinds:
            raise RefusedError(f"a parcel of kind {parcel.head.kind[:40]!r} came in the place of another: refused")
        return parcel

    def _fresh(self) -> nn.Module:
        """Return the model with which a run begins: fresh, from the run's seed."""
        return backbone(self.config.model, self.config.task)(derived_seed(self.config.seed, "model"))

    # --- what leaves --------------------------------------------------------------------------------------------------

    def closed(self, reply: Message, answer: type[Payload], exchange: int) -> None:
        """Seal the arrays of an answer, in its place; keep a tested model, which no server can."""
        if self.tested is not None:
            self.store.save(TESTS, self.run, exchange, opened(self.tested), self.durable)
        record = undecoded(reply.content)
        if not record:
            return
        [kind] = {field.kind for field in answer.declared().values() if RECORD_OF[field.kind] == "arrays"}
        weight = float(metrics_in(reply.content).get("weight", 1.0))
        reply.content["arrays"] = self.seal.close(record, self.run, self.options, kind, exchange, weight)


def _model(parcel: Opened, own: StateDict) -> ArrayRecord | None:
    """Return a parcel's model; None if it has another form than one's own, or numbers that are not finite."""
    try:
        arrays = parcel.arrays
        theirs = opened(arrays)
        if form_of(theirs) != form_of(own):
            return None
        check_weights(theirs)
    except Exception:  # of any kind: institutions need not trust each other
        return None
    return arrays
