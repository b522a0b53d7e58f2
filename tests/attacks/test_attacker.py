"""The attacker: what it has, what it chooses, and that originals change scores only."""

import importlib
import pkgutil

import pytest
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import flwr_replay.attacks
from flwr_replay.attacks.attacker import Attacker, Auxiliary, head_bias
from flwr_replay.attacks.catalogue import ATTACKS, MEANINGS, attacks_on
from flwr_replay.attacks.gradients import LocalSteps, change_of
from flwr_replay.attacks.latents import latents_of
from flwr_replay.attacks.scores import Judge
from flwr_replay.attacks.search import Search
from flwr_replay.config.sections import ModelConfig, TaskConfig
from flwr_replay.errors import ConfigError
from flwr_replay.models import StagedModel, build, split

TASK = TaskConfig(name="digits", format="digits", channels=1, size=8, classes=10)
FORM = (1, 8, 8)
QUICK = (Search(alpha=100, steps=60, lr=0.1, signs=True), Search(alpha=1e-3, steps=60, lr=0.1, signs=True))


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    found = load_digits()
    return torch.tensor(found.images / 16, dtype=torch.float32)[:, None], torch.tensor(found.target)


@pytest.fixture(scope="module")
def auxiliary(digits: tuple[torch.Tensor, torch.Tensor]) -> Auxiliary:
    return Auxiliary("institution-2", digits[0][600:900], digits[1][600:900])


def network(name: str) -> StagedModel:
    return build(ModelConfig(name=name, width=32, norm="group"), TASK, 0)


def test_originals_of_nan_change_scores_only(digits: tuple[torch.Tensor, torch.Tensor], auxiliary: Auxiliary) -> None:
    encoder, _ = split(network("cnn"), "conv1")
    sent = latents_of(encoder, digits[0][:6])
    scores, pictures = [], []
    for originals in (digits[0][:50], digits[0][:50] * float("nan")):
        judge = Judge(originals)
        attempts = list(Attacker(FORM, auxiliary, 0, QUICK, decoder_steps=20).latents(encoder, sent))
        pictures.append([attempt.images_nCHW for attempt in attempts])
        scores.append([judge.scores(attempt.images_nCHW, torch.arange(6)) for attempt in attempts])
    assert all(torch.equal(one, two) for one, two in zip(*pictures, strict=True))
    assert scores[0][0].identified.value == 1
    assert [one.identified.value for one in scores[1]] == [0, 0, 0]


def test_no_attack_knows_the_judge() -> None:
    for found in pkgutil.iter_modules(flwr_replay.attacks.__path__):
        module = importlib.import_module(f"flwr_replay.attacks.{found.name}")
        if found.name != "scores":
            used = {getattr(value, "__module__", getattr(value, "__name__", "")) for value in vars(module).values()}
            assert "flwr_replay.attacks.scores" not in used, found.name


def test_settings_come_from_auxiliary_images(digits: tuple[torch.Tensor, torch.Tensor], auxiliary: Auxiliary) -> None:
    encoder, _ = split(network("cnn"), "conv1")
    attempt = next(Attacker(FORM, auxiliary, 0, QUICK, QUICK).latents(encoder, latents_of(encoder, digits[0][:3])))
    assert (attempt.search, attempt.auxiliary) == (QUICK[1], "institution-2")


def test_without_auxiliary_images_there_is_one_attempt(digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    encoder, _ = split(network("cnn"), "conv1")
    (attempt,) = Attacker(FORM, None, 0, QUICK, QUICK).latents(encoder, latents_of(encoder, digits[0][:3]))
    assert (attempt.attack.name, attempt.auxiliary) == ("latent matching", "none")


def test_auxiliary_images_of_another_form_are_refused(auxiliary: Auxiliary) -> None:
    with pytest.raises(ConfigError, match=r"\(1, 28, 28\); got \(1, 8, 8\)"):
        Attacker((1, 28, 28), auxiliary, 0)


@pytest.mark.parametrize("local", [LocalSteps(), LocalSteps(lr=0.05)], ids=["gradient", "weights"])
def test_from_one_example_labels_and_image(
    digits: tuple[torch.Tensor, torch.Tensor], auxiliary: Auxiliary, local: LocalSteps
) -> None:
    x, y, model = digits[0][3:4], digits[1][3:4], network("mlp")
    change = change_of(model, F.cross_entropy, x, y, local)
    attacker = Attacker(FORM, auxiliary, 0, QUICK, QUICK)
    labels = attacker.labels(model, change, 1, local)
    assert labels.tolist() == y.tolist()
    analytic, matched = attacker.changes(model, F.cross_entropy, change, labels, local)
    judge = Judge(digits[0][:100])
    assert judge.scores(analytic.images_nCHW, torch.tensor([3])).psnr > 50
    assert judge.scores(matched.images_nCHW, torch.tensor([3])).identified.value == 1
    assert matched.search == QUICK[1]


def test_a_convolution_is_attacked_by_matching_only(digits: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = network("cnn")
    change = change_of(model, F.cross_entropy, digits[0][:1], digits[1][:1], LocalSteps())
    attacker = Attacker(FORM, None, 0, QUICK, QUICK)
    assert attacker.labels(model, change, 1, LocalSteps()).tolist() == digits[1][:1].tolist()
    (attempt,) = attacker.changes(model, F.cross_entropy, change, digits[1][:1], LocalSteps())
    assert attempt.attack.name == "gradient matching"


def test_a_head_without_a_bias_is_refused() -> None:
    with pytest.raises(ConfigError, match="linear head"):
        head_bias(split(network("cnn"), "conv2")[0])


def test_every_meaning_has_attacks_or_a_sentence() -> None:
    assert tuple(ATTACKS) == MEANINGS
    for meaning in MEANINGS:
        assert attacks_on(meaning) or str(ATTACKS[meaning]).endswith(".")
    named = [attack for meaning in MEANINGS for attack in attacks_on(meaning)]
    assert len({attack.name for attack in named}) == len({attack.function for attack in named})
