"""DeepSet: an order of vectors, and empty places, change nothing; its layers are the paper's."""

import torch

from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import TaskConfig
from flwr_replay.models import build

TASK = TaskConfig(name="slides", format="bags", channels=5, size=3, classes=4)


def test_it_is_the_paper_s():
    model = build(ModelConfig(name="deepset", width=512), TASK, 0)
    assert [tuple(p.shape) for p in model.parameters() if p.dim() > 1] == [
        (512, 5, 1, 1),
        (128, 512),
        (64, 128),
        (4, 64),
    ]


def test_neither_order_nor_empty_places_count():
    model, x = build(ModelConfig(name="deepset", width=8), TASK, 0), torch.zeros(1, 5, 9)
    x[0, :, :4] = torch.randn(5, 4)
    moved = x[:, :, torch.randperm(9)]
    torch.testing.assert_close(model(x.view(1, 5, 3, 3)), model(moved.view(1, 5, 3, 3)))
    torch.testing.assert_close(model(x.view(1, 5, 3, 3)), model(x[:, :, :4].view(1, 5, 2, 2)))


def test_it_is_the_mean_over_the_vectors():
    model, x = build(ModelConfig(name="deepset", width=8), TASK, 0), torch.randn(5, 4)
    elements = model.elements.mean
    by_hand = torch.relu(x.T @ elements.fc.weight.view(8, 5).T + elements.fc.bias).mean(0)
    torch.testing.assert_close(elements(x.view(1, 5, 2, 2))[0], by_hand)


def test_an_empty_bag_is_answered():
    model = build(ModelConfig(name="deepset", width=8), TASK, 0)
    assert model(torch.zeros(2, 5, 3, 3)).isfinite().all()
