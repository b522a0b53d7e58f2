"""Cutting a model at a stage."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import TaskConfig
from flwr_replay.errors import ConfigError
from flwr_replay.models import StagedModel, build, has_batch_norm, split

TASK = TaskConfig(name="toy", format="digits", channels=3, size=12, classes=4)
MODELS = {
    "mlp": ModelConfig(name="mlp", width=9),
    "lenet5": ModelConfig(name="lenet5"),
    "cnn": ModelConfig(name="cnn", width=6),
    "cnn-group": ModelConfig(name="cnn", width=6, norm="group"),
    "resnet18": ModelConfig(name="resnet18", width=8),
    "resnet34": ModelConfig(name="resnet34", width=4, stem="published", norm="group"),
}
BATCH_NORM = {"cnn", "resnet18"}
RESNET = ("conv1", "layer1", "layer2", "layer3", "layer4")
STAGES = {"mlp": ("hidden1", "hidden2"), "lenet5": ("conv1", "conv2", "hidden1", "hidden2"), "cnn": ("conv1", "conv2")}
CUTS = [(name, cut) for name, config in MODELS.items() for cut in STAGES.get(config.name, RESNET)]


def images(batch: int = 5, seed: int = 0) -> torch.Tensor:
    shape = (batch, TASK.channels, TASK.size, TASK.size)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(("name", "cut"), CUTS)
def test_the_parts_are_the_whole(name: str, cut: str) -> None:
    model, twin = build(MODELS[name], TASK, 1), build(MODELS[name], TASK, 1)
    encoder, primary = split(model, cut)
    assert encoder.stages + primary.stages == model.stages
    assert encoder.stages[-1] == cut
    assert list(encoder.state_dict() | primary.state_dict()) == list(model.state_dict())
    parts = [*encoder.parameters(), *primary.parameters(), *encoder.buffers(), *primary.buffers()]
    whole = [*model.parameters(), *model.buffers()]
    assert {id(tensor) for tensor in parts} == {id(tensor) for tensor in whole}

    x = images()
    logits, expected = primary(encoder(x)), twin(x)
    assert torch.equal(logits, expected)
    logits.square().sum().backward()
    expected.square().sum().backward()
    for (key, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None, key
        assert theirs.grad is not None, key
        assert torch.equal(ours.grad, theirs.grad), key
    assert same(state(model), state(twin))  # one step of the running statistics included


def test_a_part_loads_into_the_whole() -> None:
    model, other = (build(MODELS["resnet18"], TASK, seed) for seed in (1, 2))
    encoder, primary = split(model, "layer2")
    other.load_state_dict(encoder.state_dict() | primary.state_dict())
    assert torch.equal(other.eval()(images()), model.eval()(images()))


def test_a_part_can_be_cut_again() -> None:
    _, primary = split(build(MODELS["resnet18"], TASK, 0), "conv1")
    middle, tail = split(primary, "layer3")
    assert (middle.stages, tail.stages) == (("layer1", "layer2", "layer3"), ("layer4", "head"))


def test_without_a_name_the_cut_is_after_the_first_stage() -> None:
    encoder, _ = split(build(MODELS["resnet18"], TASK, 0), "")
    assert encoder.stages == ("conv1",)


@pytest.mark.parametrize("cut", ["layr2", "head"])
def test_unknown_cut(cut: str) -> None:
    with pytest.raises(ConfigError) as error:
        split(build(MODELS["resnet18"], TASK, 0), cut)
    line = str(error.value)
    assert line.startswith(f"cut must be one of conv1, layer1, layer2, layer3, layer4; got {cut!r}: ")
    assert ("did you mean layer2" in line) == (cut == "layr2")
    assert "\n" not in line


@pytest.mark.parametrize("name", MODELS)
def test_codes_may_be_kept(name: str) -> None:
    """No stage changes its input, so codes can be stored and passed more than once."""
    x = images()
    for part in build(MODELS[name], TASK, 0):
        before = x.clone()
        y = part(x)
        assert torch.equal(x, before)
        x = y.detach()


@pytest.mark.parametrize("name", MODELS)
def test_has_batch_norm(name: str) -> None:
    assert has_batch_norm(build(MODELS[name], TASK, 0)) == (name in BATCH_NORM)


def test_has_batch_norm_of_one_layer() -> None:
    layers = nn.BatchNorm1d(2), nn.SyncBatchNorm(2), nn.InstanceNorm2d(2), nn.GroupNorm(1, 2)
    assert [has_batch_norm(layer) for layer in layers] == [True, True, False, False]


def test_stages_are_named_in_order() -> None:
    model = StagedModel(OrderedDict(first=nn.ReLU(), second=nn.Linear(1, 1)))
    assert model.stages == ("first", "second")
    assert isinstance(model[:1], StagedModel)


class Traced(nn.Module):
    """As in a quickstart: a forward of its own, a pooling that it calls twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.pool = nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)
        self.block = nn.Sequential(nn.Conv2d(4, 5, 2), nn.BatchNorm2d(5), nn.Dropout(0.5))
        self.fc1, self.fc2 = nn.Linear(20, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(self.block(x)).view(-1, 20)
        return self.fc2(torch.relu(self.fc1(x)))


class Skips(Traced):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(x)
        return self.fc1((y + self.pool(y).mean()).flatten(1)[:, :20])


class Branches(Traced):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc1(x) if x.sum() > 0 else self.fc2(x)


class Drops(Traced):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(nn.functional.dropout(self.fc1(x), training=self.training))


class OneLayer(Traced):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc1(x)
        return y


@pytest.mark.parametrize("cut", ["conv1", "block", "fc1", ""])
@pytest.mark.parametrize("training", [False, True])
def test_a_model_with_a_forward_of_its_own_is_cut_by_tracing(cut: str, training: bool) -> None:
    torch.manual_seed(0)
    model = Traced()
    encoder, primary = split(model, cut)
    assert same(encoder.state_dict() | primary.state_dict(), model.state_dict())
    assert encoder.stages == (
        ("conv1", "block", "fc1")[: 1 + ("conv1", "block", "fc1").index(cut)] if cut else ("conv1",)
    )
    assert not encoder.state_dict().keys() & primary.state_dict().keys()
    for module in (model, encoder, primary):
        module.train(training)
    torch.manual_seed(1)
    parts = primary(encoder(images()))
    torch.manual_seed(1)
    assert torch.equal(parts, model(images()))


@pytest.mark.parametrize(
    ("kind", "cut", "message"),
    [
        (Traced, "pool", "conv1, block, fc1"),
        (Traced, "fc2", "conv1, block, fc1"),
        (Skips, "pool", r"cut='pool' of Skips 2 do: cut elsewhere"),
        (Branches, "", r"Branches cannot be traced \(.*build it as a torch.nn.Sequential"),
        (Drops, "", "Drops does otherwise in training.*use nn.Dropout"),
        (OneLayer, "", "has two stages or more; got OneLayer"),
    ],
)
def test_where_a_traced_model_cannot_be_cut_is_said(kind: type[nn.Module], cut: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split(kind(), cut)
