"""The options by which institutions train image generators and draw buffers from them."""

import importlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_replay.config.run import RunConfig
from flwr_replay.config.sections import GeneratorConfig, PriorConfig, ReplayConfig, require
from flwr_replay.errors import ConfigError, PrivacyError, RunError, WireError
from flwr_replay.files.tensors import OF_RUN, read_with_texts, write_tensors
from flwr_replay.generators.base import ImageForm, ImageGenerator
from flwr_replay.generators.priors import check_cpu

__all__ = ["FEWEST", "LARGEST", "SynthesisPlan", "TrainingProgress"]

LARGEST = 256  # pixels of an image's side
# Options that do not change what it learns.
NOT_LEARNED = ("piece_steps", "piece_seconds", "checkpoint", "classes", "cpu_size")
FEWEST = 4  # images of a class from which a generator can learn it


@dataclass
class TrainingProgress:
    """How far the training of a generator is, and its figures."""

    steps: int = 0
    steps_left: int = 0
    loss: float = 0.0  # of the last message
    margin: float | None = None  # of a complete one: m of the privacy loss
    diversity: float | None = None  # of a complete one
    precision: float | None = None  # of a complete one


@dataclass(frozen=True)
class SynthesisPlan:
    """The generator, and the form of its images."""

    generator: GeneratorConfig
    prior: PriorConfig
    form: ImageForm
    replay: ReplayConfig

    @classmethod
    def of(cls, config: RunConfig) -> Self | None:
        """Read a run's configuration; None where institutions draw no images.

        Raises
        ------
        ConfigError
            If the task has no images with classes, or they are too large.
        """
        task = config.task
        if not config.draws_images:
            return None
        require(
            task.size > 1 and task.format != "bags",
            f"a generator makes images; task={task.name} has {'bags' if task.format == 'bags' else 'tables'}: choose "
            "another strategy",
        )
        require(
            task.kind == "classification",
            f"a generator makes an image for a class; task={task.name} is a {task.kind}: choose another strategy",
        )
        require(
            task.size <= LARGEST,
            f"generators make images of up to {LARGEST} pixels; got task.size={task.size}: choose a smaller size",
        )
        for declared in config.generator.classes:
            config.generator.check_classes(declared, task.classes)
        return cls(config.generator, config.prior, ImageForm(task.channels, task.size, task.classes), config.replay)

    @property
    def replays(self) -> bool:
        """Whether every batch of the method holds images of others' buffers."""
        return self.replay.name == "buffer"

    def fresh(self, seed: int, device: torch.device) -> ImageGenerator:
        """Build the generator by its name, with fresh weights, which depend on the seed alone."""
        module = importlib.import_module(f"flwr_replay.generators.{self.generator.name}")
        if not hasattr(module, "image_generator"):
            raise ConfigError(f"generator={self.generator.name} makes no images for labels: choose another")
        made: ImageGenerator = module.image_generator(self.generator, self.prior, self.form, seed, device)
        return made

    def check_device(self, device: torch.device) -> None:
        """Raise `ConfigError` if a prior would be trained there on images that are too large for it."""
        if "prior" in self.generator.draws_with and not self.generator.checkpoint:
            check_cpu(self.prior, self.form.size, device)

    def check(self, names: Sequence[str]) -> None:
        """Raise `ConfigError` if the generator cannot be built, or checkpoints of these institutions cannot be used."""
        self.fresh(0, torch.device("cpu"))
        for path in sorted({path for name in names if (path := self.checkpoint(name))}):
            self.checkpointed(path, torch.device("cpu"))

    def check_labels(self, labels: Sequence[NDArray[Any]]) -> None:
        """Refuse a simulation in which no institution has enough training images of any class; `labels` are theirs."""
        most = max((int(np.bincount(own).max()) for own in labels if len(own)), default=0)
        require(
            most >= FEWEST or bool(self.generator.checkpoint),
            f"a generator needs a class of at least {FEWEST} images; no institution has more than {most} of any: take "
            "fewer nodes or more data",
        )

    def steps(self, examples: int) -> int:
        """Return how many steps a training on so many images has; none where a checkpoint is given."""
        return 0 if self.generator.checkpoint else self.fresh(0, torch.device("cpu")).steps(examples)

    def pieces(self, examples: int) -> int:
        """Return how many messages a training on so many images takes, if none is cut short by the clock."""
        return max(1, ceil(self.steps(examples) / self.generator.piece_steps))

    # --- files --------------------------------------------------------------------------------------------------------

    def write(
        self, path: Path, generator: ImageGenerator, progress: TrainingProgress, *, to_disk: bool, run: str = ""
    ) -> None:
        """Write a generator, the form of its images, how far its training is, and, if it is a run's alone, which."""
        texts = {"form": json.dumps(asdict(self.form)), "progress": json.dumps(asdict(progress))}
        texts |= {OF_RUN: run} if run else {}
        write_tensors(path, generator.state(), texts, to_disk=to_disk)

    def read(
        self, path: Path, seed: int, device: torch.device, run: str = ""
    ) -> tuple[ImageGenerator, TrainingProgress]:
        """Read what `write` wrote, for a run that must have written it, if one is given.

        Raises
        ------
        ConfigError
            If the file has images of another form, or another generator's weights.
        PrivacyError
            If it is not the run's.
        RunError
            If it cannot be read.
        """
        state, texts = read_with_texts(path)
        if run and texts.get(OF_RUN) != run:
            raise PrivacyError(
                f"a generator under DP is its run's alone; {path} is of {texts.get(OF_RUN) or 'none'}, not {run}: put "
                "the run's own file back, or begin a new run"
            )
        written = json.loads(texts.get("form", "{}"))
        if written != asdict(self.form):
            own, got = (
                ", ".join(f"{name} {number}" for name, number in form.items()) for form in (asdict(self.form), written)
            )
            raise ConfigError(f"{path} must hold a generator with {own}; got {got or 'none'}")
        generator = self.fresh(seed, device)
        try:
            generator.load_state(state)
        except WireError as error:
            raise ConfigError(
                f"{path} must hold a generator={self.generator.name} with the run's generator.* and prior.* options; "
                f"{error}"
            ) from None
        return generator, TrainingProgress(**json.loads(texts["progress"]))

    def checkpoint(self, institution: str) -> Path | None:
        """Return the file with an institution's trained generator; None where it trains one."""
        if not self.generator.checkpoint:
            return None
        place = Path(self.generator.checkpoint).expanduser().absolute()
        return place / f"{institution}.safetensors" if place.is_dir() else place

    def checkpointed(self, path: Path, device: torch.device) -> tuple[ImageGenerator, TrainingProgress]:
        """Read a generator that has been trained elsewhere; raise `ConfigError` if the run cannot use it."""
        require(
            path.is_file(),
            "generator.checkpoint must be a trained generator, or a folder with <institution>.safetensors; there is no "
            f"{path}",
        )
        try:
            generator, progress = self.read(path, 0, device)
        except RunError as error:
            raise ConfigError(f"generator.checkpoint must be a trained generator: {error}") from None
        require(
            not progress.steps_left,
            f"generator.checkpoint must be a trained generator; {path} has {progress.steps_left} steps to go: train it",
        )
        return generator, TrainingProgress(steps=progress.steps, loss=progress.loss)

    @property
    def identity(self) -> str:
        """All options that a trained generator depends on, as JSON; how its training is cut is none of them."""
        values: dict[str, Any] = {"form": asdict(self.form)}
        for group, options in (("generator", self.generator), ("prior", self.prior)):
            values[group] = {name: value for name, value in asdict(options).items() if name not in NOT_LEARNED}
        return json.dumps(values, sort_keys=True)
