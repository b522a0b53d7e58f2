"""A model, data and training as Flower's PyTorch quickstart has them: a module without arguments, and DataLoaders."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset, random_split

__all__ = ["Net", "load_data", "test", "train"]

Loader = DataLoader[tuple[Tensor, ...]]


class Net(nn.Module):
    """A small network for 8 x 8 images of digits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (B, 10), of images, (B, 1, 8, 8)."""
        x = self.pool(functional.relu(self.conv1(x)))
        x = self.pool(functional.relu(self.conv2(x)))
        x = x.view(-1, 32 * 2 * 2)
        return self.fc2(functional.relu(self.fc1(x)))


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[Loader, Loader]:
    """Return one institution's loaders: four fifths of its images to train on, the rest to test on."""
    digits = load_digits()
    own = slice(partition_id, None, num_partitions)
    x = torch.from_numpy(digits.images[own, None] / 16).float()
    data = TensorDataset(x, torch.from_numpy(digits.target[own]).long())
    train_set, test_set = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(42))
    return DataLoader(train_set, batch_size=batch_size, shuffle=True), DataLoader(test_set, batch_size=batch_size)


def train(net: nn.Module, trainloader: Loader, epochs: int, lr: float) -> float:
    """Train with SGD; return the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / (epochs * len(trainloader))


def test(net: nn.Module, testloader: Loader) -> tuple[float, float]:
    """Return the mean loss and the accuracy."""
    net.eval()
    loss, correct, seen = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in testloader:
            logits = net(images)
            loss += functional.cross_entropy(logits, labels, reduction="sum").item()
            correct += int((logits.argmax(1) == labels).sum())
            seen += len(labels)
    return loss / seen, correct / seen
