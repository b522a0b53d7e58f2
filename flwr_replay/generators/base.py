"""The interface of a generator whose images can be replayed.

`B` batch, `C` channels, `H` height, `W` width, `N` codes of an image.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from flwr_replay.errors import WireError

__all__ = ["Grids", "ReplayGenerator", "by_level"]

Grids = tuple[tuple[int, int], ...]


def by_level(codes_BN: Tensor, grids: Grids) -> list[Tensor]:
    """Split codes (B, N) into the grids of their levels, (B, height, width) each."""
    flat = torch.split(codes_BN, [height * width for height, width in grids], dim=1)
    return [codes.reshape(-1, *grid) for codes, grid in zip(flat, grids, strict=True)]


class ReplayGenerator(nn.Module, ABC):
    """A model that turns images into codes and codes into images.

    While it is trained, weights and running statistics travel as `state_dict`. A receiver of codes needs
    `decoder_state_dict` only.

    Attributes
    ----------
    grids : tuple of (int, int)
        Height and width of each level's codes, coarsest first; an image has N = Σ height · width codes.
    codebook_size : int
        Every code lies in [0, codebook_size).
    """

    grids: Grids
    codebook_size: int
    decodes: ClassVar[re.Pattern[str]]  # matches the names of the decoder's weights

    @abstractmethod
    def loss(self, x_BCHW: Tensor, rng: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss of a batch; in training mode, running statistics move too.

        Parameters
        ----------
        x_BCHW : Tensor
            Images in [0, 1], float32.
        rng : torch.Generator
            On the CPU; all randomness of the step comes from it.

        Returns
        -------
        loss : Tensor
            Mean over the examples, a scalar.
        parts : dict of str to Tensor
            Terms of the loss and statistics of the codes, detached scalars.
        """

    @abstractmethod
    def encode(self, x_BCHW: Tensor) -> Tensor:
        """Encode images in [0, 1]: codes (B, N) int64, level by level, row by row; nothing is learned."""

    @abstractmethod
    def decode(self, codes_BN: Tensor) -> Tensor:
        """Decode codes (B, N) to images (B, C, H, W) in [0, 1]."""

    @property
    def codes_per_image(self) -> int:
        """N."""
        return sum(height * width for height, width in self.grids)

    def decoder_state_dict(self) -> dict[str, Tensor]:
        """Return the weights that `decode` needs and no others."""
        return {name: value for name, value in self.state_dict().items() if self.decodes.match(name)}

    def load_decoder(self, state: Mapping[str, Tensor]) -> None:
        """Copy weights from another generator's `decoder_state_dict`.

        Raises
        ------
        WireError
            If names or shapes are not this generator's.
        """
        own = self.decoder_state_dict()
        if faults := sorted(own.keys() ^ state.keys()) or [
            name for name in own if own[name].shape != state[name].shape
        ]:
            raise WireError(
                f"a decoder must have the generator's own names and shapes; they differ at {faults[0]!r}: use the same "
                "generator.*, task.channels and task.size everywhere"
            )
        for name, value in own.items():
            value.copy_(state[name])
