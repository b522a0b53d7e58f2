"""The mailbox of gossip: parcels that wait at the server for delivery, and their receivers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from flwr.app import ArrayRecord

from flwr_replay.files.disk import entries, remove
from flwr_replay.files.tensors import OF_RUN, read_own, write_tensors
from flwr_replay.wire.records import array_record, opened

__all__ = ["Delivery", "Mailbox", "ModelShare"]


@dataclass(frozen=True)
class ModelShare:
    """A share of one sender's model."""

    number: int  # of the model, from 1 in the run
    sender: str
    share: float
    weight: float  # the sender's w


@dataclass
class Delivery:
    """The parcels that one institution must mix and acknowledge before it trains again."""

    exchange: int  # number of the exchange in which it released its own model
    weight: float  # its w at that release
    kept: float  # the share of its own model that it keeps
    parcels: list[ModelShare] = field(default_factory=list)
    given_back: Delivery | None = None  # the delivery before its parcels went back; the receiver may have mixed them

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """Return the delivery of which `asdict` returned these values."""
        before = cls.of(values["given_back"]) if values["given_back"] else None
        return cls(**{**values, "parcels": [ModelShare(**p) for p in values["parcels"]], "given_back": before})


@dataclass
class Mailbox:
    """All deliveries that are not acknowledged, and the models in them."""

    waiting: dict[str, Delivery] = field(default_factory=dict)  # by receiver: its delivery
    # by sender: its parcels that nobody acknowledged, for its next delivery
    coming_back: dict[str, list[ModelShare]] = field(default_factory=dict)
    committed: dict[str, int] = field(default_factory=dict)  # by institution: the exchange of its last acknowledged one
    weights: dict[str, float] = field(default_factory=dict)  # by institution: its w after that; 1 if it is missing
    models: dict[int, ArrayRecord] = field(default_factory=dict)  # by a parcel's number: its model
    posted: int = 0  # models so far
    recent: list[set[int]] = field(default_factory=list)  # numbers of the waiting models at the last calls of `keep`

    def post(self, model: ArrayRecord) -> int:
        """Store a model; return its number."""
        self.posted += 1
        self.models[self.posted] = model
        return self.posted

    def can_hold(self, name: str, numbers: Sequence[int]) -> bool:
        """Return whether these are the numbers of its delivery, or of the delivery before the parcels went back."""
        delivery = self.waiting[name]
        deliveries = [delivery, *([delivery.given_back] if delivery.given_back else [])]
        return any(list(numbers) == [parcel.number for parcel in delivered.parcels] for delivered in deliveries)

    def acknowledged(self, name: str, numbers: Sequence[int]) -> int:
        """Forget a delivery whose receiver has acknowledged these numbers.

        Parcels that the receiver has mixed, and that still wait to go back to their senders, no longer do. Return how
        many have gone back already: they are in two models.
        """
        delivery = self.waiting.pop(name)
        mixed = delivery.given_back if delivery.given_back and numbers else delivery
        self.committed[name] = delivery.exchange
        arrived = sum(parcel.weight * parcel.share for parcel in mixed.parcels)
        self.weights[name] = mixed.weight * mixed.kept + arrived  # its w after mixing
        gone = 0
        for parcel in mixed.parcels if mixed is not delivery else []:
            if parcel in (pile := self.coming_back.get(parcel.sender, [])):
                pile.remove(parcel)
            else:
                gone += 1
        return gone

    def give_back(self, name: str) -> None:
        """Send an institution's parcels back to their senders; if it answers later, it keeps its own model whole."""
        for parcel in self.waiting[name].parcels:
            self.coming_back.setdefault(parcel.sender, []).append(parcel)
        before = self.waiting[name]
        self.waiting[name] = Delivery(before.exchange, before.weight, 1.0, given_back=before)

    def keep(self, folder: Path, run: str) -> None:
        """Write the waiting models to the run's files and forget all others; files of the last three calls stay.

        The server writes a checkpoint while the next exchange runs, so a crash may lose two checkpoints.
        """
        piles = [*(delivery.parcels for delivery in self.waiting.values()), *self.coming_back.values()]
        needed = {parcel.number for pile in piles for parcel in pile}
        self.models = {number: self.models[number] for number in sorted(needed)}
        for number, arrays in self.models.items():
            write_tensors(folder / f"{number:06d}.safetensors", opened(arrays), {OF_RUN: run})
        self.recent = [*self.recent[-2:], needed]
        for file in entries(folder, "*.safetensors"):
            if not any(int(file.stem) in numbers for numbers in self.recent):
                remove(file)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold; the models are in the files that `keep` wrote."""
        return {
            "waiting": {name: asdict(delivery) for name, delivery in self.waiting.items()},
            "coming_back": {name: [asdict(parcel) for parcel in parcels] for name, parcels in self.coming_back.items()},
            "committed": dict(self.committed),  # a copy: the checkpoint is written during the next round
            "weights": dict(self.weights),
            "models": sorted(self.models),
            "posted": self.posted,
        }

    @classmethod
    def restored(cls, values: dict[str, Any], folder: Path, run: str) -> Self:
        """Return the mailbox of a checkpoint, from what `state` returned and `keep` wrote."""
        waiting = {name: Delivery.of(saved) for name, saved in values["waiting"].items()}
        back = {name: [ModelShare(**parcel) for parcel in parcels] for name, parcels in values["coming_back"].items()}
        models = {n: array_record(read_own(folder / f"{n:06d}.safetensors", run)) for n in values["models"]}
        return cls(waiting, back, values["committed"], values["weights"], models, values["posted"], [{*models}])
