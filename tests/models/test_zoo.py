"""Building the models: shapes, weights, published numbers, error lines."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from flwr_replay.config.model import ModelConfig
from flwr_replay.config.sections import TaskConfig
from flwr_replay.errors import ConfigError
from flwr_replay.models import StagedModel, build
from flwr_replay.models.zoo import BUILDERS, norm_layer

CONF = Path(__file__).parents[2] / "conf" / "model"
NAMES = ("mlp", "lenet5", "lenet5_unpadded", "cnn", "cnn1", "cnn2", "deepset", "resnet18", "resnet34")
RESNET = ("conv1", "layer1", "layer2", "layer3", "layer4", "head")
STAGES = {
    "mlp": ("hidden1", "hidden2", "head"),
    "lenet5": ("conv1", "conv2", "hidden1", "hidden2", "head"),
    "lenet5_unpadded": ("conv1", "conv2", "hidden1", "hidden2", "head"),
    "cnn": ("conv1", "conv2", "head"),
    "cnn1": ("conv1", "conv2", "hidden", "head"),
    "cnn2": ("conv1", "conv2", "head"),
    "deepset": ("elements", "hidden1", "hidden2", "head"),
    "resnet18": RESNET,
    "resnet34": RESNET,
}
# Every option of every model, narrow, so that building them takes milliseconds.
QUICK = [
    ModelConfig(name="mlp", width=20),
    ModelConfig(name="lenet5"),
    ModelConfig(name="cnn1"),
    ModelConfig(name="cnn2"),
    ModelConfig(name="deepset", width=8),
    *(ModelConfig(name="cnn", width=8, norm=norm) for norm in ("batch", "group")),
    *(
        ModelConfig(name=name, width=16, stem=stem, norm=norm)
        for name in ("resnet18", "resnet34")
        for stem in ("published", "small")
        for norm in ("batch", "group")
    ),
]
PUBLISHED = {name: ModelConfig(name=name, stem="published") for name in ("resnet18", "resnet34")}


def task(size: int, channels: int = 1, classes: int = 10) -> TaskConfig:
    return TaskConfig(name="toy", format="digits", channels=channels, size=size, classes=classes)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def same(left: nn.Module, right: nn.Module) -> bool:
    ours, theirs = left.state_dict(), right.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def label(value: object) -> str | None:
    return f"{value.name}-{value.stem}-{value.norm}" if isinstance(value, ModelConfig) else None


@pytest.mark.sampled(1, "config")
@pytest.mark.parametrize("size", [10, 28, 32])
@pytest.mark.parametrize("config", QUICK, ids=label)
def test_forward_and_backward(config: ModelConfig, size: int) -> None:
    for channels, classes in ((1, 10), (3, 2)):
        model = build(config, task(size, channels, classes), 0)
        assert isinstance(model, StagedModel)
        assert model.training
        assert model.stages == STAGES[config.name]
        x = torch.rand(4, channels, size, size, generator=torch.Generator().manual_seed(0))
        logits = model(x)
        assert (logits.shape, logits.dtype) == ((4, classes), torch.float32)
        logits.square().sum().backward()
        for key, parameter in model.named_parameters():
            assert parameter.grad is not None, key
            assert torch.isfinite(parameter.grad).all(), key
        assert gradient_reaches(model.get_submodule(model.stages[0]))


def gradient_reaches(module: nn.Module) -> bool:
    """Say whether the loss's gradient reaches a stage, in more than rounding errors."""
    return any(
        parameter.grad is not None and bool(parameter.grad.abs().max() > 1e-4) for parameter in module.parameters()
    )


