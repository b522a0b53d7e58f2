"""Pictures of what a generator makes. They show patients' images and stay in the institution's state directory."""

from collections.abc import Mapping
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

from flwr_replay.files.atomic import private_folder, read_bytes, write_atomic

__all__ = ["SCALE", "SHOWN", "draw_grid", "gather"]

SHOWN = 12  # images in a row
SCALE = 3  # small images are drawn larger


def draw_grid(path: Path, rows: Mapping[str, Tensor]) -> None:
    """Draw rows of images below one another; a mask's channel is a row of its own.

    The name of the PNG, whose folder is made, should say what the rows show: `real-reconstruction-replay`. Images are
    (n, C, H, W) in [0, 1], all of one shape.
    """
    from torchvision.utils import save_image

    tiles: list[Tensor] = []
    for images in rows.values():
        pixels = images[:SHOWN].float().cpu()
        for channels in (pixels,) if pixels.shape[1] in (1, 3) else torch.split(pixels, 1, dim=1):
            blank = torch.ones(SHOWN - len(channels), *channels.shape[1:])
            tiles += torch.cat([channels, blank]).unbind()
    larger = torch.stack(tiles).repeat_interleave(SCALE, 2).repeat_interleave(SCALE, 3)
    picture = BytesIO()
    save_image(larger, picture, format="png", nrow=SHOWN, padding=SCALE, pad_value=1.0)
    private_folder(path.parent)
    write_atomic(path, picture.getvalue())


def gather(states: Mapping[str, Path], folder: Path) -> None:
    """Copy pictures of a simulation's institutions, from their states in the run, to `pictures/` in its directory."""
    for name, state in states.items():
        for picture in sorted(state.glob("pictures/*.png")):
            target = private_folder(folder / "pictures" / name)
            write_atomic(target / picture.name, read_bytes(picture))
