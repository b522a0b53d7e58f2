"""An attack on latents: of the attacker's own images, the one whose latents are nearest."""

import torch
from torch import Tensor

from flwr_replay.attacks.catalogue import Attack
from flwr_replay.lab.own import Seen

__all__ = ["attack"]


def look_up(seen: Seen, places: Tensor, seed: int) -> Tensor:
    """Return an image in [0, 1] for each of these places of what was sent, (n, C, H, W)."""
    assert seen.model is not None
    assert seen.auxiliary is not None
    (latents,) = seen.sent[0].values()
    with torch.no_grad():
        known = seen.model(seen.auxiliary.images_mCHW).flatten(1)
    return seen.auxiliary.images_mCHW[torch.cdist(torch.from_numpy(latents)[places].flatten(1), known).argmin(1)]


attack = Attack(gives="images", takes=("activations",), needs=("network", "auxiliary"), run=look_up)
