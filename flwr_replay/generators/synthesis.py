"""The options by which institutions train image generators and draw buffers from them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

import torch

from flwr_replay.config.run import RunConfig
from flwr_replay.config.sections import GeneratorConfig, PriorConfig, require
from flwr_replay.errors import ConfigError
from flwr_replay.generators.base import ImageForm, ImageGenerator
from flwr_replay.generators.sampled import VQVAE2Images
from flwr_replay.generators.stylegan2 import StyleGAN2, StyleGAN2Config
from flwr_replay.generators.vqvae2 import VQVAE2Config

__all__ = ["FEWEST", "LARGEST", "SynthesisPlan"]

LARGEST = 256  # pixels of an image's side
SLICES = ("slice_steps", "slice_seconds")
FEWEST = 4  # images of a class from which a generator can learn it


@dataclass(frozen=True)
class SynthesisPlan:
    """The generator, and the form of its images."""

    generator: GeneratorConfig
    prior: PriorConfig
    form: ImageForm

    @classmethod
    def of(cls, config: RunConfig) -> Self | None:
        """Read a run's configuration; None where institutions draw no images.

        Raises
        ------
        ConfigError
            If the task has no images with classes, or they are too large.
        """
        task = config.task
        if not config.strategy.draws_images:
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
        return cls(config.generator, config.prior, ImageForm(task.channels, task.size, task.classes))

    def fresh(self, seed: int, device: torch.device) -> ImageGenerator:
        """Build the generator with fresh weights, which depend on the seed alone."""
        if isinstance(self.generator, VQVAE2Config):
            return VQVAE2Images(self.generator, self.prior, self.form, seed, device)
        if isinstance(self.generator, StyleGAN2Config):
            return StyleGAN2(self.generator, self.form, seed, device)
        raise ConfigError(f"generator={self.generator.name} makes no images for labels: choose stylegan2 or vqvae2")

    def steps(self, examples: int) -> int:
        """Return the number of steps of a training on so many images."""
        return self.fresh(0, torch.device("cpu")).steps(examples)

    @property
    def identity(self) -> str:
        """All options that a trained generator depends on, as JSON; how its training is cut is none of them."""
        generator = {name: value for name, value in asdict(self.generator).items() if name not in SLICES}
        values = {"form": asdict(self.form), "generator": generator, "prior": asdict(self.prior)}
        return json.dumps(values, sort_keys=True)