@pytest.mark.parametrize("config", QUICK, ids=label)
def test_weights_depend_on_the_seed_alone(config: ModelConfig) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = build(config, task(10), 3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert same(build(config, task(10), 3), model)
    assert not same(build(config, task(10), 4), model)


def test_global_generator_is_restored_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setitem(BUILDERS, "mlp", fail)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        build(ModelConfig(name="mlp"), task(8), 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_default_device_does_not_matter() -> None:
    with torch.device("meta"):
        model = build(ModelConfig(name="mlp"), task(8), 0)
    assert same(model, build(ModelConfig(name="mlp"), task(8), 0))


def test_large_seed() -> None:
    build(ModelConfig(name="mlp"), task(8), 2**64 - 1)


@pytest.mark.parametrize(("name", "count"), [("resnet18", 11_689_512), ("resnet34", 21_797_672)])
def test_published_parameter_count(name: str, count: int) -> None:
    assert parameters(build(PUBLISHED[name], task(224, 3, 1000), 0)) == count


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["resnet18", "resnet34"])
def test_published_resnet_is_torchvisions(name: str) -> None:
    """Same weights under one seed, and same outputs, gradients of the input and running statistics."""
    from torchvision.models import resnet

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        theirs = getattr(resnet, name)(num_classes=12)
    ours = build(PUBLISHED[name], task(64, 3, 12), 7)

    def renamed(key: str) -> str:
        for old, new in (("conv1.", "conv1.conv."), ("bn1.", "conv1.norm."), ("fc.", "head.fc.")):
            if key.startswith(old):
                return new + key.removeprefix(old)
        return key

    def weights() -> dict[str, torch.Tensor]:
        return {renamed(key): value for key, value in theirs.state_dict().items()}

    assert weights().keys() == ours.state_dict().keys()
    assert all(torch.equal(value, ours.state_dict()[key]) for key, value in weights().items())

    x, y = (torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    expected, logits = theirs(x), ours(y)
    torch.testing.assert_close(logits, expected)
    expected.square().sum().backward()
    logits.square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad)
    for key, value in weights().items():
        torch.testing.assert_close(ours.state_dict()[key], value)


def test_other_published_parameter_counts() -> None:
    assert parameters(build(ModelConfig(name="lenet5"), task(32), 0)) == 61_706
    assert parameters(build(ModelConfig(name="lenet5"), task(28), 0)) == 61_706
    assert parameters(build(ModelConfig(name="lenet5_unpadded"), task(28), 0)) == 44_426
    assert parameters(build(ModelConfig(name="mlp", width=200), task(28), 0)) == 199_210
    assert parameters(build(ModelConfig(name="cnn1"), task(32, channels=3), 0)) == 38_626
    assert parameters(build(ModelConfig(name="cnn2"), task(32, channels=3), 0)) == 197_258


@pytest.mark.parametrize(
    ("size", "side"), [(4, 1), (8, 2), (12, 3), (27, 5), (28, 5), (31, 5), (32, 5), (33, 5), (64, 5)]
)
def test_lenet5_maps(size: int, side: int) -> None:
    model = build(ModelConfig(name="lenet5"), task(size), 0)
    x = torch.rand(2, 1, size, size)
    assert model[:2](x).shape == (2, 16, side, side)
    assert model(x).shape == (2, 10)


@pytest.mark.parametrize("stem", ["published", "small"])
def test_resnet_maps(stem: str) -> None:
    """Conv1 leaves a quarter of the image's side, or half of it with the small stem; then it halves."""
    model, side = build(ModelConfig(name="resnet18", width=4, stem=stem), task(32), 0), 8 if stem == "published" else 16
    x = torch.rand(2, 1, 32, 32)
    for number, stage in enumerate(model[:5]):
        x = stage(x)
        assert x.shape[1:] == (4 * 2 ** max(0, number - 1), *[side // 2 ** max(0, number - 1)] * 2)


@pytest.mark.parametrize(
    ("config", "smallest"),
    [
        (ModelConfig(name="lenet5"), 4),
        (ModelConfig(name="lenet5_unpadded"), 16),
        (ModelConfig(name="cnn", width=4), 4),
        (ModelConfig(name="cnn1"), 10),
        (ModelConfig(name="cnn2"), 10),
        (ModelConfig(name="resnet18", width=4, stem="published"), 4),
        (ModelConfig(name="resnet34", width=4, stem="small"), 2),
    ],
    ids=label,
)
def test_image_too_small(config: ModelConfig, smallest: int) -> None:
    assert build(config, task(smallest), 0)(torch.rand(4, 1, smallest, smallest)).shape == (4, 10)
    with pytest.raises(ConfigError) as error:
        build(config, task(smallest - 1), 0)
    line = str(error.value)
    assert line.startswith(f"model {config.name}")
    assert "\n" not in line
    assert f"at least {smallest}x{smallest} pixels; got task.size {smallest - 1}" in line


@pytest.mark.parametrize(
    ("channels", "groups"),
    [(1, 1), (6, 1), (8, 2), (9, 1), (16, 4), (32, 8), (64, 16), (100, 25), (128, 32), (512, 32)],
)
def test_groups(channels: int, groups: int) -> None:
    norm = norm_layer("group", channels)
    assert isinstance(norm, nn.GroupNorm)
    assert (norm.num_groups, norm.num_channels) == (groups, channels)


def test_group_norm_trains_on_single_pixels() -> None:
    """On 8x8 images layer3 and layer4 see maps of one pixel; the network must still learn."""
    model = build(ModelConfig(name="resnet18", width=16, norm="group"), task(8, classes=2), 0)
    x = torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(16) % 2
    x[y == 1, :, :, :4] *= 0.2
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    assert loss.item() < 0.2  # chance: 0.69; with one channel to a group it stays there


@pytest.mark.sampled(5)
@pytest.mark.parametrize("config", QUICK, ids=label)
def test_hooks_of_per_example_gradients(config: ModelConfig) -> None:
    """Opacus hangs a full backward hook on every layer; an in-place change of its output would raise."""
    model = build(config, task(10), 0)
    seen: list[nn.Module] = []
    for layer in model.modules():
        if list(layer.parameters(recurse=False)):
            layer.register_full_backward_hook(lambda layer, *_: seen.append(layer))
    model(torch.rand(2, 1, 10, 10, requires_grad=True)).sum().backward()
    assert len(seen) == sum(1 for layer in model.modules() if list(layer.parameters(recurse=False)))


def test_yaml_files_are_the_models() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == {*NAMES, "unet", "gabor", "own", "timm", "lite0"}


@pytest.mark.parametrize("name", NAMES)
def test_yaml_keys_are_fields(name: str) -> None:
    keys = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    matter = {
        "mlp": {"width"},
        "deepset": {"width"},
        "cnn": {"width", "norm"},
        **{key: set() for key in ("lenet5", "lenet5_unpadded", "cnn1", "cnn2")},
    }
    assert keys.keys() == {"name", "weights", "train"} | matter.get(name, {"width", "stem", "norm"})
    assert keys.keys() <= {field.name for field in fields(ModelConfig)}
    assert ModelConfig(**keys).name == name
