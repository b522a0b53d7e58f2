"""Tiny folders in the formats of clinical data sets, and how the tests read them."""

import csv

import numpy as np
import pytest
from PIL import Image

from flwr_replay.config.compose import compose
from flwr_replay.data import load
from flwr_replay.errors import DataError


def read(task, folder, *overrides):
    return load(compose([f"task={task}", f"task.data_dir='{folder}'", *overrides]).task)


def refused(task, folder, *words, overrides=()):
    """The error is one line with all these words."""
    with pytest.raises(DataError) as caught:
        read(task, folder, *overrides)
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert str(word) in line, line


def write_csv(path, header, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header.split(","), *rows])


def draw(path, level, size=(12, 10), mode="L"):
    """Save an image of one grey level; PNG keeps it exactly, JPEG nearly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, level if mode == "L" else (level,) * 3).save(path)


def truncate(path):
    """Keep the first part of a file that was whole."""
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    return whole


def levels(split):
    """The grey level of each of a split's images of one level."""
    flat = split.x.reshape(len(split), -1).astype(int)
    assert (np.ptp(flat, axis=1) == 0).all()
    return flat[:, 0].tolist()
