"""Synthetic images: the institution's half; the server's half is `flwr_replay/server/synthesis.py`.

The institution trains a generator on its own images, alone, in slices. The generator never leaves. It lies in the state
directory under a digest of its images and options, so runs with the same images and options share it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flwr_replay.errors import DataError, DivergedError, TrainingError, WireError
from flwr_replay.files.atomic import private_folder, read_bytes
from flwr_replay.files.tensors import digest
from flwr_replay.generators.base import ImageGenerator
from flwr_replay.generators.perceptual import spread
from flwr_replay.generators.sampler import ImageSampler
from flwr_replay.generators.synthesis import FEWEST, Progress, SynthesisPlan
from flwr_replay.institution.owner import Institution, Shard
from flwr_replay.institution.state import StateStore
from flwr_replay.learning.training import torch_rng
from flwr_replay.payloads.replay import Kept
from flwr_replay.payloads.synthetic import Buffer, DrawBuffer, GeneratorSlice, KeepBuffer, TrainSlice
from flwr_replay.rng import derived_seed
from flwr_replay.wire.records import StateDict

__all__ = ["SynthesisStages"]

TRAIN, DRAW, KEEP = "train-slice", "draw-buffer", "keep-buffer"
PER_CLASS = 16  # images drawn to measure how different they are
AT_ONCE = 10  # steps between two looks at the clock


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
        total, made = done.steps + done.steps_left, done.steps
        began, end, losses = time.monotonic(), min(total, made + config.slice_steps), []
        while made < end and time.monotonic() - began < config.slice_seconds:
            upto = min(end, made + AT_ONCE)
            losses.append(generator.train(data.x, data.y, range(made, upto)))
            made = upto
        if losses:
            loss = float(np.mean([said["loss"] for said in losses]))
            if not np.isfinite(loss):
                raise DivergedError("a generator's loss must stay finite; it is not: lower generator.lr")
            done = Progress(steps=made, steps_left=total - made, loss=loss, margin=losses[-1].get("margin"))
            done = replace(done, margin=None) if done.steps_left else self.measured(done, generator, data)
            self.save(generator, done)
        elif self.plan.checkpoint(self.institution.name):
            done = self.measured(done, generator, data)
        return GeneratorSlice(num_examples=len(data), **asdict(done))

    def measured(self, done: Progress, generator: ImageGenerator, data: Shard) -> Progress:
        """Add how far images of a class lie apart, over how far real ones do; None where all are the same."""
        labels = self.classes(data).repeat_interleave(PER_CLASS)
        drawn = generator.sample(labels, torch_rng(self.identity, "diversity"))
        real = spread(data.x, data.y)
        return replace(done, diversity=spread(drawn, labels) / real if real > 0 else None)

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
        """Return the generator, and how far its training is; or the trained one of the institution's checkpoint."""
        seed, device = derived_seed(self.identity), self.institution.device
        if path := self.plan.checkpoint(self.institution.name):
            return self.plan.checkpointed(path, device)
        if self.file.exists():
            return self.plan.read(self.file, seed, device)
        generator = self.plan.fresh(seed, device)
        return generator, Progress(steps_left=generator.steps(len(self.images())))

    def complete(self) -> ImageGenerator:
        """Return the trained generator.

        Raises
        ------
        TrainingError
            If its training is not complete.
        """
        generator, done = self.trained_so_far()
        if done.steps_left:
            raise TrainingError(
                f"images are drawn from a trained generator; {done.steps_left} steps are left: train it first"
            )
        return generator

    def save(self, generator: ImageGenerator, done: Progress) -> None:
        """Write the generator, and how far its training is."""
        private_folder(self.file.parent)
        self.plan.write(self.file, generator, done, to_disk=self.institution.durable)

    @property
    def file(self) -> Path:
        """Where the generator lies."""
        return self.state.folder / "generators" / f"{self.identity}.safetensors"

    @property
    def identity(self) -> str:
        """A digest of the institution's images, their labels, and all options of the generator, or its checkpoint."""
        data = self.institution.train
        arrays = {"x": data.x.cpu().numpy(), "y": data.y.cpu().numpy()}
        path = self.plan.checkpoint(self.institution.name)
        arrays["options"] = np.frombuffer(read_bytes(path) if path else self.plan.identity.encode(), np.uint8)
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

    def sampler(self, run: str, server_round: int, numbers: Sequence[int], expected: int) -> ImageSampler | None:
        """Return a sampler of the buffers of these numbers; None of none.

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
        if not have:
            return None
        examples = self.shard(buffers)
        return ImageSampler(examples.x, examples.y, self.plan.replay)

    def shard(self, buffers: Sequence[StateDict]) -> Shard:
        """Return buffers as examples on the institution's device."""
        x, y = (np.concatenate([buffer[key] for buffer in buffers]) for key in ("images", "labels"))
        device = self.institution.device
        return Shard(torch.from_numpy(x).to(device), torch.from_numpy(y).to(device), 0)


def _key(number: int) -> str:
    return f"buffer-{number:06d}"
