"""Weights of a user's file, in our names and in torchvision's."""

import pickle
import re
from argparse import Namespace
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from flwr_replay.config.compose import compose
from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import ConfigError
from flwr_replay.models import build, staged
from flwr_replay.models.pretrained import load_pretrained
from flwr_replay.report.progress import Display
from flwr_replay.rng import derived_seed
from flwr_replay.runs.execute import settings_of

JOB = ["task=digits", "model=cnn", "model.width=4", "nodes=2", "rounds=1"]


def cnn(*options, seed=9):
    config = compose([*JOB, *options])
    return build(config.model, config.task, seed)


def test_a_run_begins_with_the_files_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    save_file(cnn().state_dict(), tmp_path / "w.safetensors")
    model = settings_of(compose([*JOB, f"model.weights={tmp_path / 'w.safetensors'}"])).model(derived_seed(0, "model"))
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), cnn().state_dict().values(), strict=True))
    options = ["strategy=fedavg", *JOB, f"runs_dir={tmp_path}", "lr=0.0001"]
    plain, pretrained = (
        run_inline([*options, *more], Display())[1] for more in ([], [f"model.weights={tmp_path / 'w.safetensors'}"])
    )
    from safetensors.numpy import load_file

    ends = [load_file(folder / "models" / "global.safetensors")["conv1.conv.weight"] for folder in (plain, pretrained)]
    begun = cnn().state_dict()["conv1.conv.weight"].numpy()
    assert np.abs(ends[1] - begun).max() < 0.01 < np.abs(ends[0] - begun).max()


def test_a_larger_networks_file_is_refused_and_nothing_of_it_ignored(tmp_path):
    torch.save(torchvision.models.resnet34().state_dict(), tmp_path / "resnet34.pth")
    config = compose(["task=folder", "task.size=64", "model=resnet18"])
    with pytest.raises(ConfigError, match=r"which has no 'layer1\.2\.conv1\.weight'"):
        load_pretrained(build(config.model, config.task, 0), str(tmp_path / "resnet34.pth"))


def test_torchvisions_file_fits_but_for_the_head(tmp_path):
    theirs = torchvision.models.resnet18(num_classes=1000)
    torch.save(theirs.state_dict(), tmp_path / "resnet18.pth")
    config = compose(["task=folder", "task.size=64", "model=resnet18"])
    ours = load_pretrained(build(config.model, config.task, 0), str(tmp_path / "resnet18.pth")).eval()
    fresh = build(config.model, config.task, 0)
    assert torch.equal(ours.state_dict()["head.fc.weight"], fresh.state_dict()["head.fc.weight"])
    theirs.fc = torch.nn.Identity()
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        features = theirs.eval()(x)
        expected = ours[-1].fc(features)
        torch.testing.assert_close(ours(x), expected)


def test_a_file_that_does_not_fit_is_refused_before_the_run(tmp_path):
    save_file(cnn("model.width=8").state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match=r"must hold 'conv1.conv.weight' with shape \(4, 1, 3, 3\); .* has \(8"):
        run_inline(["strategy=fedavg", *JOB, f"model.weights={tmp_path / 'w.safetensors'}"], Display())
    (tmp_path / "x.pth").write_bytes(b"no weights")
    for file in ("x.pth", "missing.pth"):
        with pytest.raises(ConfigError, match="file of weights"):
            load_pretrained(cnn(), str(tmp_path / file))


