"""Models that standardise images by numbers that are given: the weights, and what they are called, stay the same."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from flwr_replay.config.compose import compose
from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import TaskConfig
from flwr_replay.errors import ConfigError
from flwr_replay.models import build, split
from flwr_replay.privacy.dpsgd import clipped_sums, refuse_mixing
from flwr_replay.privacy.ghost import Ghost

PLAIN = TaskConfig(name="images", format="digits", channels=2, size=16, classes=3)
TASK = replace(PLAIN, mean=(0.2, 0.4), std=(0.5, 0.1))
X = torch.rand(3, 2, 16, 16)
STANDARD = (X - torch.tensor([0.2, 0.4]).view(2, 1, 1)) / torch.tensor([0.5, 0.1]).view(2, 1, 1)


@pytest.mark.parametrize("name", ["mlp", "lenet5", "cnn1", "cnn2", "cnn", "resnet18"])
def test_it_answers_as_the_plain_model_does_to_standardised_images(name):
    config = ModelConfig(name=name, width=16, norm="group")
    plain, model = build(config, PLAIN, 0), build(config, TASK, 0)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert torch.equal(model(X), plain(STANDARD))
    encoder, primary = split(model, "")
    assert torch.equal(primary(encoder(X)), plain(STANDARD))
    refuse_mixing(model)


def test_clipped_gradients_are_those_of_standardised_images():
    config = ModelConfig(name="mlp", width=8)
    plain, model = build(config, PLAIN, 0), build(config, TASK, 0)
    assert Ghost.serves(model)
    for sums, expected in zip(
        *(
            clipped_sums(m, lambda x, y, m=m: nn.functional.cross_entropy(m(x), y, reduction="none"), (x, y), 0.1)[0]
            for m, x, y in ((plain, STANDARD, torch.arange(3)), (model, X, torch.arange(3)))
        ),
        strict=True,
    ):
        torch.testing.assert_close(sums, expected)


def test_the_cifar_preset_standardises_as_their_code_does():
    assert compose(["task=cifar10", "preset=paper"]).task.mean == (0.4914, 0.4822, 0.4465)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["task=mnist", "mean=[0.1]"], "go together, one positive std for each of 1 channels; got [0.1] and []"),
        (["task=mnist", "mean=[0.1]", "std=[0]"], "one positive std"),
        (["task=cifar10", "mean=[0.1]", "std=[0.3]"], "each of 3 channels"),
    ],
)
def test_numbers_that_cannot_be_are_refused(options, says):
    with pytest.raises(ConfigError) as refused:
        compose(options)
    assert says in str(refused.value)
