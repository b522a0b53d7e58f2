"""Replayed examples: images that came as such, or codes, decoded when they are drawn, with a bounded cache."""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flwr_replay.config.sections import ReplayConfig
from flwr_replay.generators.autoencoder import VQVAE2
from flwr_replay.generators.codes import unpack_codes
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.memory import remembered
from flwr_replay.models.layers import as_input
from flwr_replay.wire.records import StateDict

__all__ = ["CodeSampler", "CodeSource", "ImageSampler", "ReplaySampler", "Rows", "sampler_of"]


@dataclass(frozen=True)
class CodeSource:
    """A decoder with codes and labels for it. Equal digests make equal sources."""

    digest: str
    decoder: StateDict = field(compare=False)
    codes: NDArray[np.uint8] = field(compare=False)  # packed, (n, bytes)
    labels: NDArray[Any] = field(compare=False)  # (n,)


class Rows:
    """Draws row numbers without end; every row comes once before any comes again.

    Parameters
    ----------
    examples : int
        How many rows there are.
    rng : torch.Generator
        On the CPU.

    Attributes
    ----------
    order : Tensor
        Rows that come next, int64; together with the rng's state they say what is still to come.
    """

    def __init__(self, examples: int, rng: torch.Generator) -> None:
        self.examples, self.rng, self.order = examples, rng, torch.empty(0, dtype=torch.int64)

    def draw(self, size: int) -> Tensor:
        """Return the next rows, int64 (size,)."""
        lacking = math.ceil(max(0, size - len(self.order)) / self.examples)
        fresh = [torch.randperm(self.examples, generator=self.rng) for _ in range(lacking)]
        drawn, self.order = torch.tensor_split(torch.cat([self.order, *fresh]), [size])
        return drawn


class ReplaySampler(ABC):
    """Draws batches of replayed examples from all that an institution keeps for replay."""

    options: ReplayConfig
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return images, float32 in [0, 1], masks included, and their labels."""

    def example(self, images_B: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return examples and labels, as a method trains on them, of what `take` returned."""
        return images_B, labels_B

    def beside(self, batch_size: int) -> int:
        """Return how many of these examples stand beside b real ones."""
        return self.options.num_replayed(batch_size, len(self))

    def batches(self, size: int, rng: torch.Generator, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches without end, from number `first` on; every example comes once before any comes again."""
        rows = Rows(len(self), rng)
        for i in itertools.count():
            drawn = rows.draw(size)
            if i >= first:
                yield self.take(drawn)


class ImageSampler(ReplaySampler):
    """Draws from buffers of images (n, C, H, W), uint8, and their labels (n,), all on one device."""

    def __init__(self, images: Tensor, labels: Tensor, options: ReplayConfig) -> None:
        self.images, self.labels, self.options = images, labels, options

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and their labels."""
        rows = rows.to(self.labels.device)
        return as_input(self.images[rows]), self.labels[rows]


class CodeSampler(ReplaySampler):
    """Draws from codes, and decodes them by generators whose decoders are the sources', in evaluation mode.

    The plan has the cache's size: a byte for each value. Where not all images fit, they are decoded at every draw.
    """

    def __init__(self, pairs: Sequence[tuple[VQVAE2, CodeSource]], replay_plan: ReplayPlan) -> None:
        self.replay_plan, self.options = replay_plan, replay_plan.replay
        self.generators = [generator for generator, _ in pairs]
        self.device = next(self.generators[0].parameters()).device
        unpacked = [unpack_codes(s.codes, g.codes_per_image, g.codebook_size) for g, s in pairs]
        small = max(generator.codebook_size for generator in self.generators) <= 256
        self.codes = torch.from_numpy(np.concatenate(unpacked).astype(np.uint8 if small else np.int32))
        self.labels = torch.from_numpy(np.concatenate([source.labels for _, source in pairs]))
        self.ends = np.cumsum([len(codes) for codes in unpacked])
        self.cached: Tensor | None = None
        values = self.decoded(torch.arange(1))[0].numel()
        if len(self) * values <= replay_plan.replay.cache_mb * 1e6:
            all_rows = torch.split(torch.arange(len(self)), replay_plan.at_once)
            self.cached = torch.cat([self.decoded(rows) for rows in all_rows])

    def decoded(self, rows: Tensor) -> Tensor:
        """Decode images (B, C, H, W) to bytes, as real images are kept."""
        images: Tensor | None = None
        for i, (generator, end) in enumerate(zip(self.generators, self.ends, strict=True)):
            mine = (rows < end) & (rows >= (self.ends[i - 1] if i else 0))
            if mine.any():
                made = generator.decode(self.codes[rows[mine]].long().to(self.device)).mul_(255).round_().byte()
                images = made.new_zeros((len(rows), *made.shape[1:])) if images is None else images
                images[mine.to(self.device)] = made
        assert images is not None
        return images

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return generated images, float32 in [0, 1], masks included, and the labels of their codes."""
        made = self.cached.index_select(0, rows.to(self.device)) if self.cached is not None else self.decoded(rows)
        return as_input(made), self.labels[rows].to(self.device)

    def example(self, images_B: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        """Split generated images into examples and masks, if the labels are masks: a channel of at least one half."""
        if self.replay_plan.kind != "segmentation":
            return images_B, labels_B
        return images_B[:, :-1], (images_B[:, -1] >= 0.5).to(torch.uint8)


@remembered(maxsize=1)  # institutions that share a process and sources share the sampler
def sampler_of(sources: tuple[CodeSource, ...], replay_plan: ReplayPlan, device: torch.device) -> CodeSampler:
    """Return a sampler of these sources, made once in a process."""
    pairs = []
    for source in sources:
        generator = replay_plan.fresh_generator()
        generator.load_decoder({name: torch.from_numpy(array) for name, array in source.decoder.items()})
        pairs.append((generator.to(device).eval(), source))
    return CodeSampler(pairs, replay_plan)
