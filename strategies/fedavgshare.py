"""FedAvg+Share: the server's half; the institution's half is `clients/fedavgshare.py`.

Source: Zhao et al. 2018 (arXiv:1806.00582), section 4; Qu et al. 2022, section 4.1: 5 % of each institution's examples.
Idea: Before FedAvg begins, every institution gives a small part of its raw examples to all others.
Travels: raw examples and labels, to the server (`Given`) and to all institutions (`Receive`); then as in FedAvg.

    for each institution k: S_k ← a random share of D_k
    for each institution k: D_k ← D_k ∪ S_j of all j ≠ k
    FedAvg on the enlarged D_k, with n_k their sizes

What is protected: Nothing of the shared examples. Every institution and the server see their images and labels. These
stay after the run, in the run directory (`shared/`) and in every institution's state directory. The share counts
examples, not patients: where a patient has several examples, it may contain some of most patients.

Deviations: Zhao et al. share a data set that the server owns. As in Qu et al., the institutions give theirs. An
institution that joins late gives and receives at that time, and all others then receive its share.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flwr_replay.config.sections import SHARE, within
from flwr_replay.config.strategy import Traits
from flwr_replay.errors import WireError
from flwr_replay.files.disk import entries
from flwr_replay.files.tensors import OF_RUN, read_own, write_tensors
from flwr_replay.movements.base import Exchange, Outcome
from flwr_replay.payloads.fedavgshare import Give, Given, Receive, Received, TrainEnlarged, number_shared
from flwr_replay.server.members import Member
from flwr_replay.strategies.fedavg import FedAvg, FedAvgConfig
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import StateDict, Weights

__all__ = ["FedAvgShare", "FedAvgShareConfig"]


@dataclass(frozen=True, kw_only=True)
class FedAvgShareConfig(FedAvgConfig):
    """Options of FedAvg+Share."""

    name = "fedavgshare"
    # no DP: raw examples leave
    traits = Traits(mixes=True, supports_replay=True, takes_fraction=True, needs_roll_call=True, own_batches=True)
    share: float = 0.05  # of each institution's examples; paper: 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        within("strategy.", self, share=SHARE)

    @property
    def own_images(self) -> bool:
        """Institutions train on others' images, too."""
        return False


