"""A user's own model, data and training: plain PyTorch that knows nothing of flwr-replay."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["load_data", "net", "test", "train"]

Split = tuple[Tensor, Tensor]


def net(seed: int = 0) -> nn.Sequential:
    """Build a small network for 8 x 8 images of digits; it can be cut after any named part."""
    torch.manual_seed(seed)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            conv2=nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            head=nn.Sequential(nn.Flatten(), nn.Linear(128, 10)),
        )
    )


def load_data(partition_id: int, num_partitions: int) -> tuple[Split, Split]:
    """Return one institution's training and test examples: half of them are of the same few digits."""
    digits = load_digits()
    mixed, rest = np.array_split(np.random.default_rng(0).permutation(len(digits.target)), 2)
    by_digit = rest[np.argsort(digits.target[rest], kind="stable")]
    own = np.concatenate([np.array_split(rows, num_partitions)[partition_id] for rows in (mixed, by_digit)])
    own = np.random.default_rng(1).permutation(own)
    x = torch.from_numpy(digits.images[own, None] / 16).float()
    y = torch.from_numpy(digits.target[own]).long()
    cut = len(own) * 4 // 5
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def train(model: nn.Module, data: Split, epochs: int, lr: float) -> float:
    """Train with SGD; return the mean loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    shuffle, losses = torch.Generator().manual_seed(0), []
    for _ in range(epochs):
        for rows in torch.randperm(len(data[1]), generator=shuffle).split(32):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(data[0][rows]), data[1][rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


def test(model: nn.Module, data: Split) -> tuple[float, float]:
    """Return the mean loss and the accuracy."""
    with torch.inference_mode():
        logits = model(data[0])
    return functional.cross_entropy(logits, data[1]).item(), (logits.argmax(1) == data[1]).float().mean().item()
