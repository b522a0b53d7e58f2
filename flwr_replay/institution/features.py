"""Features once: what a frozen encoder makes of an institution's images is computed once and kept on its disk.

It lies beside the decoded images, under the same limit, is removed with them, and never leaves by itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_replay.config.sections import TaskConfig
from flwr_replay.data import Dataset, Examples
from flwr_replay.data.decoded import DecodedImages, Indices, decoded, digest_of, form_of, mapped, versions
from flwr_replay.files.tensors import digest
from flwr_replay.models.frozen import Frozen
from flwr_replay.models.layers import as_input

__all__ = ["featured"]

FORMAT = 1  # a higher one where the features' bits change
PACKAGES = ("flwr-replay", "torch", "timm")  # whose version may change them
# Images pass the encoder some at a time: always as many, since their number may change the last bits. On a CPU they
# have so many pixels: with more, the system gives and takes an activation's memory anew for every layer.
TOGETHER, PIXELS = 64, 160_000


@dataclass(frozen=True)
class FeatureSource:
    """Images of a data set, and the encoder that they pass."""

    what: ClassVar[str] = "features beside decoded images"
    dtype: ClassVar[type[np.float32]] = np.float32

    task: TaskConfig
    splits: Mapping[str, Examples]  # by split
    encoder: Frozen
    device: torch.device

    @property
    def total(self) -> int:
        """How many examples there are."""
        return sum(map(len, self.splits.values()))

    @property
    def needs(self) -> int:
        """The bytes of the images that are kept, too."""
        return sum(own.x.nbytes for own in self.splits.values() if mapped(own.x))

    @property
    def form(self) -> str:
        """What an entry is named by: the data folder, the task and the encoder."""
        return digest_of([form_of(self.task), self.encoder.digest])

    @property
    def key(self) -> str:
        """All that the features depend on, as a digest: images, encoder, device, threads, versions, own code."""
        images = [[split, mapped(own.x) or own.digest] for split, own in self.splits.items()]
        first = next(own.x[:1] for own in self.splits.values() if len(own))
        probe = digest({"x": self.encoded(first)}) if self.encoder.alone else ""
        made_by = [self.device.type, torch.get_num_threads(), versions(PACKAGES), probe]
        return digest_of([FORMAT, self.form, images, made_by])

    @property
    def together(self) -> int:
        """How many images pass the encoder at a time."""
        if self.encoder.alone or self.device.type != "cpu":
            return 1 if self.encoder.alone else TOGETHER
        side = (self.encoder.prepared or self.task).size
        return max(1, min(TOGETHER, PIXELS // side**2))

    def shape(self, n: int) -> tuple[int, int, int, int]:
        """Return the shape of n examples."""
        return n, *self.encoder.stored

    def divide(self) -> Mapping[str, Indices]:
        """Return the indices of the examples in each split."""
        return {split: np.arange(len(own)) for split, own in self.splits.items()}

    def examples(self, members: Mapping[str, Indices]) -> Iterator[NDArray[Any]]:
        """Encode split by split; yield some at a time."""
        for split in members:
            x = self.splits[split].x
            for first in range(0, len(x), self.together):
                yield self.encoded(x[first : first + self.together])

    def encoded(self, x: NDArray[Any]) -> NDArray[np.float32]:
        """Return the features of at most `together` images."""
        filled = np.concatenate([x, np.repeat(x[:1], self.together - len(x), axis=0)])
        with torch.inference_mode():
            features = self.encoder(as_input(torch.from_numpy(filled).to(self.device)))[: len(x)].float()
        made: NDArray[np.float32] = features.reshape(self.shape(len(x))).cpu().numpy()
        return made


def featured(dataset: Dataset, task: TaskConfig, encoder: Frozen, device: torch.device, kept: DecodedImages) -> Dataset:
    """Return a data set with features in the place of images; labels and splits stay.

    The encoder has the same bits for every image, whichever others it is computed with: on a CPU, and with equal
    numbers of threads.
    """
    splits = {split: own for split, own in vars(dataset).items() if isinstance(own, Examples)}
    made = decoded(FeatureSource(task, splits, encoder.to(device), device), kept)
    bytes_of = {split: own.x.itemsize * prod(own.x.shape[1:]) for split, own in splits.items()}
    changed: dict[str, Any] = {
        split: replace(own, x=made[split][1], image_bytes=bytes_of[split], images=own) for split, own in splits.items()
    }
    return replace(dataset, **changed)
