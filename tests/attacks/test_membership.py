"""Membership: LiRA separates an overfitted model's members, and is at chance on a model that never saw them."""

from types import SimpleNamespace

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from flwr_replay.attacks.membership import (
    equal_label_shares,
    lira_scores,
    logit_confidences,
    loss_scores,
    membership,
    nearest_scores,
    reference_models,
)
from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import TaskConfig, TrainingConfig
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.lab.judge import Originals
from flwr_replay.lab.membership import member_attacks
from flwr_replay.models import build

TASK = TaskConfig(name="digits", format="digits", channels=1, size=8, classes=10)
TRAINING = TrainingConfig(optimizer="adam", lr=3e-3, batch_size=16)
EPOCHS = 30
Data = tuple[torch.Tensor, torch.Tensor]


def fresh(seed: int) -> nn.Module:
    return build(ModelConfig(name="mlp", width=128), TASK, seed)


def trained(x: torch.Tensor, y: torch.Tensor) -> nn.Module:
    model, shuffle = fresh(99), torch.Generator().manual_seed(99)
    optimizer = torch.optim.Adam(model.parameters(), lr=TRAINING.lr)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(y), generator=shuffle).split(16):
            optimizer.zero_grad()
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    assert (model(x).argmax(1) == y).float().mean() > 0.9
    return model


@pytest.fixture(scope="module")
def noisy() -> Data:
    """Digits of which three in ten have a wrong label, so that a model must learn them by heart."""
    dataset, draws = load_digits(), torch.Generator().manual_seed(0)
    x, y = torch.tensor(dataset.images / 16, dtype=torch.float32)[:, None], torch.tensor(dataset.target)
    order = torch.randperm(len(y), generator=draws)
    wrong = torch.rand(len(y), generator=draws) < 0.3
    return x[order], torch.where(wrong, torch.randint(10, y.shape, generator=draws), y)[order]


@pytest.fixture(scope="module")
def references(noisy: Data) -> list[nn.Module]:
    return reference_models(fresh, F.cross_entropy, noisy[0][600:1400], noisy[1][600:1400], TRAINING, EPOCHS, 400, 6, 0)


@pytest.mark.sampled(2, of="slow learning")
def test_lira_finds_members_of_an_overfitted_model(noisy: Data, references: list[nn.Module]) -> None:
    x, y = noisy
    model = trained(x[:300], y[:300])
    own, foreign = equal_label_shares(y[:300].numpy(), y[300:600].numpy(), seed=0)
    scores = [lira_scores(model, references, x[rows], y[rows]) for rows in (own, foreign + 300)]
    report = membership(*scores)
    by_loss = membership(*(logit_confidences(model, x[rows], y[rows]) for rows in (own, foreign + 300)))
    assert report.auc.low > 0.65
    assert report.auc.value > by_loss.auc.value - 0.02
    assert report.tpr_at_1_percent.value > 0.05


@pytest.mark.sampled(2, of="slow learning")
def test_lira_is_at_chance_on_a_model_that_never_saw_them(noisy: Data, references: list[nn.Module]) -> None:
    x, y = noisy
    model = trained(x[1400:1700], y[1400:1700])
    own, foreign = equal_label_shares(y[:300].numpy(), y[300:600].numpy(), seed=0)
    report = membership(*(lira_scores(model, references, x[rows], y[rows]) for rows in (own, foreign + 300)))
    assert report.auc.low < 0.5 < report.auc.high


def test_confidences_are_the_formula_and_stay_finite() -> None:
    class Logits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1)

    x, y = torch.tensor([[0.0, 1.0, 2.0], [500.0, 0.0, 0.0]]), torch.tensor([2, 0])
    p = x[0].double().softmax(0)[2]
    model = Logits().train()
    confidences = logit_confidences(model, x, y)
    assert confidences[0] == pytest.approx(float((p / (1 - p)).log()))
    assert 499 < confidences[1] < 500
    assert model.training


def test_a_score_by_loss_is_its_negative() -> None:
    x, y = torch.randn(300, 4, generator=torch.Generator().manual_seed(0)), torch.arange(300) % 4
    scores = loss_scores(lambda a, b: F.cross_entropy(a, b, reduction="none"), x, y)
    torch.testing.assert_close(scores, -F.cross_entropy(x, y, reduction="none"))


def test_one_reference_model_is_too_few(noisy: Data) -> None:
    with pytest.raises(ConfigError, match="two reference models"):
        lira_scores(fresh(0), [fresh(1)], noisy[0][:3], noisy[1][:3])


def test_copies_that_a_generator_released_are_near_its_members(noisy: Data) -> None:
    x, _ = noisy
    copies = (x[:100] + 0.05 * torch.randn(100, 1, 8, 8, generator=torch.Generator().manual_seed(0))).clamp(0, 1)
    auxiliary = x[600:1000]
    report = membership(*(nearest_scores(copies, auxiliary, x[rows]) for rows in (slice(0, 100), slice(100, 200))))
    unrelated = membership(
        *(nearest_scores(x[1000:1100], auxiliary, x[rows]) for rows in (slice(100), slice(100, 200)))
    )
    assert report.auc.value > 0.99
    assert unrelated.auc.low < 0.5 < unrelated.auc.high


def test_when_time_is_up_two_reference_models_are_enough(noisy: Data) -> None:
    x, y = noisy
    models = reference_models(fresh, F.cross_entropy, x[600:700], y[600:700], TRAINING, 1, 50, 6, 0, seconds=0)
    assert len(models) == 2


def test_masks_are_members_by_no_label():
    """A mask has labels in its pixels, none of its own that others could share."""
    x, masks = torch.rand(30, 1, 4, 4), torch.ones((30, 4, 4), dtype=torch.int64)
    exhibit = SimpleNamespace(means="weights", answers=[None])
    ((name, ask),) = member_attacks(exhibit, None, Originals(x, masks, x, masks, ""), None, 0, 1)
    assert name == "membership"
    with pytest.raises(DataError, match="there are 0 training images"):
        ask()