WRAPPED = {
    "state_dict": lambda w: {"state_dict": w, "epoch": 3, "best": torch.tensor(0.9)},
    "model, optimizer": lambda w: {"model": w, "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}}},
    "nested": lambda w: {"state": {"model_state": w}, "args": {"lr": 0.1}},
    "DataParallel": lambda w: {f"module.{name}": tensor for name, tensor in w.items()},
    "Lightning": lambda w: {"state_dict": {f"model.{n}": t for n, t in w.items()} | {"loss.weight": torch.ones(2)}},
    "compiled": lambda w: {f"_orig_mod.module.{name}": tensor for name, tensor in w.items()},
    "a backbone with another head": lambda w: {f"backbone.{n}": t for n, t in w.items() if not n.startswith("head")},
    "beside a mean": lambda w: {"model": w, "mean": torch.zeros(3)},
    "an average of its own form": lambda w: {"model": w, "ema": {f"shadow_{n}".replace(".", "_"): w[n] for n in w}},
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_a_wrapped_checkpoint_is_opened(tmp_path, wrap):
    weights = cnn().state_dict()
    torch.save(wrap(weights), tmp_path / "w.pt")
    loaded = load_pretrained(cnn(seed=1), str(tmp_path / "w.pt")).state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights if not name.startswith("head"))


@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.to_sparse(),
        lambda tensor: tensor.to("meta"),
        lambda tensor: tensor.to(torch.complex64),
        lambda tensor: (100 * tensor).to(torch.int8),
        lambda tensor: tensor.to(torch.float8_e4m3fn),
        lambda tensor: tensor.double() * 1e300,
        lambda tensor: tensor / 0,
    ],
)
def test_weights_that_cannot_be_copied_whole_are_refused(tmp_path, change):
    torch.save({name: change(tensor) for name, tensor in cnn().state_dict().items()}, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match="dense, finite, real numbers of at least 16 bits; 'conv1"):
        load_pretrained(cnn(), str(tmp_path / "w.pth"))


def test_files_are_known_by_what_they_hold_and_nobody_is_told_to_run_that(tmp_path):
    weights = cnn().state_dict()
    save_file(weights, tmp_path / "w.bin")
    torch.save(weights, tmp_path / "w.safetensors")
    torch.save({"state_dict": weights, "args": Namespace(lr=0.1)}, tmp_path / "timm.pth")
    for name in ("w.bin", "w.safetensors", "timm.pth"):
        loaded = load_pretrained(cnn(seed=1), str(tmp_path / name)).state_dict()
        assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    (tmp_path / "w.pth").write_bytes(pickle.dumps(weights))
    with pytest.raises(ConfigError, match=r"torch\.save did not write it so") as error:
        load_pretrained(cnn(), str(tmp_path / "w.pth"))
    assert "weights_only" not in str(error.value)
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "w.pth")
    with pytest.raises(ConfigError, match="it also holds TorchScript, which may run code") as error:
        load_pretrained(cnn(), str(tmp_path / "w.pth"))


