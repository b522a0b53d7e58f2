"""The options of replay and the form of images and labels, for the server and the institutions."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flwr_replay.config.run import RunConfig
from flwr_replay.config.sections import PriorConfig, ReplayConfig, require
from flwr_replay.errors import ConfigError
from flwr_replay.generators.autoencoder import VQVAE2, VQVAE2Config, build_generator
from flwr_replay.generators.codes import bits_per_code
from flwr_replay.generators.priors import CodePrior, LabelBins, build_prior, check_cpu
from flwr_replay.models.layers import as_input
from flwr_replay.rng import derived_seed

__all__ = ["ReplayPlan"]

SPREAD = 3  # standard deviations of a regression's labels, by which a prior's bins reach to each side of the mean


@dataclass(frozen=True)
class ReplayPlan:
    """The options of replay and the task's images and labels."""

    replay: ReplayConfig
    generator: VQVAE2Config
    prior: PriorConfig
    kind: str  # of task
    channels: int  # of an image
    size: int
    classes: int
    seed: int

    @classmethod
    def of(cls, config: RunConfig) -> Self | None:
        """Read a run's configuration; None where no codes are replayed.

        Raises
        ------
        ConfigError
            If there are no images to replay, or a prior would have to draw masks.
        """
        replay, task = config.replay, config.task
        if replay.name in ("none", "buffer"):
            return None
        things = "bags" if task.format == "bags" else "tables"
        require(
            (task.size > 1 and things == "tables") or replay.name == "statistics",
            f"replay needs images; task={task.name} has {things}: choose replay=none",
        )
        require(
            replay.name != "pixelcnn" or task.kind != "segmentation",
            f"replay=pixelcnn draws codes for a class or a number; task={task.name} has masks: choose replay=vqvae2",
        )
        why = config.features_anew
        require(
            replay.name != "statistics" or (task.kind == "classification" and config.features_once),
            "replay=statistics draws features of classes beside those that a frozen encoder has computed once; got "
            f"task.kind={task.kind} and model.train={config.model.train}{why and f', and {why}'}: choose a "
            "classification, model.train=head or from:STAGE, augment=none, and no private-models or private-shift",
        )
        generator = config.generator
        if not isinstance(generator, VQVAE2Config):
            raise ConfigError(
                f"replay={replay.name} replays the codes of generator=vqvae2; got generator={generator.name}: choose "
                "generator=vqvae2"
            )
        image = (task.kind, task.channels, task.size, task.classes)
        return cls(replay, generator, config.prior, *image, config.seed)

    @property
    def stages(self) -> tuple[str, ...]:
        """Stages of replay that every institution is asked for; it answers no others of replay."""
        if self.replay.name == "statistics":
            return ("summarise", "keep-draws")
        codes = ("encode-images", "keep-codes", "keep-decoder")
        return ("train-generator", *(codes if self.replay.name == "vqvae2" else ("train-prior", "keep-prior")))

    def check_device(self, device: torch.device) -> None:
        """Raise `ConfigError` if a prior would be trained there on images that are too large for it."""
        if self.replay.name == "pixelcnn":
            check_cpu(self.prior, self.size, device)

    def fresh_generator(self) -> VQVAE2:
        """Build the generator with which every run of this seed begins; a mask is one more channel."""
        channels = self.channels + (self.kind == "segmentation")
        return build_generator(self.generator, channels, self.size, derived_seed(self.seed, "generator"))

    def fresh_prior(self, generator: VQVAE2) -> CodePrior:
        """Build a prior over a generator's codes."""
        classes = self.classes if self.kind == "classification" else self.prior.bins
        return build_prior(self.prior, generator, classes, derived_seed(self.seed, "prior"))

    def code_bytes(self, generator: VQVAE2) -> int:
        """Return the bytes of one image's packed codes."""
        return -(-generator.codes_per_image * bits_per_code(generator.codebook_size) // 8)

    def generator_input(self, x_B: Tensor, y_B: Tensor) -> Tensor:
        """Return a batch as the generator learns it: images in [0, 1], with masks as one more channel."""
        images = as_input(x_B)
        return torch.cat([images, y_B[:, None].float()], dim=1) if self.kind == "segmentation" else images

    @property
    def at_once(self) -> int:
        """Number of images encoded or decoded at a time: 256 small ones, or about as many pixels of larger ones."""
        return min(256, max(4, 2**18 // self.size**2))

    def labels(self, y: Tensor) -> NDArray[Any]:
        """Return the labels that travel with codes; zeros for masks, which the codes contain."""
        return y.cpu().numpy() if self.kind != "segmentation" else np.zeros(len(y), np.int64)

    def bins(self, label_mean: float | None, label_scale: float | None) -> LabelBins:
        """Return the bins that are a prior's classes in a regression."""
        mean, scale = label_mean or 0.0, label_scale or 1.0
        return LabelBins(mean - SPREAD * scale, mean + SPREAD * scale, self.prior.bins)
