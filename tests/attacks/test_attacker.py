"""The attacker: what it has, what it chooses, and that originals change scores only."""

import importlib
import pkgutil
from dataclasses import replace

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import flwr_replay.attacks
from flwr_replay.attacks import attacker
from flwr_replay.attacks.attacker import LATENT_SEARCHES, Attacker, Auxiliary, head_bias
from flwr_replay.attacks.gradients import LocalSteps, change_of
from flwr_replay.attacks.latents import latents_of
from flwr_replay.attacks.scores import Judge
from flwr_replay.attacks.search import Search
from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import TaskConfig
from flwr_replay.errors import ConfigError
from flwr_replay.models import StagedModel, build, split

TASK = TaskConfig(name="digits", format="digits", channels=1, size=8, classes=10)
FORM = (1, 8, 8)
QUICK = (Search(alpha=100, steps=60, lr=0.1, signs=True), Search(alpha=1e-3, steps=60, lr=0.1, signs=True))


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    dataset = load_digits()
    return torch.tensor(dataset.images / 16, dtype=torch.float32)[:, None], torch.tensor(dataset.target)


@pytest.fixture(scope="module")
def auxiliary(digits: tuple[torch.Tensor, torch.Tensor]) -> Auxiliary:
    return Auxiliary("institution-2", digits[0][600:900], digits[1][600:900])


@pytest.fixture(autouse=True)
def few_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attacker, "LATENT_SEARCHES", QUICK)
    monkeypatch.setattr(attacker, "CHANGE_SEARCHES", QUICK)


def untimed_attacker(auxiliary: Auxiliary | None) -> Attacker:
    """Return an attacker without time, which takes the fewest steps."""
    return Attacker(FORM, auxiliary, 0, seconds=0)


def network(name: str) -> StagedModel:
    return build(ModelConfig(name=name, width=32, norm="group"), TASK, 0)


def test_originals_of_nan_change_scores_only(digits: tuple[torch.Tensor, torch.Tensor], auxiliary: Auxiliary) -> None:
    encoder, _ = split(network("cnn"), "conv1")
    sent = latents_of(encoder, digits[0][:6])
    scores, pictures = [], []
    for originals in (digits[0][:50], digits[0][:50] * float("nan")):
        judge = Judge(originals)
        pictures_of_nan = [attempt.images()[0] for attempt in untimed_attacker(auxiliary).latents(encoder, sent, 6)]
        pictures.append(pictures_of_nan)
        scores.append([judge.scores(images, torch.arange(6)) for images in pictures_of_nan])
    assert all(torch.equal(picture, two) for picture, two in zip(*pictures, strict=True))
    assert scores[0][0].identified.value == 1
    assert [score.identified.value for score in scores[1]] == [0, 0, 0]


def test_no_attack_knows_the_judge() -> None:
    for attack in pkgutil.iter_modules(flwr_replay.attacks.__path__):
        module = importlib.import_module(f"flwr_replay.attacks.{attack.name}")
        if attack.name != "scores":
            used = {getattr(value, "__module__", getattr(value, "__name__", "")) for value in vars(module).values()}
            assert "flwr_replay.attacks.scores" not in used, attack.name


def test_settings_come_from_auxiliary_images(digits: tuple[torch.Tensor, torch.Tensor], auxiliary: Auxiliary) -> None:
    encoder, _ = split(network("cnn"), "conv1")
    attempt = next(untimed_attacker(auxiliary).latents(encoder, latents_of(encoder, digits[0][:3]), 3))
    assert attempt.images()[1] == {"alpha": 1e-3, "steps": 50, "restarts": 1, "candidates": 2}


def test_without_auxiliary_images_there_is_one_attempt(digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    encoder, _ = split(network("cnn"), "conv1")
    (attempt,) = untimed_attacker(None).latents(encoder, latents_of(encoder, digits[0][:3]), 2)
    assert attempt.attack.name == "latent matching"
    assert len(attempt.images()[0]) == 2


def test_auxiliary_images_of_another_form_are_refused(auxiliary: Auxiliary) -> None:
    with pytest.raises(ConfigError, match=r"\(1, 28, 28\); got \(1, 8, 8\)"):
        Attacker((1, 28, 28), auxiliary, 0)


@pytest.mark.parametrize(
    "local",
    [LocalSteps(), LocalSteps(lr=0.05), LocalSteps(lr=0.05, momentum=0.9, weight_decay=0.5)],
    ids=["gradient", "weights", "weights that decayed"],
)
def test_from_one_example_labels_and_image(
    digits: tuple[torch.Tensor, torch.Tensor], auxiliary: Auxiliary, local: LocalSteps
) -> None:
    x, y, model = digits[0][3:4], digits[1][3:4], network("mlp")
    change = change_of(model, F.cross_entropy, x, y, local)
    labels = untimed_attacker(auxiliary).labels(model, change, 1, local)
    assert labels.tolist() == y.tolist()
    analytic, matched = untimed_attacker(auxiliary).changes(model, F.cross_entropy, change, labels, local)
    judge = Judge(digits[0][:100])
    assert judge.scores(analytic.images()[0], torch.tensor([3])).psnr > 50
    images, settings = matched.images()
    assert judge.scores(images, torch.tensor([3])).identified.value == 1
    assert settings["alpha"] == 1e-3


def test_a_convolution_is_attacked_by_matching_only(digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = network("cnn")
    change = change_of(model, F.cross_entropy, digits[0][:1], digits[1][:1], LocalSteps())
    assert untimed_attacker(None).labels(model, change, 1, LocalSteps()).tolist() == digits[1][:1].tolist()
    (attempt,) = untimed_attacker(None).changes(model, F.cross_entropy, change, digits[1][:1], LocalSteps())
    assert attempt.attack.name == "gradient matching"


def test_a_head_without_a_bias_is_refused() -> None:
    with pytest.raises(ConfigError, match="linear head"):
        head_bias(split(network("cnn"), "conv2")[0])


def test_a_search_keeps_to_its_time(monkeypatch):
    """A step of a second: no choice of settings where it would take too long, and then no search."""
    clock = [0.0]
    monkeypatch.setattr("flwr_replay.attacks.attacker.time.perf_counter", lambda: clock[0])

    def slow(search):
        clock[0] += search.steps
        return torch.zeros(1)

    known = Auxiliary("known", torch.zeros(8, 1, 2, 2), torch.zeros(8))
    paced = {
        seconds: Attacker((1, 2, 2), known, 0, seconds)._paced(LATENT_SEARCHES, slow, 1.0) for seconds in (6, 17, 400)
    }
    assert [[search.steps for search in searches] for searches in paced.values()] == [[50], [50], [213] * 5]
    with pytest.raises(ConfigError, match="one takes 2 s here; it may take 60 s: give more --minutes"):
        Attacker((1, 2, 2), known, 0, 1)._paced(
            LATENT_SEARCHES, lambda search: slow(replace(search, steps=2 * search.steps)), 1
        )
