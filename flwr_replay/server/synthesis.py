"""Synthetic images: the server's half; the institution's half is `flwr_replay/institution/synthesis.py`.

Source: Pennisi et al. 2023 (FedER), section III-B: before the first round every institution trains a generator on its
own images. The generator stays there; a buffer of its images travels.

    every institution k: train G_k, in as many messages as it takes
    every institution k: B_k ← images that G_k draws                    up to the server, once
    for each institution j that is to train on B_k: send B_k to j       once; later requests name its number

Failures: An institution that fails is asked again before the next round. Until then nobody has its buffer.
"""

import logging
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message
from flwr.serverapp import Grid

from flwr_replay.errors import WireError
from flwr_replay.files.tensors import OF_RUN, read_own, write_tensors
from flwr_replay.generators.synthesis import SynthesisPlan
from flwr_replay.payloads.replay import Kept
from flwr_replay.payloads.synthetic import Buffer, DrawBuffer, KeepBuffer, TrainedPiece, TrainPiece
from flwr_replay.server.exchange import Exchange, Exchanger
from flwr_replay.server.members import Member
from flwr_replay.server.pieces import Asking
from flwr_replay.server.replay_base import Replay
from flwr_replay.wire.records import StateDict, opened
from flwr_replay.wire.sealed import blank

__all__ = ["FOLDER", "STAGES", "BufferReplay", "Buffers"]

ALIKE = 0.3  # diversity below which a class is almost one image
UNLIKE = 0.1  # precision below which nearly all images are noise
FOLDER = "buffers"  # of a run directory, with all buffers by their numbers
STAGES = ("train-piece", "draw-buffer", "keep-buffer")


