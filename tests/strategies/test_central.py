"""Central through real messages against a plain loop over the union of all data."""

import json
import shlex

import numpy as np
import pytest
import torch
from grid import Grid
from harness import fresh
from torch.nn.functional import cross_entropy

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose
from flwr_replay.data.dealt import dealt
from flwr_replay.errors import RefusedError, RunError
from flwr_replay.learning.tasks import make_task
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.base import Settings
from flwr_replay.rng import derived_seed
from flwr_replay.strategies.central import Central
from flwr_replay.wire.records import opened

N, B = 90, 16


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (N + 30, 8, 8), np.uint8), rng.integers(0, 3, N + 30)
    arrays = {"train_images": x[:N], "train_labels": y[:N], "test_images": x[N:], "test_labels": y[N:]}
    np.savez(tmp_path / "all.npz", **arrays)
    task = ["task=medmnist", "split=test", f"task.data-dir='{tmp_path}/all.npz'", "task.size=8", "classes=3"]
    options = ["partition=majority", "p=0.6", "model=cnn", "model.width=4"]
    return ["strategy=central", *task, *options, f"batch_size={B}", "lr=0.05", "device=cpu"]


def run(overrides, nodes):
    grid, config = Grid(app, {"overrides": shlex.join(overrides)}, nodes), compose(overrides)
    settings = Settings(
        roll_call=True, training=config.training, nodes=len(nodes), evaluate_every=3, task=make_task(config.task)
    )
    return opened(Central(config.strategy, settings).start(grid, fresh(config), 3).arrays), grid


def simulated(k):
    return [{"partition-id": i, "num-partitions": k} for i in range(k)]


@pytest.mark.parametrize("rule", ["keep", "reset"])
def test_one_institution_trains_on_the_union_and_all_evaluate(job, rule):
    weights, grid = run([*job, f"optimizer-state={rule}"], simulated(3))
    assert grid.who("train") == ["institution-1"] * 3
    assert grid.who("evaluate") == ["institution-1", "institution-2", "institution-3"]

    config = compose(job)
    dealing = dealt(config.task, config.partition, 3, config.seed)
    own = np.concatenate(dealing.train)
    assert len(own) == len(set(own))
    with np.load(config.task.data_dir) as file:
        x, y = torch.from_numpy(file["train_images"][own, None]) / 255, torch.from_numpy(file["train_labels"][own])
    model = backbone(config.model, config.task)(derived_seed(0, "model"))
    steps = None
    for exchange in (1, 2, 3):
        if steps is None or rule == "reset":
            steps = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        seed = derived_seed(0, "institution-1", exchange)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
        for i in range(len(y) // B):
            rows = order[i * B : (i + 1) * B]
            steps.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            steps.step()
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(weights[name], value.numpy(), rtol=0, atol=1e-6, err_msg=name)


def test_who_owns_its_own_data_only_cannot_pool(job, tmp_path):
    data = str(tmp_path / "all.npz")
    nodes = [{"name": name, "data": data, "state": str(tmp_path)} for name in "ab"]
    with pytest.raises(RunError, match="institution 'a' owns its own data only; strategy=central needs one"):
        run(job, nodes)
    run(job, nodes[:1])


def test_privacy_is_counted_over_the_union(job, tmp_path, monkeypatch):
    private = [*job, "dp=classifier", "model.norm=group"]
    with pytest.raises(RefusedError, match="delta may be at most one over the number of examples"):
        run([*private, "delta=0.02"], simulated(3))  # above 1/90, below 1/30
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "other"))
    run(private, simulated(3))
    (account,) = tmp_path.rglob("privacy.jsonl")
    charge = json.loads(account.read_text().splitlines()[0])
    assert charge["rate"] == pytest.approx(B / N)
    assert charge["steps"] == N // B