@pytest.mark.parametrize(
    ("held", "line"),
    [
        (b"", "it is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "it is a pointer of Git LFS"),
        (b"\xef\xbb\xbf\n<!DOCTYPE html><html></html>", "it is a web page"),
        (b"\x02\0\0\0\0\0\0\0{}", "has no arrays by name"),
    ],
)
def test_what_is_no_file_of_weights_is_said_plainly(tmp_path, held, line):
    for name in ("w.safetensors", "w.pth"):
        (tmp_path / name).write_bytes(held)
        with pytest.raises(ConfigError, match=line):
            load_pretrained(cnn(), str(tmp_path / name))
    (tmp_path / "w").mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        load_pretrained(cnn(), str(tmp_path / "w"))


def test_of_several_models_that_fit_one_is_to_be_saved_alone(tmp_path):
    weights = cnn().state_dict()
    older = {name: a for name, a in cnn(seed=1).state_dict().items() if not name.endswith("num_batches_tracked")}
    torch.save({"model": older, "model_ema": weights, "epoch": 3}, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match="several that fit: under 'model', under 'model_ema': save the one"):
        load_pretrained(cnn(), str(tmp_path / "w.pth"))
    torch.save(torch.load(tmp_path / "w.pth")["model_ema"], tmp_path / "weights.pth")  # as the line says
    loaded = load_pretrained(cnn(seed=1), str(tmp_path / "weights.pth")).state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_what_a_file_lacks_is_told_with_where_it_was_looked_for(tmp_path):
    weights = cnn().state_dict()
    del weights["conv1.conv.weight"]
    for content, message in (
        ({"state_dict": weights}, "under 'state_dict' lacks it; it holds conv1.norm.weight, "),
        ({f"module.{name}": tensor for name, tensor in weights.items()}, "after 'module.' lacks it"),
        ({"other.weight": torch.ones(2)}, "lacks it; it holds other.weight"),
        ({"epoch": 3}, "has no arrays by name: save"),
        (cnn(), "it also holds flwr_replay.models.staged.StagedModel, which may run code"),
    ):
        torch.save(content, tmp_path / "w.pth")
        with pytest.raises(ConfigError, match=message) as error:
            load_pretrained(cnn(), str(tmp_path / "w.pth"))
        assert "\n" not in str(error.value)


def test_local_begins_at_the_institutions():
    with pytest.raises(ConfigError, match="strategy=local begins with models of the institutions"):
        settings_of(compose([*JOB, "strategy=local", "model.weights=w.pth"])).model(0)


def test_buda_et_al_s_names_of_a_u_net_are_ours(tmp_path):
    config = compose(["task=isbi2012", "task.size=16", "model.width=2"])
    ours = build(config.model, config.task, 3)

    def theirs(name):
        stage, *rest = name.split(".")
        if stage == "enc1":
            return f"encoder1.enc1{'.'.join(rest)}"
        if stage == "head":
            return f"conv.{rest[1]}"
        kind, level, *layer = rest
        if kind == "up":
            return f"upconv{int(level) + 1}.{layer[0]}"
        if kind == "join":
            return f"decoder{int(level) + 1}.dec{int(level) + 1}{'.'.join(layer)}"
        block = "bottleneck.bottleneck" if level == "3" else f"encoder{int(level) + 2}.enc{int(level) + 2}"
        return block + ".".join(layer)

    renamed = {theirs(name): tensor for name, tensor in ours.state_dict().items()}
    known = {"encoder4.enc4conv2.weight", "bottleneck.bottlenecknorm1.running_mean", "decoder1.dec1conv1.weight"}
    assert known <= set(renamed)
    torch.save(renamed, tmp_path / "unet.pt")
    weights = load_pretrained(build(config.model, config.task, 0), str(tmp_path / "unet.pt")).state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in ours.state_dict().items())


def publishers(**more):
    """Return a network with a DenseNet's names, and stages of its layers."""
    layers = OrderedDict(norm1=nn.BatchNorm2d(1), conv1=nn.Conv2d(1, 2, 1))
    features = nn.Sequential(OrderedDict(denselayer1=nn.Sequential(layers)))
    net = nn.Sequential(OrderedDict(features=features, classifier=nn.Linear(2, 3)))
    return net, staged(net, stem=net.features.denselayer1, **more, head=nn.Linear(2, 3))


@pytest.mark.parametrize("name", [lambda name: name, lambda name: "module." + re.sub(r"(norm|conv)1", r"\1.1", name)])
def test_stages_of_a_network_take_its_own_names_and_a_densenets_old_ones(name, tmp_path):
    (net, _), (_, ours) = publishers(), publishers()
    held = {name(key): tensor for key, tensor in net.state_dict().items() if not key.endswith("tracked")}
    torch.save({**held, name("op_threshs"): torch.tensor([0.1, torch.nan])}, tmp_path / "w.pth")  # of no layer
    head = ours.head.weight.clone()
    load_pretrained(ours, str(tmp_path / "w.pth"))
    assert torch.equal(ours.stem.conv1.weight, net.features.denselayer1.conv1.weight)
    assert torch.equal(ours.head.weight, head)  # the publisher's is for other classes
    with pytest.raises(ConfigError, match=r"must hold 'own.weight'"):
        load_pretrained(publishers(own=nn.Conv2d(2, 2, 1))[1], str(tmp_path / "w.pth"))
    torch.save({key: tensor * torch.nan for key, tensor in held.items()}, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match="finite"):
        load_pretrained(ours, str(tmp_path / "w.pth"))