class Buffers:
    """Has every institution train its generator, takes a buffer from each, and hands buffers on.

    A buffer has `size` images; 0: there are none, and generators are trained only if `always`. With `refreshed` every
    institution draws a new one in every round.
    """

    def __init__(
        self, exchanger: Exchanger, plan: SynthesisPlan, size: int, refreshed: bool = False, always: bool = False
    ) -> None:
        self.exchanger, self.plan, self.size, self.refreshed, self.always = exchanger, plan, size, refreshed, always
        self.trained: set[str] = set()  # institutions whose generator is complete
        self.numbers: dict[str, int] = {}  # by institution: the number of its buffer
        self.drew_none: list[Member] = []  # their generator may be lost: they are asked to train once more
        self.made = 0  # buffers so far
        self.held: dict[str, list[int]] = {}  # by institution: the buffers that it has acknowledged

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold; the buffers are in files."""
        held = {name: list(numbers) for name, numbers in self.held.items()}
        return {"trained": sorted(self.trained), "numbers": dict(self.numbers), "made": self.made, "held": held}

    def restore(self, values: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.trained, self.numbers = set(values["trained"]), values["numbers"]
        self.made, self.held = values["made"], values["held"]

    # --- generators and buffers ---------------------------------------------------------------------------------------

    def prepare(self, grid: Grid, exchange: int, extra: ConfigRecord, givers: Container[str] | None = None) -> None:
        """Have the institutions that lack a trained generator train it, and those that lack a buffer draw one.

        Of the buffers of `givers` others are to learn in this round, None: of all. Nobody else draws one.
        """
        if not self.size and not self.always:
            return
        self.train(grid, exchange, extra)
        if not self.size:
            return
        wanted = [m for m in self.exchanger.members if givers is None or m.name in givers]
        lacking = [m for m in wanted if m.name in self.trained and (self.refreshed or m.name not in self.numbers)]
        numbers = {member.name: self.made + i for i, member in enumerate(lacking, 1)}
        self.made += len(lacking)

        def take(member: Member, reply: Message) -> None:
            buffer: Any = Buffer.decode(reply.content)
            path = self.exchanger.recorder.folder(FOLDER) / f"{numbers[member.name]:06d}.safetensors"
            images = self.checked(buffer) if self.readable else buffer.images
            write_tensors(path, images, {OF_RUN: self.exchanger.settings.run})
            self.numbers[member.name] = numbers[member.name]

        messages = (self.exchanger.message(m, self.draw(exchange), extra) for m in lacking)
        self.exchanger(grid, exchange, messages, needed=False, take=take, at_once=1, missed=self.drew_none.append)

    def train(self, grid: Grid, exchange: int, extra: ConfigRecord) -> None:
        """Send message after message until every generator is complete, or its institution fails."""
        members = [m for m in self.exchanger.members if m.name not in self.trained or m in self.drew_none]
        self.drew_none.clear()
        request = TrainPiece(exchange=exchange, run=self.exchanger.settings.run)
        totals = {member: self.plan.steps(member.num_examples) for member in members}
        answers = Asking(self.exchanger, None, grid, exchange, extra).train(totals, request, TrainedPiece)
        for name, (*_, last) in answers.items():
            self.trained.add(name)
            losses = [answer.loss for answer in answers[name] if answer.loss is not None]
            figures = {"margin": last.margin, "diversity": last.diversity, "precision": last.precision}
            self.exchanger.recorder.generated(name, "generator", losses, **figures)
            faults = []
            if last.diversity is not None and last.diversity < ALIKE:
                faults.append(
                    f"images of a class lie {last.diversity:.2f} as far apart as real ones; below {ALIKE} they are "
                    "almost one image"
                )
            if last.precision is not None and last.precision < UNLIKE:
                faults.append(
                    f"{last.precision:.0%} of its images look like real ones; below {UNLIKE:.0%} they are noise"
                )
            for fault in faults:
                logging.getLogger("flwr").warning(
                    "%s: %s: train longer (%s), or choose another generator", name, fault, self.plan.generator.length
                )

    def draw(self, exchange: int) -> DrawBuffer:
        """Ask for a buffer."""
        refresh = "round" if self.refreshed else "never"
        run = self.exchanger.settings.run
        return DrawBuffer(exchange=exchange, run=run, buffer=self.size, buffer_refresh=refresh)

    @property
    def readable(self) -> bool:
        """Whether buffers come in plain; sealed ones are checked by their receivers."""
        return self.exchanger.settings.hiding.readable

    def checked(self, buffer: Buffer) -> StateDict:
        """Return a buffer's arrays; refuse one that is not what was asked for in number, shape or labels."""
        form = self.plan.form
        shape = (self.size, form.channels, form.size, form.size)
        if buffer.images.shape != shape or len(buffer.labels) != self.size:
            raise WireError(f"a buffer must hold images {shape}, each with a label; got {buffer.images.shape}")
        if not self.exchanger.task.accepts(buffer.labels):
            raise WireError(f"a buffer's labels must be classes below {form.classes}; got others")
        return {"images": buffer.images, "labels": buffer.labels}

    # --- delivery -----------------------------------------------------------------------------------------------------

    def deliver(
        self, grid: Grid, exchange: int, wanted: Mapping[str, Sequence[int]], extra: ConfigRecord
    ) -> dict[str, list[int]]:
        """Send every institution the wanted numbers of buffers that it lacks; return those that it has."""
        lacking = [
            (member, number)
            for member in self.exchanger.members
            for number in wanted.get(member.name, ())
            if number not in self.held.get(member.name, ())
        ]
        sent: dict[str, list[int]] = {}  # one message at a time, so the answers come in this order

        def messages() -> Iterable[Message]:
            for member, number in lacking:
                sent.setdefault(member.name, []).append(number)
                yield self.exchanger.message(member, self.keep(exchange, number), extra)

        def take(member: Member, reply: Message) -> None:
            Kept.decode(reply.content)
            self.held.setdefault(member.name, []).append(sent[member.name][-1])

        self.exchanger(grid, exchange, messages(), needed=False, take=take, at_once=1)
        return {name: [n for n in numbers if n in self.held.get(name, ())] for name, numbers in wanted.items()}

    def keep(self, exchange: int, number: int) -> KeepBuffer:
        """Send a buffer."""
        run, file = self.exchanger.settings.run, self.exchanger.recorder.folder(FOLDER) / f"{number:06d}.safetensors"
        buffer = read_own(file, run)
        content: Any = {"images": buffer.get("images", buffer), "labels": buffer.get("labels")}  # sealed: all of it
        return KeepBuffer(exchange=exchange, run=run, number=number, buffer=self.size, **content)

    # --- forecast -----------------------------------------------------------------------------------------------------

    def forecast(self, deliveries: Mapping[str, int], draws: Mapping[str, int]) -> list[Exchange]:
        """Return the exchanges if every institution stays and none needs more time than a message has.

        Given are, by institution, how many buffers it receives, and how many it draws.
        """
        if not self.size and not self.always:
            return []
        form, run = self.plan.form, self.exchanger.settings.run
        shape = (self.size, form.channels, form.size, form.size)
        images: Any = np.broadcast_to(np.zeros((), np.uint8), shape)
        labels: Any = np.zeros(self.size, np.int64)
        if not self.readable:
            whole = blank({"images": images, "labels": labels}, run, "synthetic", self.exchanger.members.names)
            images, labels = opened(whole), None
        exchanges: list[Exchange] = []
        for member in self.exchanger.members:
            pieces = self.plan.pieces(member.num_examples)
            margin = {} if self.plan.generator.keeps_distance else {"margin": None}
            last = TrainedPiece.blank(**margin)
            answer = replace(last, diversity=None, precision=None, margin=None)
            exchanges += [(member, TrainPiece(run=run), reply, n) for reply, n in ((answer, pieces - 1), (last, 1))]
            if self.size:
                buffer = Buffer.blank(images=images, labels=labels)
                exchanges.append((member, self.draw(0), buffer, draws.get(member.name, 0)))
                keep = KeepBuffer(run=run, number=0, buffer=self.size, images=images, labels=labels)
                exchanges.append((member, keep, Kept.blank(), deliveries.get(member.name, 0)))
        return exchanges


