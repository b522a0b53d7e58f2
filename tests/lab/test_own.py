"""Attacks of the user's own: what they are given, what they may return, and how they are judged."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from attacked_runs import Recorded, attacked
from torch.nn.functional import cross_entropy

from flwr_replay.attacks.catalogue import Attack
from flwr_replay.check import check_attack
from flwr_replay.config.own_code import VARIABLE
from flwr_replay.errors import ConfigError

FITTED = ["strategy=fedavg", "model=mlp", "partition.size=60", "local-epochs=20", "rounds=2"]

LATENTS = ["strategy=fedreplay", "encoder=random", "partition.size=60", "model.width=16"]
GRADIENT = ["strategy=fedsgd", "model=mlp", "partition.size=4", "partition.test=mirror"]
WRITTEN = Path(__file__).parents[2] / "flwr_replay" / "templates" / "attack" / "myattack.py"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Run once; return the folder with the run's directory."""
    return Recorded(tmp_path_factory.mktemp("runs"), {"fitted": FITTED, "latents": LATENTS, "gradient": GRADIENT})


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the module that `--attack handed:attack` names."""
    made: Any = ModuleType("handed")
    monkeypatch.setitem(sys.modules, "handed", made)
    monkeypatch.setenv(VARIABLE, "")
    return made


def by_loss(seen: Any, images: torch.Tensor, labels: torch.Tensor, seed: int) -> torch.Tensor:
    """Take those with small losses for members."""
    return -cross_entropy(seen.model(images), labels, reduction="none")


def test_it_finds_what_the_built_in_one_finds_and_is_asked_anew(runs, monkeypatch, capsys, module) -> None:
    words = runs / "fitted", "--aux", "undealt", "--attack"
    _, results, _ = attacked(monkeypatch, capsys, *words, "loss threshold")
    right = results["arrays", "loss threshold"]["membership"]

    def attack(seen: Any, images: torch.Tensor, labels: torch.Tensor, seed: int) -> torch.Tensor:
        assert len(seen.sent) == len(seen.asked) == 2
        assert seen.sent[0].keys() == seen.asked[0].keys() == seen.model.state_dict().keys()
        assert len(seen.auxiliary.images_mCHW) > 0
        scores = by_loss(seen, images, labels, seed)
        for arrays in seen.sent:
            for array in arrays.values():
                array[...] = 0  # it has copies
        return scores

    module.attack = attack
    monkeypatch.setitem(sys.modules, "torchmetrics.functional", None)  # of scores of images, which it makes none of
    for _ in range(2):
        code, results, _ = attacked(monkeypatch, capsys, *words, "handed:attack")
        assert code == 0
        result = results["arrays", "handed:attack"]
        assert result["membership"] == right
        assert "handed:attack tells with an AUC of" in result["sentence"]
        module.attack = by_loss
    module.attack = lambda *_: 1 / 0
    code, results, _ = attacked(monkeypatch, capsys, *words, "handed:attack")
    assert code == 0
    assert (
        "handed:attack was not tried: --attack handed:attack failed: ZeroDivision"
        in (results["arrays", "handed:attack"]["sentence"])
    )
    assert results["arrays", "loss threshold"]["membership"] == right


def test_places_tell_nothing(runs, monkeypatch, capsys, module) -> None:
    module.attack = lambda seen, images, labels, seed: -torch.arange(len(labels))
    _, results, _ = attacked(monkeypatch, capsys, runs / "fitted", "--aux", "undealt", "--attack", "handed:attack")
    auc = results["arrays", "handed:attack"]["membership"]["auc"]
    assert auc["low"] < 0.5 < auc["high"]


def test_an_attack_that_is_not_there_is_refused_before_anything_is_written(runs, monkeypatch, capsys, module) -> None:
    (runs / "empty").mkdir()
    code, _, err = attacked(monkeypatch, capsys, runs / "empty", "--attack", "handed:attack")
    assert code == 2
    assert "--attack=handed:attack: handed has no function attack" in " ".join(err.split())


def test_images_of_the_written_one_are_judged_as_those_of_the_look_up_that_is_built_in(
    runs, monkeypatch, capsys, module
) -> None:
    exec(WRITTEN.read_text(), vars(module))
    check_attack("handed:attack")
    for attack in ("nearest auxiliary image", "handed:attack"):
        code, results, _ = attacked(monkeypatch, capsys, runs / "latents", "--aux", "undealt", "--attack", attack)
        assert code == 0
    assert {field for field, _ in results} == {"latents"}  # the others it does not take
    built_in, own = (results["latents", attack] for attack in ("nearest auxiliary image", "handed:attack"))
    assert own["scores"] == built_in["scores"]
    assert own["scores"]["identified"]["value"] > 0.5
    assert (runs / "latents" / "attacks" / own["picture"]).exists()
    shutil.rmtree(runs / "latents" / "attacks")
    code, results, _ = attacked(monkeypatch, capsys, runs / "latents", "--attack", "handed:attack")
    assert "was not tried: it needs images of the attacker's own" in results["latents", "handed:attack"]["sentence"]
    code, _, err = attacked(monkeypatch, capsys, runs / "gradient", "--aux", "undealt", "--attack", "handed:attack")
    assert code == 2
    assert "no recorded field takes it: leave" in " ".join(err.split())


def test_labels_of_ones_own_are_judged_by_row_or_by_count(runs, monkeypatch, capsys, module) -> None:
    def by_bias(seen: Any, places: torch.Tensor, seed: int) -> Any:
        assert seen.told[0]["num-examples"] == len(places)
        assert dict(seen.model.named_parameters()).keys() <= seen.asked[0].keys()
        first = [*seen.sent[0].values()][-1].argsort()  # classes whose outputs should grow most
        return np.resize(first, len(places))

    module.attack = Attack(gives="labels", takes=("gradient", "activations"), run=by_bias)
    check_attack("handed:attack")
    _, results, _ = attacked(monkeypatch, capsys, runs / "gradient", "--attack", "handed:attack")
    tally = results["arrays", "handed:attack"]["labels"]
    assert tally["number"] == 4
    assert tally["right"] > tally["equal-counts"]
    module.attack = Attack(gives="labels", run=lambda seen, places, seed: torch.zeros(len(places), dtype=torch.int64))
    _, results, _ = attacked(monkeypatch, capsys, runs / "latents", "--attack", "handed:attack")
    tally = results["latents", "handed:attack"]["labels"]
    assert 0 < tally["right"] <= tally["always-one"] < tally["number"] == 60
    assert "no image" in results["labels", "handed:attack"]["not-judged"]


def noisy(seen: Any, images: torch.Tensor, labels: torch.Tensor, seed: int) -> Any:
    """Guess otherwise each time."""
    return np.random.random(len(labels))  # noqa: NPY002


def greedy(seen: Any, images: torch.Tensor, labels: torch.Tensor, seed: int) -> torch.Tensor:
    """Change what it gets."""
    images.zero_()
    return by_loss(seen, images, labels, seed)


def test_the_contract(module) -> None:
    module.attack = by_loss
    check_attack("handed:attack")
    for attack, message in ((noisy, "give the same"), (greedy, "as they are")):
        module.attack = attack
        with pytest.raises(AssertionError, match=message):
            check_attack("handed:attack")
    module.attack = lambda seen, images, labels, seed: labels / 0
    with pytest.raises(AssertionError, match="finite"):
        check_attack("handed:attack")


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (lambda seen, images, labels, seed: labels[:3], r"must return 40 numbers; got shape \(3,\)"),
        (lambda seen, images, labels, seed: images, "must return 40 numbers; got shape"),
        (lambda seen, images, labels, seed: labels * 1j, r"must return 40 numbers; got .* of torch.complex"),
        (lambda seen, images, labels, seed: None, "failed"),
        (lambda seen: 0, "takes 1 positional argument"),
        (Attack(gives="images", run=lambda seen, places, seed: places), r"40 images of form \(1, 8, 8\); got shape"),
        (Attack(gives="images", run=lambda *_: torch.full((40, 1, 8, 8), 2.0)), r"images in \[0, 1\]; got 2 to 2"),
        (Attack(gives="labels", run=lambda seen, places, seed: places / 2), r"classes, 0 to 9; got \[0.0, 0.5"),
        (Attack(gives="labels", run=lambda seen, places, seed: places), "must return classes"),
        (Attack(gives="names"), "gives of --attack handed:attack must be one of membership"),
        (Attack(takes=("codes",)), "check_attack has weights, gradient, activations, images; .* takes codes"),
        (Attack(), "failed"),
    ],
)
def test_what_are_no_scores_is_one_line(module, attack: Any, message: str) -> None:
    module.attack = attack
    with pytest.raises(ConfigError, match=message) as raised:
        check_attack("handed:attack")
    assert "\n" not in str(raised.value)