class FedAvgShare(FedAvg):
    """FedAvg, after all institutions have shared some examples with each other."""

    config_type = FedAvgShareConfig
    config: FedAvgShareConfig
    stages = ("give", "receive", "train-enlarged", "evaluate")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.received: dict[str, list[str]] = {}  # by institution: the others whose examples it holds
        self.held: dict[str, int] = {}  # by institution: how many examples of others it holds
        self.received_in: dict[str, int] = {}  # by institution: the exchange in which it received them
        self.sent_to: dict[str, int] = {}  # by institution: how many examples of others are on their way to it

    def exchange_round(self, grid: Grid, exchange: int, arrays: ArrayRecord, config: ConfigRecord) -> Outcome:
        """Share what is not shared yet, then run FedAvg's round."""
        givers = self.givers()
        giving = [member for member in self.members if member.name not in givers]
        if giving:
            messages = (self.message(member, self.give(exchange), config) for member in giving)
            self.exchanger(grid, exchange, messages, needed=not givers, take=self.store, at_once=1)
            givers = self.givers()
        others = {member.name: [name for name in givers if name != member.name] for member in self.members}
        lacking = [member for member in self.members if others[member.name] != self.received.get(member.name, [])]

        def receives() -> Iterator[Message]:
            for member in lacking:
                request = self.receive(exchange, others[member.name])
                self.sent_to[member.name] = len(request.labels)
                yield self.message(member, request, config)

        def take(member: Member, reply: Message) -> None:
            self.received[member.name], self.held[member.name] = others[member.name], self.sent_to[member.name]
            self.received_in[member.name] = exchange

        self.exchanger(grid, exchange, receives(), needed=False, take=take, at_once=1)
        return super().exchange_round(grid, exchange, arrays, config)

    def train_request(self, exchange: int, arrays: Weights) -> TrainEnlarged:
        """Send θ to every institution."""
        return TrainEnlarged(**vars(super().train_request(exchange, arrays)))

    def addressed(self, member: Member, request: Request) -> Request:
        """Say which examples of others the institution should hold: it refuses if they are lost."""
        request = super().addressed(member, request)
        if isinstance(request, TrainEnlarged):
            received_in = self.received_in.get(member.name, 0)
            request = replace(request, held=self.held.get(member.name, 0), received_in=received_in)
        return request

    def give(self, exchange: int) -> Give:
        """Ask for a share of the examples."""
        return Give(exchange=exchange, run=self.settings.run, share=self.config.share)

    def examples_of(self, member: Member, request: type[Request], instructions: dict[str, Any]) -> range:
        """Count the institution's own examples plus those of others; for `Receive` the others' only."""
        if issubclass(request, Receive):
            return range(self.sent_to[member.name], self.sent_to[member.name] + 1)
        counts = super().examples_of(member, request, instructions)
        more = self.held.get(member.name, 0) if issubclass(request, TrainEnlarged) else 0
        return range(counts.start + more, counts.stop + more)

    def store(self, member: Member, reply: Message) -> None:
        """Keep S_k on the server's disk, if it is a share of the task's examples, in number, shape and dtype."""
        shared, task = Given.decode(reply.content), self.task
        n, (shape, dtype) = number_shared(member.num_examples, self.config.share), self.image_form(shared.images)
        if not task.accepts(shared.labels) or shared.labels.shape != task.blank_labels(n, shape).shape:
            raise WireError(f"a share must have {n} labels of {task}; {member.name} sent others")
        if shared.images.shape != (n, *shape):
            raise WireError(f"a share must have {n} images of {shape}; {member.name} sent {shared.images.shape}")
        if shared.images.dtype != dtype:
            raise WireError(f"all images must have one dtype; {member.name} sent {shared.images.dtype}, not {dtype}")
        arrays = {"images": shared.images, "labels": shared.labels}
        file = self.recorder.folder("shared") / f"{member.name}.safetensors"
        write_tensors(file, arrays, {OF_RUN: self.settings.run})

    def image_form(self, images: NDArray[Any]) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Return the shape and dtype that every image must have.

        The shape is the task's, the dtype that of most institutions. If the server does not know the task's shape, the
        first share that arrived decides both.
        """
        if shape := self.settings.input_shape:
            dtypes = Counter(str(self.image_dtype(member)) for member in self.members if member.num_examples)
            return shape, np.dtype(max(sorted(dtypes), key=lambda name: dtypes[name]))
        if before := self.givers():
            images = read_own(self.recorder.folder("shared") / f"{before[0]}.safetensors", self.settings.run)["images"]
        return images.shape[1:], images.dtype

    def image_dtype(self, member: Member) -> np.dtype[Any]:
        """Return the dtype of an institution's images, computed from the bytes that it reported at the roll call."""
        label, shape = self.blank_labels(1), self.settings.input_shape or ()
        value_bytes = (member.raw_bytes // member.num_examples - label.nbytes) // int(np.prod(shape))
        return np.dtype(np.uint8 if value_bytes == 1 else np.float32)

    def givers(self) -> list[str]:
        """Return the names of the institutions whose shares are on the disk."""
        return [path.stem for path in entries(self.recorder.folder("shared"), "*.safetensors")]

    def receive(self, exchange: int, names: list[str]) -> Receive:
        """Send the union of these institutions' shares."""
        folder = self.recorder.folder("shared")
        shares = [read_own(folder / f"{name}.safetensors", self.settings.run) for name in names]
        images, labels = (np.concatenate([share[key] for share in shares]) for key in ("images", "labels"))
        return Receive(exchange=exchange, run=self.settings.run, images=images, labels=labels)

    def forecast(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """Every institution gives once and receives once; then as FedAvg."""
        shape, exchanges = self.settings.input_shape or (), []
        sizes = {member.name: number_shared(member.num_examples, self.config.share) for member in self.members}
        for member in self.members:
            own = self.image_dtype(member)

            def blank(n: int, dtype: Any = own) -> dict[str, Any]:
                images = np.broadcast_to(np.zeros((), dtype), (n, *shape))
                return {"images": images, "labels": self.blank_labels(n)}

            shared = Given.blank(**blank(sizes[member.name]))
            exchanges.append((member, self.give(0), shared, 1))
            if rest := sum(sizes.values()) - sizes[member.name]:
                receive = Receive(run=self.settings.run, **blank(rest))
                exchanges.append((member, receive, Received.blank(), 1))
        return exchanges + super().forecast(arrays, num_rounds)

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return who holds whose examples; the examples are on the disk already."""
        return {}, {"received": self.received, "held": self.held, "received_in": self.received_in}

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Restore who holds whose examples."""
        self.received, self.held, self.received_in = (values[key] for key in ("received", "held", "received_in"))