class BufferReplay(Replay):
    """Replay of synthetic images: collects a buffer of every institution, and hands it on to all others.

    Source: Pennisi et al. 2023, section III-B, for the buffers; Qu et al. 2022, Algorithm 1, lines 1-6, for the
    batches, which hold real images and images of the others' buffers.
    Failures: Who has no buffer, or has not received the others', is asked again before every exchange. The run stops
    before its last round if replay is still incomplete.
    """

    stages = STAGES

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
        reasons = {m.name: "has received no replays" for m in members if self.held(m.name) != self.others(m.name)}
        ours = self.ours()
        silent = dict.fromkeys(ours - {*self.buffers.numbers}, "is not replayed") if len(ours) > 1 else {}
        return dict(sorted((reasons | silent).items()))

    def holding(self, name: str) -> int:
        """Return how many images of others an institution has."""
        return len(self.held(name)) * self.options.images

    def instructions(self, name: str) -> dict[str, Any]:
        """Return also the numbers of the buffers."""
        return {**super().instructions(name), "buffers": self.held(name)}

    def state(self) -> dict[str, Any]:
        """Return what is known of buffers, which are in files."""
        return {"buffers": self.buffers.state(), "missing": self.missing}

    def restore(self, values: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.buffers.restore(values["buffers"])
        self.missing = values["missing"]

    def forecast(self, members: Sequence[Member]) -> list[Exchange]:
        """Every institution draws a buffer once, and receives all others'."""
        self.buffers.numbers = {name: i for i, name in enumerate(self.givers(), 1)}
        self.buffers.held = {member.name: self.others(member.name) for member in members}
        deliveries = {member.name: len(members) - 1 for member in members}
        return self.buffers.forecast(deliveries, dict.fromkeys(self.givers(), 1))
