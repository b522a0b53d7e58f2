"""An institution with one example, or without a class, does no harm in any method."""

import shlex

import numpy as np
import pytest
from harness import fresh, node_configs

from flwr_replay.client_app import app
from flwr_replay.config.catalogue import choices
from flwr_replay.config.compose import compose
from flwr_replay.config.halves import load_strategy
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.generators.synthesis import SynthesisPlan
from flwr_replay.learning.tasks import make_task
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.base import Settings
from flwr_replay.server.recorder import Recorder
from flwr_replay.wire.records import opened

JOB = ["task=medmnist", "task.size=8", "classes=2", "model=mlp", "model.width=8", "batch_size=8", "rounds=2"]


class Kept(Recorder):
    """Keeps the pooled metrics of the last evaluation."""

    def evaluated(self, exchange, pooled, own):
        self.pooled, self.own = pooled, own


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", [name for name in choices("strategy") if name != "central"])
def test_one_example_or_one_class_does_no_harm(tmp_path, strategy):
    rng = np.random.default_rng(0)
    labels = {"a": rng.integers(0, 2, 40), "b": np.array([1]), "c": np.zeros(20, int)}
    for name, y in labels.items():
        x = (rng.integers(0, 60, (len(y), 8, 8)) + 150 * y[:, None, None]).astype(np.uint8)
        arrays = {"train_images": x, "train_labels": y, "test_images": x[:5], "test_labels": y[:5]}
        np.savez(tmp_path / f"{name}.npz", **arrays)
    overrides = [f"strategy={strategy}", *JOB, "lr=0.05", "dp=none"]  # DP needs a batch of examples
    overrides += ["generator.epochs=1", "prior.epochs=1"]
    config, recorder = compose(overrides), Kept()
    settings = Settings(
        roll_call=True,
        training=config.training,
        nodes=3,
        task=make_task(config.task),
        model=backbone(config.model, config.task),
        input_shape=(1, 8, 8),
        synthesis=SynthesisPlan.of(config),
    )
    grid = InlineGrid(app, {"overrides": shlex.join(overrides)}, node_configs(tmp_path, tmp_path / "state"))
    final = load_strategy(strategy)[0](config.strategy, settings, recorder).start(grid, fresh(config), 2)
    assert {failure["institution"] for failure in recorder.failures} == (
        {"b"} if config.strategy.traits.draws_images else set()
    )
    assert set(recorder.own) == {"a", "b", "c"}
    assert all(np.isfinite(array).all() for array in opened(final.arrays).values())
    assert {"accuracy", "auc"} <= recorder.pooled.keys()
    assert "auc" not in recorder.own["b"]
