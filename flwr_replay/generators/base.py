"""What every method needs of a generator: images for labels.

`n` images of an institution, `B` batch, `C` channels, `H` height, `W` width, `N` codes of an image.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from flwr_replay.files.tensors import nested, unnested
from flwr_replay.models.layers import as_input
from flwr_replay.rng import derived_seed
from flwr_replay.wire.records import StateDict
from flwr_replay.wire.weights import load_arrays, load_optimizer_arrays, optimizer_arrays, to_arrays

__all__ = [
    "AT_ONCE",
    "ChargedSteps",
    "Grids",
    "ImageForm",
    "ImageGenerator",
    "Look",
    "by_level",
    "rows_of_step",
    "step_rng",
]

Grids = tuple[tuple[int, int], ...]
AT_ONCE = 256  # images embedded, encoded or drawn at a time


@dataclass(frozen=True)
class ImageForm:
    """The images that a generator makes: (channels, size, size), for labels in [0, classes)."""

    channels: int
    size: int
    classes: int


class ChargedSteps(Protocol):
    """Steps of DP-SGD that an institution has been charged for; `flwr_replay.institution.budget.DPTraining`."""

    def rows(self, examples: int) -> Iterator[Tensor]:
        """Yield the row numbers of each step's batch."""

    def uniform(self, examples: int, numbers: int) -> Tensor:
        """Draw secret numbers in [0, 1) for each example of a batch, (examples, numbers)."""

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        losses: Callable[..., Tensor],
        batch: tuple[Tensor, ...],
        batch_size: int,
        num_replayed: int = 0,
    ) -> None:
        """Take one step; the first `num_replayed` rows of the batch are public."""


class ImageGenerator(ABC):
    """Makes images for labels; one institution trains it alone, on its own images, from fresh weights.

    Its steps are numbered from 0. All randomness of a step comes from the seed and the step's number. So training may
    be cut into pieces anywhere, with `state` and `load_state` between them, and ends with the same bits. Under DP masks
    and noise are others every time.
    """

    parts: dict[str, nn.Module | torch.optim.Optimizer]  # what a file of its state has, in this order

    @abstractmethod
    def mechanisms(self, examples: int) -> dict[str, int]:
        """Return the steps of the whole training on so many images: by mechanism, in the order of the training."""

    def steps(self, examples: int) -> int:
        """Return the number of all steps."""
        return sum(self.mechanisms(examples).values())

    @abstractmethod
    def train(
        self,
        images: Tensor,
        labels: Tensor,
        steps: range,
        dp: ChargedSteps | None = None,
        classes: Tensor | None = None,
    ) -> dict[str, float]:
        """Make some steps of the training.

        Parameters
        ----------
        images : Tensor
            All of the institution's, (n, C, H, W), uint8 or float32 in [0, 1].
        labels : Tensor
            Their classes, (n,), int64.
        steps : range
            The numbers of the steps to make; those before have been made.
        dp : ChargedSteps or None
            Takes all steps that depend on the images, which belong to one of the `mechanisms`; None: there is no DP.
        classes : Tensor or None
            Under DP: those that the institution declares, (k,), int64.

        Returns
        -------
        dict of str to float
            Means over these steps, by name: losses, and statistics of the training. The key `loss` is always there.
            Under DP it is 0, and the only one.
        """

    @abstractmethod
    def sample(self, labels_B: Tensor, rng: torch.Generator) -> Tensor:
        """Draw images (B, C, H, W) in [0, 1], float32, for labels (B,); `rng` is on the CPU."""

    @abstractmethod
    def closest(self, x_BCHW: Tensor, labels_B: Tensor, look: Look) -> Tensor:
        """Look for images that it can make near given ones of int64 classes; `look` says what near is.

        All images are (B, C, H, W) in [0, 1], float32; those returned are on the CPU.
        """

    def state(self) -> StateDict:
        """Return all that further training and sampling need: weights, running means, optimizers' states."""
        arrays = {
            name: to_arrays(part) if isinstance(part, nn.Module) else optimizer_arrays(part)
            for name, part in self.parts.items()
        }
        return nested(arrays)

    def load_state(self, state: StateDict) -> None:
        """Restore what `state` returned; raise `WireError` if names or shapes are not this generator's."""
        groups = unnested(state, only=tuple(self.parts))
        for name, part in self.parts.items():
            if isinstance(part, nn.Module):
                load_arrays(part, groups[name])
            else:
                load_optimizer_arrays(part, groups[name])


class Look(nn.Module, ABC):
    """Turns images into vectors whose squared distance says how different they look."""

    name: str  # stands beside every distance

    @abstractmethod
    def embed(self, x_BCHW: Tensor) -> Tensor:
        """Return the vectors (B, F) of images (B, C, H, W) in [0, 1]; differentiable."""

    @torch.no_grad()
    def embed_all(self, x_nCHW: Tensor, device: torch.device) -> Tensor:
        """Return the vectors (n, F) of many images, uint8 or in [0, 1], on the device."""
        return torch.cat([self.embed(as_input(x).to(device)) for x in torch.split(x_nCHW, AT_ONCE)])


def step_rng(seed: int, step: int, purpose: str = "") -> torch.Generator:
    """Return the CPU rng of a training step."""
    return torch.Generator().manual_seed(derived_seed(seed, "step", step, purpose))


def rows_of_step(step: int, examples: int, batch_size: int, seed: int) -> Tensor:
    """Return the rows of a step's batch: every pass takes ⌊n/b⌋ full batches, at least one, of an order of its own."""
    in_pass = max(1, examples // batch_size)
    epoch, place = divmod(step, in_pass)
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(derived_seed(seed, "pass", epoch)))
    return order[place * batch_size : (place + 1) * batch_size]


def by_level(codes_BN: Tensor, grids: Grids) -> list[Tensor]:
    """Split codes (B, N) into the grids of their levels, (B, height, width) each."""
    flat = torch.split(codes_BN, [height * width for height, width in grids], dim=1)
    return [codes.reshape(-1, *grid) for codes, grid in zip(flat, grids, strict=True)]
