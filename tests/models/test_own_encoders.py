"""The own encoders of docs/examples/encoders, with random weights from a file at their real size, in whole runs."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from flwr_replay.config.model import ModelConfig
from flwr_replay.config.own_code import VARIABLE
from flwr_replay.config.sections import TaskConfig
from flwr_replay.engines.simulate import run_inline
from flwr_replay.finished.export import export
from flwr_replay.finished.predict import images_in, predictions
from flwr_replay.finished.trained import load_model
from flwr_replay.institution.features import FeatureSource
from flwr_replay.memory import forget
from flwr_replay.models.zoo import encoder_of
from flwr_replay.report.progress import Display

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "encoders"
TASK = TaskConfig(name="t", format="folder", channels=1, size=224, classes=2)


def xray():
    """Return the publisher's network, what gives its features, and images as it takes them, of some in [0, 1]."""
    net = pytest.importorskip("torchxrayvision", reason="uv sync --group dev installs it").models.DenseNet()
    return net, net.features2, lambda x: 2048 * x - 1024


def efficientnet():
    """The same, of MONAI's."""
    nets = pytest.importorskip("monai.networks.nets", reason="uv sync --group dev installs it")
    net = nets.EfficientNetBN("efficientnet-b0", pretrained=False, spatial_dims=2, in_channels=3)
    mean, std = (torch.tensor(of).view(3, 1, 1) for of in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    net._fc = nn.Identity()
    return net, net, lambda x: (x.expand(-1, 3, -1, -1) - mean) / std


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """Let nothing be downloaded."""

    def refuse(*arguments):
        raise AssertionError(f"a connection to {arguments[1:]}")

    monkeypatch.setattr("socket.socket.connect", refuse)
    forget()


def images(folder):
    """Write images of two classes; return some of them, in [0, 1]."""
    rng = np.random.default_rng(0)
    for place in ("train/clear", "train/dense", "test/clear", "test/dense"):
        (folder / place).mkdir(parents=True)
        for n in range(4 if place.startswith("train") else 2):
            x = rng.integers(0, 60, (224, 224), np.uint8)
            x[60:160, 60:160] += 120 * place.endswith("dense")
            Image.fromarray(x).save(folder / place / f"{n}.png")
    some = [np.asarray(Image.open(file)) for file in sorted(folder.glob("train/*/[01].png"))]
    return torch.from_numpy(np.stack(some)[:, None]) / 255


def weights(net, file, x):
    """Write a network's random weights, with batch norms that fit images."""
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None
    with torch.no_grad():
        net.train()(x)
    torch.save(net.state_dict(), file)
    net.eval()


NETS = {"xray": xray, "efficientnet": efficientnet}


@pytest.mark.sampled(1, of="encoders of real size")
@pytest.mark.parametrize("name", NETS)
def test_an_own_encoder_serves_every_method(name, tmp_path, monkeypatch):
    torch.manual_seed(0)
    (net, features, prepared), x = NETS[name](), images(tmp_path / "data")
    weights(net, tmp_path / "weights.pth", prepared(x))
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv(VARIABLE, f"{name}:build")
    config = ModelConfig(name="own", build=f"{name}:build", weights=str(tmp_path / "weights.pth"), train="head")
    encoder = encoder_of(config, TASK)
    with torch.no_grad():
        torch.testing.assert_close(encoder(x), features(prepared(x)), rtol=1e-4, atol=1e-4)

    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    words = [
        *("task=folder", f"task.data_dir={tmp_path / 'data'}", "task.channels=1", "task.class_names=[clear,dense]"),
        *(f"model={name}:build", f"model.weights={config.weights}", "model.train=head", "training.lr=0.01"),
        *("training.batch_size=4", "partition=iid", "nodes=2", f"runs_dir={tmp_path / 'runs'}"),
    ]
    result, folder = run_inline([*words, "strategy=fedavg", "rounds=3"], Display())
    assert result["encoder"] == encoder.digest
    assert result["final"]["global"]["accuracy"] == 1
    assert result["bytes"]["up"] < 3 * 2 * 30_000  # three rounds of two heads

    computed = FeatureSource.examples
    monkeypatch.setattr(FeatureSource, "examples", lambda *_: pytest.fail("features are computed again"))
    for method in (["fedreplay", "cut=features"], ["fedavg", "dp=classifier", "target-epsilon=8"]):
        again, _ = run_inline([*words, f"strategy={method[0]}", *method[1:], "rounds=2"], Display())
        assert again["encoder"] == encoder.digest
    monkeypatch.setattr(FeatureSource, "examples", computed)

    model = load_model(folder)
    rows = csv.DictReader(io.StringIO(predictions(model, images_in(tmp_path / "data" / "test"), tmp_path)))
    assert [row["predicted"] for row in rows] == ["clear", "clear", "dense", "dense"]
    file, _ = export(model, "torch", tmp_path / "exported", "")
    with torch.no_grad():
        torch.testing.assert_close(torch.export.load(file).module()(x[:3]), model(x[:3]), rtol=1e-4, atol=1e-5)
