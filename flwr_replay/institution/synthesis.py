"""Synthetic images: the institution's half; the server's half is `flwr_replay/server/synthesis.py`.

The institution trains a generator on its own images, alone, in slices. The generator never leaves. It lies in the state
directory under a digest of its images and options, so runs with the same images and options share it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flwr_replay.errors import DataError, DivergedError, TrainingError, WireError
from flwr_replay.files.atomic import private_folder
from flwr_replay.files.tensors import digest, read_with_texts, write_tensors
from flwr_replay.generators.base import ImageGenerator
from flwr_replay.generators.perceptual import spread
from flwr_replay.generators.synthesis import FEWEST, SynthesisPlan
from flwr_replay.institution.owner import Institution, Shard
from flwr_replay.institution.state import StateStore
from flwr_replay.learning.training import torch_rng
from flwr_replay.models.layers import as_input
from flwr_replay.payloads.replay import Kept
from flwr_replay.payloads.synthetic import Buffer, DrawBuffer, GeneratorSlice, KeepBuffer, TrainSlice
from flwr_replay.rng import derived_seed
from flwr_replay.wire.records import StateDict

__all__ = ["SynthesisStages", "replayed_batches"]

TRAIN, DRAW, KEEP = "train-slice", "draw-buffer", "keep-buffer"
PER_CLASS = 16  # images drawn to measure how different they are
AT_ONCE = 10  # steps between two looks at the clock


@dataclass(frozen=True)
class Progress:
    """How far the training of a generator is, and its figures."""

    steps: int = 0
    loss: float = 0.0  # of the last message
    margin: float | None = None  # of a complete one: m of the privacy loss
    diversity: float | None = None  # of a complete one


class SynthesisStages:
    """The stages of an institution that trains a generator, draws from it, and keeps others' buffers."""

    stages = (TRAIN, DRAW, KEEP)

    def __init__(self, institution: Institution, state: StateStore, plan: SynthesisPlan) -> None:
        self.institution, self.state, self.plan = institution, state, plan

    # --- the generator ------------------------------------------------------------------------------------------------

    def train_slice(self, request: TrainSlice) -> GeneratorSlice:
        """Train for some steps, and save: an interrupted message costs at most its own steps."""
        data, config = self.images(), self.plan.generator
        generator, done = self.trained_so_far()
        total, made = generator.steps(len(data)), done.steps
        began, end, losses = time.monotonic(), min(total, made + config.slice_steps), []
        while made < end and time.monotonic() - began < config.slice_seconds:
            upto = min(end, made + AT_ONCE)
            losses.append(generator.train(data.x, data.y, range(made, upto)))
            made = upto
        if losses:
            loss = float(np.mean([said["loss"] for said in losses]))
            if not np.isfinite(loss):
                raise DivergedError("a generator's loss must stay finite; it is not: lower generator.lr")
            done = Progress(steps=made, loss=loss)
            if made == total:
                done = replace(done, margin=losses[-1].get("margin"), diversity=self.diversity(generator, data))
            self.save(generator, done)
        return GeneratorSlice(num_examples=len(data), steps_left=total - made, **asdict(done))

    def diversity(self, generator: ImageGenerator, data: Shard) -> float | None:
        """Return how far images of a class lie apart, over how far real ones do; None where all are the same."""
        labels = self.classes(data).repeat_interleave(PER_CLASS)
        drawn = generator.sample(labels, torch_rng(self.identity, "diversity"))
        real = spread(data.x, data.y)
        return spread(drawn, labels) / real if real > 0 else None

    def images(self) -> Shard:
        """Return the institution's training examples.

        Raises
        ------
        DataError
            If numbers lie outside [0, 1], or no class has enough images.
        """
        data = self.institution.train
        if data.x.dtype != torch.uint8 and not (data.x.min() >= 0 and data.x.max() <= 1):
            raise DataError("a generator needs images of bytes, or of numbers in [0, 1]; got others: rescale them")
        if not len(self.classes(data)):
            raise DataError(f"a generator needs a class of at least {FEWEST} images; every class has fewer: add images")
        return data

    def classes(self, data: Shard) -> Tensor:
        """Return the classes of which the institution has enough images; it draws no others."""
        return torch.nonzero(torch.bincount(data.y.cpu()) >= FEWEST)[:, 0]

    def trained_so_far(self) -> tuple[ImageGenerator, Progress]:
        """Return the generator, and how far its training is."""
        generator = self.plan.fresh(derived_seed(self.identity), self.institution.device)
        if not self.file.exists():
            return generator, Progress()
        state, texts = read_with_texts(self.file)
        generator.load_state(state)
        return generator, Progress(**json.loads(texts["progress"]))

    def complete(self) -> ImageGenerator:
        """Return the trained generator.

        Raises
        ------
        TrainingError
            If its training is not complete.
        """
        generator, done = self.trained_so_far()
        if left := generator.steps(len(self.images())) - done.steps:
            raise TrainingError(f"images are drawn from a trained generator; {left} steps are left: train it first")
        return generator

    def save(self, generator: ImageGenerator, done: Progress) -> None:
        """Write the generator, and how far its training is."""
        private_folder(self.file.parent)
        texts = {"progress": json.dumps(asdict(done))}
        write_tensors(self.file, generator.state(), texts, to_disk=self.institution.durable)

    @property
    def file(self) -> Path:
        """Where the generator lies."""
        return self.state.folder / "generators" / f"{self.identity}.safetensors"

    @property
    def identity(self) -> str:
        """A digest of the institution's images, their labels, and all options of the generator."""
        data = self.institution.train
        arrays = {"x": data.x.cpu().numpy(), "y": data.y.cpu().numpy()}
        arrays["options"] = np.frombuffer(self.plan.identity.encode(), np.uint8)
        return digest(arrays).removeprefix("sha256:")[:32]

    # --- buffers ------------------------------------------------------------------------------------------------------

    def draw_buffer(self, request: DrawBuffer) -> Buffer:
        """Draw images for labels that are uniform over the institution's classes."""
        # Whatever a server asks for and however often: without a refresh all draws of a run are the same images.
        drawn = self.drawn(request.buffer, request.server_round if request.buffer_refresh == "round" else 0)
        return Buffer(images=drawn["images"], labels=drawn["labels"], num_examples=len(self.institution.train))

    def drawn(self, size: int, *purpose: object) -> StateDict:
        """Draw images, uint8, and labels; the same purpose draws the same."""
        generator = self.complete()
        classes, rng = self.classes(self.images()), torch_rng(self.identity, "drawn", *purpose)
        labels = classes[torch.arange(size) % len(classes)][torch.randperm(size, generator=rng)]
        images = generator.sample(labels, rng).mul(255).round().clamp(0, 255).byte()
        return {"images": images.numpy(), "labels": labels.numpy()}

    def keep_buffer(self, request: KeepBuffer) -> Kept:
        """Keep another institution's buffer.

        Raises
        ------
        WireError
            If it has no number, other images than the task's, or labels that are none of its classes.
        """
        form, labels = self.plan.form, request.labels
        shape = (len(labels), form.channels, form.size, form.size)
        known = request.number >= 1 and ((labels >= 0) & (labels < form.classes)).all()
        if request.images.shape != shape or not known:
            raise WireError(
                f"a buffer has a number from 1 on, and images {shape[1:]} with labels below {form.classes}; got "
                "others: refused"
            )
        arrays = {"images": request.images, "labels": labels}
        self.state.save(_key(request.number), request.run, request.server_round, arrays, self.institution.durable)
        return Kept(num_examples=len(labels))

    def kept(self, run: str, server_round: int, numbers: Sequence[int], expected: int) -> Shard | None:
        """Return the examples of the buffers of these numbers; None of none.

        Raises
        ------
        TrainingError
            If they are not the expected number of examples. Going on would silently give other results.
        """
        found = [self.state.load(_key(number), run, server_round + 1) for number in numbers]
        buffers = [buffer for buffer in found if buffer is not None]
        if (have := sum(len(buffer["labels"]) for buffer in buffers)) != expected:
            raise TrainingError(
                f"an institution trains on the {expected} synthetic examples that it has received; it has {have}: "
                "restore the state directory, or begin a new run"
            )
        return self.shard(buffers) if have else None

    def shard(self, buffers: Sequence[StateDict]) -> Shard:
        """Return buffers as examples on the institution's device."""
        x, y = (np.concatenate([buffer[key] for buffer in buffers]) for key in ("images", "labels"))
        device = self.institution.device
        return Shard(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device), 0)


def replayed_batches(buffer: Shard, size: int, rng: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of a buffer's examples without end; every example comes once before any comes again."""
    order = torch.empty(0, dtype=torch.int64)
    while True:
        while len(order) < size:
            order = torch.cat([order, torch.randperm(len(buffer), generator=rng)])
        rows, order = order[:size].to(buffer.x.device), order[size:]
        yield as_input(buffer.x[rows]), buffer.y[rows]


def _key(number: int) -> str:
    return f"buffer-{number:06d}"
