"""Synthetic images: the institution's half; the server's half is `flwr_replay/server/synthesis.py`.

The institution trains a generator on its own images, alone, in pieces. The generator never leaves. It lies in the state
directory under a digest of its images and options, so runs with the same images and options share it.

Under DP it belongs to one run, and lies in its folder beside the account that was charged for it. Steps are charged
before they are taken. Seeds, the classes that are drawn and all figures in answers do not depend on images then.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flwr_replay.errors import DataError, TrainingError, WireError
from flwr_replay.files.atomic import in_use, private_folder, read_bytes
from flwr_replay.files.disk import entries, there
from flwr_replay.files.tensors import digest
from flwr_replay.generators.base import ImageGenerator
from flwr_replay.generators.perceptual import LocalFeatures, precision, spread
from flwr_replay.generators.sampler import ImageSampler
from flwr_replay.generators.synthesis import FEWEST, SynthesisPlan, TrainingProgress
from flwr_replay.institution.budget import DPTraining, PrivacyBudget
from flwr_replay.institution.owner import Institution, Shard
from flwr_replay.institution.pieces import Pieces, Training
from flwr_replay.learning.training import torch_rng
from flwr_replay.payloads.common import ChargedRequest
from flwr_replay.payloads.replay import Kept
from flwr_replay.payloads.synthetic import Buffer, DrawBuffer, KeepBuffer, TrainedPiece, TrainPiece
from flwr_replay.rng import derived_seed
from flwr_replay.state.store import StateStore
from flwr_replay.wire.records import StateDict

__all__ = ["SynthesisStages"]

TRAIN, DRAW, KEEP = "train-piece", "draw-buffer", "keep-buffer"
PER_CLASS = 16  # images drawn to measure how different they are, from each other and from real ones
COMPARED = 512  # real images at most
DRAWN_TOGETHER = 256  # images drawn from one seed, so that buffers of all sizes begin with the same images
AT_ONCE, CHARGED_AT_ONCE = 10, 50  # steps between two looks at the clock; under DP each is a charge on the disk


class SynthesisStages:
    """The stages of an institution that trains a generator, draws from it, and keeps others' buffers."""

    stages = (TRAIN, DRAW, KEEP)

    def __init__(
        self, institution: Institution, state: StateStore, plan: SynthesisPlan, budget: PrivacyBudget | None = None
    ) -> None:
        self.institution, self.state, self.plan = institution, state, plan
        self.budget = budget if budget and budget.plan.covers("generator") else None  # None: no generator under DP
        self.pieces = Pieces(self.budget, plan.generator.piece_seconds)
        self.given = plan.checkpoint(institution.name)  # the file of a generator that was trained elsewhere

    # --- the generator ------------------------------------------------------------------------------------------------

    def train_piece(self, request: TrainPiece) -> TrainedPiece:
        """Train for some steps, and save: an interrupted message costs at most its own steps.

        Processes that want the same generator train it by turns: each goes on from where the one before it has stopped.
        """
        with self.pieces.alone(self.file(request.run).with_suffix("")):
            training = OwnTraining(self, self.images())
            self.pieces.train(training, request, self.plan.generator.piece_steps)
        values = asdict(training.done) | ({"loss": None} if self.budget else {})
        return TrainedPiece(num_examples=len(training.data), **values, **self.pieces.spent(request.run))

    def images(self) -> Shard:
        """Return the institution's training examples. Under DP numbers outside [0, 1] are clipped.

        Raises
        ------
        DataError
            Without DP, if numbers lie outside [0, 1], or there are not enough images of a class. Under DP an error
            would reveal that.
        """
        data = self.pieces.images(self.institution.train, "generator")
        if self.budget:
            return data
        enough, classes = self.with_enough(data), self.classes(data)
        if not len(enough):
            raise DataError(
                f"a generator needs a class of at least {self.fewest} images; every class has fewer: add images"
            )
        if lacking := sorted({*classes.tolist()} - {*enough.tolist()}):
            raise DataError(
                f"a generator needs at least {self.fewest} images of each class that is declared; it has fewer of "
                f"{lacking[0]}: declare others"
            )
        return data

    @property
    def fewest(self) -> int:
        """Images that make a class enough; labels that are drawn tell which have so many."""
        return max(FEWEST, self.institution.policy.min_count)

    def with_enough(self, data: Shard) -> Tensor:
        """Return the classes of which the institution has enough images."""
        return torch.nonzero(torch.bincount(data.y.cpu()) >= self.fewest)[:, 0]

    def classes(self, data: Shard) -> Tensor:
        """Return the classes for which images are drawn: those that are declared, or those with enough images."""
        declared = self.institution.classes
        if not declared:
            return self.with_enough(data)
        numbers = range(self.plan.form.classes) if declared == "all" else sorted({*map(int, declared.split())})
        return torch.tensor([*numbers])

    def trained_so_far(self, run: str) -> tuple[ImageGenerator, TrainingProgress]:
        """Return the generator, and how far its training is; or the trained one of the institution's checkpoint."""
        seed, device, file = derived_seed(self.identity), self.institution.device, self.file(run)
        if self.given:
            return self.plan.checkpointed(self.given, device)
        if there(file):
            return self.plan.read(file, seed, device, run if self.budget else "")
        # Another process saves before it lets go of its folder: so who trains is looked for before what is saved.
        begun = {path.name for path in entries(file.parent) if path.is_dir() and in_use(path)}
        names = {path.stem for path in entries(file.parent, f"*{file.suffix}")}
        self.institution.policy.check_limits({"generators": len(begun | names | {file.stem})})
        generator = self.plan.fresh(seed, device)
        return generator, TrainingProgress(steps_left=generator.steps(len(self.images())))

    def complete(self, run: str) -> ImageGenerator:
        """Return the generator, whose training must be complete."""
        generator, done = self.trained_so_far(run)
        self.pieces.check_charged(generator.mechanisms(len(self.institution.train)), done.steps, run)
        if done.steps_left:
            raise TrainingError(
                f"images are drawn from a trained generator; {done.steps_left} steps are left: train it first"
            )
        return generator

    def file(self, run: str) -> Path:
        """Return where the generator lies: under DP beside the account that was charged, otherwise for all runs."""
        if self.budget:  # a run's options are bound to it
            return self.state.of_run(run) / "generators" / "own.safetensors"
        return self.institution.state / "generators" / f"{self.identity}.safetensors"

    @cached_property
    def identity(self) -> str:
        """A digest of the generator's options, and of the images and labels, or of the checkpoint.

        Seeds come from it, so under DP it has the institution's name and the run's seed in place of its images.
        """
        options = np.frombuffer(self.plan.identity.encode(), np.uint8)
        if self.budget:
            public = f"{self.budget.seed} {self.institution.name}".encode()
            return _digest({"options": options, "public": np.frombuffer(public, np.uint8)})
        data = self.institution.train
        options = np.frombuffer(read_bytes(self.given), np.uint8) if self.given else options
        return _digest({"x": data.x.cpu().numpy(), "y": data.y.cpu().numpy(), "options": options})

    # --- buffers ------------------------------------------------------------------------------------------------------

    def draw_buffer(self, request: DrawBuffer) -> Buffer:
        """Draw images for labels that are uniform over the institution's classes."""
        # Whatever a server asks for and however often: without a refresh all draws of a run are the same images.
        purpose = request.exchange if request.buffer_refresh == "round" else 0
        drawn = self.drawn(request.run, request.buffer, purpose)
        if self.budget:
            self.budget.rest("generator", request)  # drawing costs nothing more
        images, labels, n = drawn["images"], drawn["labels"], len(self.institution.train)
        return Buffer(images=images, labels=labels, num_examples=n, **self.pieces.spent(request.run))

    def drawn(self, run: str, size: int, *purpose: object) -> StateDict:
        """Draw images, uint8, and labels. The same purpose draws the same: a smaller size has the first of them."""
        generator, classes, batches = self.complete(run), self.classes(self.images()), list[Tensor]()
        labels = classes[torch.arange(-(-size // DRAWN_TOGETHER) * DRAWN_TOGETHER) % len(classes)]
        for i, labels_B in enumerate(torch.split(labels, DRAWN_TOGETHER)):
            drawn = generator.sample(labels_B, torch_rng(self.identity, "drawn", *purpose, i))
            batches.append(drawn.mul(255).round().clamp(0, 255).byte())
        return {"images": torch.cat(batches)[:size].numpy(), "labels": labels[:size].numpy()}

    def keep_buffer(self, request: KeepBuffer) -> Kept:
        """Keep another institution's buffer; refuse one without a number, or with other images than the options say."""
        form, labels = self.plan.form, request.labels
        shape = (request.buffer, form.channels, form.size, form.size)
        in_range = request.number >= 1 and ((labels >= 0) & (labels < form.classes)).all()
        if request.images.shape != shape or len(labels) != request.buffer or not in_range:
            raise WireError(
                f"a buffer has a number from 1 on, and images {shape} with labels below {form.classes}; got others: "
                "refused"
            )
        arrays = {"images": request.images, "labels": labels}
        self.state.save(_key(request.number), request.run, request.exchange, arrays, self.institution.durable)
        return Kept(num_examples=len(labels))

    def sampler(self, run: str, exchange: int, numbers: Sequence[int], expected: int) -> ImageSampler | None:
        """Return a sampler of the buffers of these numbers, each named once; None of none.

        It is an error if they are not the expected number of examples: going on would silently give other results.
        """
        if len({*numbers}) != len(numbers):
            raise WireError(f"every buffer is named once; got {list(numbers)[:6]}: refused")
        loaded = [self.state.load(_key(number), run, exchange + 1) for number in numbers]
        buffers = [buffer for buffer in loaded if buffer is not None]
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


class OwnTraining(Training):
    """The training of an institution's generator on its own images."""

    def __init__(self, stages: SynthesisStages, data: Shard) -> None:
        self.stages, self.data, self.losses = stages, data, np.zeros(0)
        self.classes, self.figures = stages.classes(data), dict[str, float]()  # the latter of the last block

    def resume(self, request: ChargedRequest) -> None:
        """Read it; one that was trained elsewhere is complete."""
        self.generator, self.done = self.stages.trained_so_far(request.run)
        self.mechanisms = self.generator.mechanisms(len(self.data))
        if self.done.steps_left and (budget := self.stages.budget) and not budget.charged(request.run):
            budget.check_room(self.mechanisms, request.run)
        if self.stages.given:
            self.end(request)
        self.written = replace(self.done)

    def block(self, step: int, charged: bool) -> int:
        """Take some steps together."""
        return CHARGED_AT_ONCE if charged else AT_ONCE

    def take(self, steps: range, dp: DPTraining | None) -> Iterator[tuple[int, Tensor | None]]:
        """Train on them."""
        self.figures = self.generator.train(self.data.x, self.data.y, steps, dp, self.classes)
        yield len(steps), None if dp else torch.tensor(self.figures["loss"], dtype=torch.float64)

    def end(self, request: ChargedRequest) -> None:
        """Find the diversity, None where all real images are the same, and the precision of images that it draws.

        Features are those of a network of random weights: one that has learned the institution's task was seen to take
        noise for X-rays.
        """
        done, data, stages = self.done, self.data, self.stages
        done.margin = self.figures.get("margin")
        if stages.budget:  # real images have no noise
            return
        device, labels = stages.institution.device, self.classes.repeat_interleave(PER_CLASS)
        drawn = self.generator.sample(labels, torch_rng(stages.identity, "diversity"))
        embedding, real = LocalFeatures(stages.plan.form, seed=0).freeze().to(device), spread(data.x, data.y)
        rows = torch.randperm(len(data), generator=torch_rng(stages.identity, "precision"))[:COMPARED].to(data.x.device)
        done.precision = precision(embedding.embed_all(drawn, device), embedding.embed_all(data.x[rows], device))
        done.diversity = spread(drawn, labels) / real if real > 0 else None

    def keep(self, request: ChargedRequest) -> None:
        """Write what has changed, with the mean loss of this message."""
        if self.done != self.written:
            self.done.loss = float(self.losses.mean()) if len(self.losses) else self.done.loss
            stages, file = self.stages, self.stages.file(request.run)
            private_folder(file.parent)
            own, to_disk = request.run if stages.budget else "", stages.institution.durable
            stages.plan.write(file, self.generator, self.done, to_disk=to_disk, run=own)


def _key(number: int) -> str:
    return f"buffer-{number:06d}"


def _digest(arrays: StateDict) -> str:
    return digest(arrays).removeprefix("sha256:")[:32]
