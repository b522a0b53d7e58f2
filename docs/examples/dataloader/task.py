"""A user's own model and data as Flower's quickstart has them: a module without arguments, and DataLoaders."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split

__all__ = ["Net", "load_data"]

Loader = DataLoader[tuple[Tensor, ...]]


class Net(nn.Module):
    """A small network for 8 x 8 images of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(16 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (B, 10), of images, (B, 1, 8, 8)."""
        x = self.pool(functional.relu(self.conv(x))).flatten(1)
        return self.fc2(functional.relu(self.fc1(x)))


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[Loader, Loader]:
    """Return one institution's loaders: four fifths of its images to train on, the rest to test on."""
    digits = load_digits()
    own = slice(partition_id, None, num_partitions)
    x = torch.from_numpy(digits.images[own, None] / 16).float()
    data = TensorDataset(x, torch.from_numpy(digits.target[own]).long())
    train, test = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(42))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(test, batch_size=batch_size)
