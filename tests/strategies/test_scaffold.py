"""SCAFFOLD against a plain loop; its first round is FedAvg's."""

import averaging
import numpy as np
import pytest
import torch
from averaging import JOB, SIZES, B, assert_weights_close, mean, run
from harness import SHARDS, same, write_shards
from safetensors.numpy import load_file
from torch.nn.functional import cross_entropy

from flwr_replay.config.compose import compose
from flwr_replay.config.sections import TrainingConfig
from flwr_replay.errors import ConfigError
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.base import Settings
from flwr_replay.payloads.common import Trained
from flwr_replay.rng import derived_seed
from flwr_replay.strategies.scaffold import Scaffold, ScaffoldConfig
from flwr_replay.wire.records import opened
from flwr_replay.wire.weights import check_weights, load_arrays


def twin(shards, momentum):
    """Run Algorithm 1 with n_k / n in place of 1 / |S|; a gradient's way is measured on gradients of one."""
    config = compose(JOB)
    build = backbone(config.model, config.task)
    state = build(derived_seed(0, "model")).state_dict()
    names = [name for name, _ in build(0).named_parameters()]
    c = {name: torch.zeros_like(state[name]) for name in names}
    own = {k: dict(c) for k in shards}
    total = sum(len(y) for _, y in shards.values())
    for exchange in (1, 2, 3):
        trained, changes = [], []
        for k, (x, y) in shards.items():
            model, scale = build(0), torch.zeros(1, requires_grad=True)
            model.load_state_dict(state)
            steps = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
            way = torch.optim.SGD([scale], lr=0.05, momentum=momentum)
            order = torch.randperm(len(y), generator=torch.Generator().manual_seed(derived_seed(0, k, exchange)))
            for i in range(max(1, len(y) // B)):
                rows = order[i * B : (i + 1) * B]
                steps.zero_grad()
                cross_entropy(model(x[rows]), y[rows]).backward()
                for name, parameter in model.named_parameters():
                    parameter.grad += c[name] - own[k][name]
                steps.step()
                scale.grad = torch.ones(1)
                way.step()
            after = model.state_dict()
            new = {n: own[k][n] - c[n] + (state[n] - after[n]) / -scale.item() for n in names}
            changes.append({n: new[n] - own[k][n] for n in names})
            own[k] = new
            trained.append({n: value.clone() for n, value in after.items()})
        sizes = [len(y) for _, y in shards.values()]
        state = {n: v.to(state[n].dtype) for n, v in mean(trained, sizes).items()}
        c = {n: c[n] + sum(s / total * d[n] for s, d in zip(sizes, changes, strict=True)) for n in names}
    return {name: value.numpy() for name, value in state.items()}


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path, SIZES)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_it_is_the_papers_algorithm(tmp_path, shards, momentum):
    weights = run(tmp_path, "scaffold", f"momentum={momentum}")[0]
    assert_weights_close(weights, twin(shards, momentum))
    assert not same(weights, run(tmp_path, "fedavg", f"momentum={momentum}")[0])


def test_with_controls_of_zeros_it_is_fedavg_bit_for_bit(tmp_path, shards):
    assert same(run(tmp_path, "scaffold", "rounds=1")[0], run(tmp_path, "fedavg", "rounds=1")[0])


def test_it_ends_where_the_common_loss_is_flat_and_fedavg_drifts(tmp_path, monkeypatch, shards):
    """Karimireddy et al. 2020, section 5, on a convex loss: institutions with two of three labels, all steps exact."""
    monkeypatch.setattr(averaging, "JOB", [*SHARDS, "classes=3", "model=gabor", "device=cpu"])
    for name, labels in {"a": (0, 1), "b": (1, 2), "c": (2, 0)}.items():
        arrays = dict(np.load(tmp_path / f"{name}.npz"))
        arrays["train_labels"] = np.resize(labels, SIZES[name])
        np.savez(tmp_path / f"{name}.npz", **arrays)
        shards[name] = shards[name][0], torch.from_numpy(arrays["train_labels"])
    config, options = compose(averaging.JOB), ["batch_size=100", "lr=0.1", "momentum=0", "weight_decay=0.03"]

    def slope(strategy):
        state = run(tmp_path, strategy, *options, "rounds=60", "strategy.local_epochs=5")[0]
        model = backbone(config.model, config.task)(0)
        load_arrays(model, state)
        trained = [p for p in model.parameters() if p.requires_grad]
        losses = [len(y) / sum(SIZES.values()) * cross_entropy(model(x), y) for x, y in shards.values()]
        (sum(losses) + 0.03 / 2 * sum(p.square().sum() for p in trained)).backward()
        return torch.cat([p.grad.flatten() for p in trained]).norm().item()

    assert slope("scaffold") < slope("fedavg") / 10


def test_the_servers_control_is_the_mean_of_the_institutions(tmp_path, shards):
    check_mean(tmp_path, run(tmp_path, "scaffold")[1])


def check_mean(folder, method):
    kept = [control_of(folder, name) for name in SIZES]
    for name, array in method.control.items():
        whole = sum(n * state[name] for n, state in zip(SIZES.values(), kept, strict=True)) / sum(SIZES.values())
        np.testing.assert_allclose(array, whole, atol=1e-5)


def control_of(folder, name):
    [newest] = [*sorted((folder / "scaffold").glob(f"**/{name}/**/control-*.safetensors"))[-1:]]
    return load_file(newest)


def answer(n, change):
    arrays = {"x": np.zeros(2, np.float32), "control.x": np.full(2, change, np.float32)}
    return Trained(arrays=arrays, num_examples=n, examples_seen=n, num_steps=1)


def test_an_institution_that_joins_later_counts_in_the_mean_from_then_on():
    """A mean over those that were there before would leave a correction that no institution makes up for."""
    method = Scaffold(ScaffoldConfig(), Settings())
    method.members.remember({"a": 1}, {})
    method.combine([answer(1, 8.0)])
    method.members.remember({"a": 1, "b": 3}, {})
    method.combine([answer(1, 0.0), answer(3, 4.0)])
    assert method.control["x"].tolist() == [(1 * 8 + 3 * 4) / 4] * 2


def test_a_control_is_cut_back_before_all_institutions_refuse_it():
    """One institution can bring it there."""
    method = Scaffold(ScaffoldConfig(), Settings())
    method.members.remember({"a": 1}, {})
    for _ in range(3):
        method.combine([answer(1, -1e6)])
    check_weights(opened(method.with_control({"x": np.zeros(2, np.float32)})))


def test_adam_is_refused():
    with pytest.raises(ConfigError, match=r"set training\.optimizer=sgd"):
        Scaffold.check(ScaffoldConfig(), Settings(training=TrainingConfig(optimizer="adam")))
