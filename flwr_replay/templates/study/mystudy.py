"""Model and data of the study: plain PyTorch and NumPy."""

from collections import OrderedDict
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from torch import nn

__all__ = ["build", "load"]


def build(channels: int, size: int, classes: int) -> nn.Sequential:
    """Return named stages; the last is the head."""
    body = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(16 * (size // 2) ** 2, classes)))


def load(data_dir: str) -> dict[str, Any]:
    """Return all examples, of which the last fifth is for testing; yours would be read from `data_dir`."""
    digits = load_digits()
    return {"all": ((digits.images * 15).astype(np.uint8), digits.target)}
