"""Images and labels from gradients and changes of weights."""

from dataclasses import replace

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

from flwr_replay.attacks.gradients import LocalSteps, change_of, first_input, invert, label_counts
from flwr_replay.attacks.scores import Judge, psnr
from flwr_replay.attacks.search import Search
from flwr_replay.clients.fedprox import distance
from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import TaskConfig
from flwr_replay.errors import ConfigError
from flwr_replay.models import StagedModel, build

TASK = TaskConfig(name="digits", format="digits", channels=1, size=8, classes=10)
FORM = (1, 8, 8)
SGD = LocalSteps(steps=4, batch_size=2, lr=0.05, momentum=0.9, weight_decay=0.01)


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    dataset = load_digits()
    return torch.tensor(dataset.images / 16, dtype=torch.float32)[:, None], torch.tensor(dataset.target)


def network(name: str, task: TaskConfig = TASK, norm: str = "batch", width: int = 32) -> StagedModel:
    return build(ModelConfig(name=name, width=width, norm=norm), task, 0)


@pytest.mark.parametrize(("norm", "mu"), [("group", 0.0), ("batch", 0.0), ("group", 2.0)])
def test_simulated_steps_are_pytorchs(digits: tuple[torch.Tensor, torch.Tensor], norm: str, mu: float) -> None:
    """Of SGD, and of FedProx, whose steps are pulled to the weights sent."""
    x, y = digits[0][:4], digits[1][:4]
    model, trained = network("cnn", norm=norm), network("cnn", norm=norm)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for rows in (slice(0, 2), slice(2, 4)) * 2:
        optimizer.zero_grad()
        pull = mu / 2 * distance(trained, list(model.parameters()))
        (F.cross_entropy(trained(x[rows]), y[rows]) + pull).backward()
        optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    change = change_of(model, F.cross_entropy, x, y, replace(SGD, pull=mu))
    for name, weight in trained.named_parameters():
        torch.testing.assert_close(before[name] - change[name], weight)
    for name, value in trained.state_dict().items():
        if "running" in name:
            torch.testing.assert_close(change[name], value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_the_default_change_is_the_gradient(digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y, model = digits[0][:5], digits[1][:5], network("mlp")
    F.cross_entropy(model(x), y).backward()
    change = change_of(model, F.cross_entropy, x, y, LocalSteps())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(change[name], weight.grad, rtol=1e-4, atol=1e-7)


def test_momentum_and_decay_are_no_part_of_the_gradient_behind_a_change(
    digits: tuple[torch.Tensor, torch.Tensor],
) -> None:
    x, y, model = digits[0][:5], digits[1][:5], network("mlp")
    right = change_of(model, F.cross_entropy, x, y, LocalSteps())
    for steps, rtol in ((1, 1e-3), (4, 0.05)):  # the weights move a little between steps
        local = LocalSteps(steps=steps, lr=1e-3, momentum=0.9, weight_decay=0.5)
        gradients = local.gradients(model, change_of(model, F.cross_entropy, x, y, local))
        assert gradients.keys() == right.keys()
        for name, gradient in right.items():
            assert (gradients[name] - gradient).norm() < rtol * gradient.norm(), name


@pytest.mark.parametrize("standardised", [False, True])
def test_a_linear_first_layer_gives_the_image_exactly(
    digits: tuple[torch.Tensor, torch.Tensor], standardised: bool
) -> None:
    scale = {"mean": (0.3,), "std": (0.4,)} if standardised else {}
    task = TaskConfig(name="digits", format="digits", channels=1, size=8, classes=10, **scale)
    model = network("mlp", task)
    for row in range(5):
        x, y = digits[0][row : row + 1], digits[1][row : row + 1]
        for local in (LocalSteps(), LocalSteps(lr=0.01)):
            recovered = first_input(model, change_of(model, F.cross_entropy, x, y, local), FORM)
            assert psnr(recovered, x) > (
                100 if local.lr == 1 else 50
            )  # weights' own rounding is part of a small change


def test_what_cannot_be_inverted_analytically_is_refused(digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    model, flat = network("cnn"), network("mlp")
    with pytest.raises(ConfigError, match="linear first layer"):
        first_input(model, change_of(model, F.cross_entropy, digits[0][:2], digits[1][:2], LocalSteps()), FORM)
    with pytest.raises(ConfigError, match="zeros"):
        first_input(flat, {name: torch.zeros_like(p) for name, p in flat.named_parameters()}, FORM)


@pytest.mark.parametrize("name", ["mlp", "cnn1", "cnn"])
def test_the_label_of_one_example_is_certain(digits: tuple[torch.Tensor, torch.Tensor], name: str) -> None:
    task = TaskConfig(name="digits", format="digits", channels=1, size=12, classes=10)
    model = build(ModelConfig(name=name, width=16, norm="group"), task, 0)
    x = F.interpolate(digits[0][:20], size=12)
    for row in range(20):
        gradient = change_of(model, F.cross_entropy, x[row : row + 1], digits[1][row : row + 1], LocalSteps())
        bias = next(value for name, value in reversed(gradient.items()) if name.endswith("head.fc.bias"))
        uniform = torch.full((10,), 0.1)
        assert label_counts(bias, 1, uniform).argmax() == digits[1][row]


def test_the_counts_of_eight_examples_are_right(digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = network("mlp")
    auxiliary = model(digits[0][1000:1200]).softmax(1).mean(0).detach()
    for first in range(0, 160, 8):
        x, y = digits[0][first : first + 8], digits[1][first : first + 8]
        gradient = change_of(model, F.cross_entropy, x, y, LocalSteps())
        assert label_counts(gradient["head.fc.bias"], 8, auxiliary).tolist() == torch.bincount(y, minlength=10).tolist()


def test_counts_sum_to_the_examples_whatever_the_gradient_says() -> None:
    noise = torch.randn(10, generator=torch.Generator().manual_seed(0))
    for examples in (1, 3, 50):
        counts = label_counts(noise, examples, torch.full((10,), 0.1))
        assert counts.sum() == examples
        assert counts.min() >= 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("local", [LocalSteps(), LocalSteps(steps=4, batch_size=2, lr=0.05)], ids=["gradient", "steps"])
def test_images_behind_a_change_are_found(digits: tuple[torch.Tensor, torch.Tensor], local: LocalSteps) -> None:
    x, y = digits[0][:4], digits[1][:4]
    model = network("mlp", width=128)
    change = change_of(model, F.cross_entropy, x, y, local)
    recovered = invert(
        model, F.cross_entropy, change, y, FORM, local, Search(alpha=1e-4, steps=300, lr=0.1, signs=True), seed=0
    )
    judge = Judge(digits[0][:300])
    scores, control = (
        judge.scores(recovered, torch.arange(4), batch=4),
        judge.control(recovered, torch.arange(4), batch=4),
    )
    assert control is not None
    assert scores.identified.value == 1
    assert scores.psnr > 20
    assert control.identified.value == 0


@pytest.mark.sampled(2, of="slow learning")
def test_norm_statistics_help(digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, y, model = digits[0][:4], digits[1][:4], network("cnn")
    change = change_of(model, F.cross_entropy, x, y, LocalSteps())

    def distance(statistics: float) -> float:
        search = Search(alpha=1e-3, steps=150, lr=0.1, statistics=statistics)
        recovered = invert(model, F.cross_entropy, change, y, FORM, LocalSteps(), search, 0)
        back = change_of(model, F.cross_entropy, recovered, y, LocalSteps())
        return float((back["conv1.norm.running_mean"] - change["conv1.norm.running_mean"]).norm())

    assert distance(0.1) < 0.5 * distance(0.0)
