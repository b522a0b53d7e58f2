"""Images from the codes of a VQ-VAE-2: decoded by the decoder that travelled, as every receiver does to replay them.

No search is needed. Codes are a small picture of the image, with the decoder as their key (Razavi et al. 2019, arXiv
1906.00446; Qu et al. 2022, Algorithm 1).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flwr_replay.generators.base import AT_ONCE, ReplayGenerator
from flwr_replay.generators.codes import unpack_codes

__all__ = ["decoded"]


def decoded(generator: ReplayGenerator, packed: NDArray[np.uint8]) -> Tensor:
    """Decode the codes of a message.

    Parameters
    ----------
    generator : ReplayGenerator
        With the decoder that travelled (`load_decoder`).
    packed : NDArray of uint8
        As they travel, one row of bytes for each image, (n, bytes).

    Returns
    -------
    Tensor
        (n, C, H, W) in [0, 1], on the generator's device.

    Raises
    ------
    WireError
        If they are not codes of this generator.
    """
    codes = torch.from_numpy(unpack_codes(packed, generator.codes_per_image, generator.codebook_size))
    device = next(iter(generator.state_dict().values())).device
    return torch.cat([generator.decode(part.to(device)) for part in torch.split(codes, AT_ONCE)])
