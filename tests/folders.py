"""Folders of tiny images, and what is read of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flwr_replay.config.sections import TaskConfig
from flwr_replay.data import Dataset, load
from flwr_replay.errors import DataError
from flwr_replay.runs.options import resolve


def draw(path: Path, value: int = 0, size: tuple[int, int] = (8, 8), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    Image.fromarray(np.full(shape, value % 256, np.uint8)).save(path)


def manifest(folder: Path, header: str, rows: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.csv").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")


def values(data: Dataset) -> tuple[list[int], list[int]]:
    return data.train.x[:, 0, 0, 0].tolist(), data.test.x[:, 0, 0, 0].tolist()


def refused(task: TaskConfig, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        load(task)
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line, line


def draw_folders(root: Path, *folders: str, suffix: str = ".png") -> None:
    for place, folder in enumerate(folders):
        for n in range(4):
            draw(root / folder / f"{n}{suffix}", 40 * place + n)


def read_off(folder: Path, *more: str) -> TaskConfig:
    return resolve(["task=folder", f"task.data-dir={folder}", "task.size=8", "nodes=2", *more], "", "")[1].task
