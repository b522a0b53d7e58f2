"""Test images of a data set as PNG files, a folder for each label: `flwr-replay data images DIR`."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from flwr_replay.config.sections import TaskConfig
from flwr_replay.data.classes import Classes
from flwr_replay.data.datasets import Examples
from flwr_replay.data.folder import MODES
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.files.atomic import NAME, make_folder, write_atomic

__all__ = ["write_images"]


def write_images(examples: Examples, task: TaskConfig, count: int, out: Path) -> int:
    """Write the first images as `<label>/<number>.png`, which `flwr-replay predict` reads; return how many.

    `count` is at least 1, and more than there are means all. The folder `out` is created if missing.

    Raises
    ------
    ConfigError
        If the examples are no uint8 images, grey or in colour, with a class each of `task`.
    RunError
        If the folder cannot be written, or has another file of the same name; then nothing is written.
    """
    from PIL import Image

    if task.kind != "classification" or task.channels not in MODES or examples.x.dtype != np.uint8:
        raise ConfigError(f"only images with a class each can be written as PNG files; task={task.name} has others")
    if count < 1:
        raise ConfigError(f"--count must be at least 1; got {count}")
    pictures, classes = dict[Path, bytes](), Classes(task)
    for number, (x_CHW, label) in enumerate(zip(examples.x[:count], examples.y, strict=False)):
        name = classes.names[label]
        name = name if NAME.fullmatch(name) else f"class-{label}"  # a name may be no folder's, a number another's
        file = io.BytesIO()
        Image.fromarray(x_CHW[0] if task.channels == 1 else x_CHW.transpose(1, 2, 0)).save(file, "PNG")
        pictures[out / name / f"{number:05d}.png"] = file.getvalue()
    for path, picture in pictures.items():
        if path.exists() and path.read_bytes() != picture:
            raise RunError(f"{path} is there already, and is another image: choose another folder")
    for path, picture in pictures.items():
        make_folder(path.parent, "DIR")
        write_atomic(path, picture)
    return len(pictures)
