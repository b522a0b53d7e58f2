"""FedAvg through real messages against a plain loop: all train the same model, and n_k / n weighs them."""

import shlex
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from grid import Grid
from harness import SHARDS, fresh, node_configs, same, write_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from torch.nn.functional import cross_entropy

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose
from flwr_replay.config.halves import load_strategy
from flwr_replay.errors import ConfigError
from flwr_replay.learning.tasks import make_task
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.base import Settings
from flwr_replay.movements.parallel import weighted_mean
from flwr_replay.rng import derived_seed
from flwr_replay.strategies.fedavg import FedAvg, FedAvgConfig
from flwr_replay.wire.records import opened

B = 16
SIZES = {"a": 70, "b": 33, "c": 5}
TASK = [*SHARDS, "classes=3", "model=cnn", "model.width=4"]
JOB = [*TASK, f"batch_size={B}", "lr=0.05", "device=cpu", "rounds=3"]


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path, SIZES)


@pytest.fixture
def start(tmp_path, shards):
    def start(*options, names="cab", strategy="fedavg", **script):
        overrides = [f"strategy={strategy}", *JOB, *options]
        config, nodes = compose(overrides), node_configs(tmp_path, tmp_path / strategy, names)
        grid = Grid(app, {"overrides": shlex.join(overrides)}, nodes)
        vars(grid).update(script)
        settings = Settings(
            roll_call=True, training=config.training, nodes=len(names), evaluate_every=9, task=make_task(config.task)
        )
        method = load_strategy(strategy)[0](config.strategy, settings)
        return opened(method.start(grid, fresh(config), config.rounds).arrays), method.recorder

    torch.set_num_threads(1)
    return start


def twin(shards, rounds=3, epochs=1, keep=False, failing=(), optimizer=torch.optim.SGD, **settings):
    """Average plain PyTorch models."""
    config = compose(JOB)
    build = backbone(config.model, config.task)
    arrays, kept = build(derived_seed(0, "model")).state_dict(), {}
    for exchange in range(1, rounds + 1):
        trained, sizes = [], []
        for name, (x, y) in shards.items():
            if (name, exchange) in failing:
                continue
            model = build(0)
            model.load_state_dict(arrays)
            steps = optimizer(model.parameters(), lr=0.05, **settings)
            if keep and name in kept:
                steps.load_state_dict(kept[name])
            shuffle = torch.Generator().manual_seed(derived_seed(0, name, exchange))
            for _ in range(epochs):
                order = torch.randperm(len(y), generator=shuffle)
                for i in range(max(1, len(y) // B)):
                    rows = order[i * B : (i + 1) * B]
                    steps.zero_grad()
                    cross_entropy(model(x[rows]), y[rows]).backward()
                    steps.step()
            kept[name] = steps.state_dict()
            trained.append(model.state_dict())
            sizes.append(len(y))
        arrays = {
            name: sum(n / sum(sizes) * model[name].double() for n, model in zip(sizes, trained, strict=True))
            for name in arrays
        }
        arrays = {name: value.round() if name.endswith("tracked") else value for name, value in arrays.items()}
    return {name: value.numpy() for name, value in arrays.items()}


def assert_weights_close(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], rtol=0, atol=1e-6, err_msg=name)


def test_institutions_of_unequal_size_weigh_n_k_over_n(start, shards):
    assert_weights_close(start()[0], twin(shards, momentum=0.9))


def test_every_local_epoch_has_a_shuffle_of_its_own(start, shards):
    assert_weights_close(start("local-epochs=3")[0], twin(shards, epochs=3, momentum=0.9))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_each_institution_keeps_its_own_optimizer(start, shards, optimizer):
    plain = {"optimizer": partial(torch.optim.Adam, fused=True)} if optimizer == "adam" else {"momentum": 0.9}
    weights, _ = start("optimizer-state=keep", f"optimizer={optimizer}")
    assert_weights_close(weights, twin(shards, keep=True, **plain))


@pytest.mark.parametrize("name", ["a", "c"])
def test_without_one_institution_the_others_weights_sum_to_one(start, shards, name):
    weights, recorder = start(failing=[("train", name, 1)])
    assert_weights_close(weights, twin(shards, momentum=0.9, failing=[(name, 1)]))
    assert [(failure["institution"], failure["round"]) for failure in recorder.failures] == [(name, 1)]


def test_the_order_of_replies_changes_no_bit(start):
    assert same(start()[0], start(backwards=True)[0])


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_alone_fedavg_is_cwt_is_central_bit_for_bit(start, optimizer):
    options = ["optimizer-state=keep", f"optimizer={optimizer}"]
    weights = [start(*options, names="a", strategy=name)[0] for name in ("fedavg", "cwt", "central")]
    assert same(weights[0], weights[1])
    assert same(weights[0], weights[2])


states = st.tuples(array_shapes(max_dims=2, max_side=3), st.integers(1, 4)).flatmap(
    lambda drawn: st.lists(
        st.fixed_dictionaries(
            {
                "w": arrays("float32", drawn[0], elements=st.floats(-1e6, 1e6, width=32)),
                "n": arrays("int64", (), elements=st.integers(0, 2**40)),
            }
        ),
        min_size=drawn[1],
        max_size=drawn[1],
    )
)


@settings(max_examples=60)
@given(states=states, data=st.data())
def test_the_mean_lies_within_its_parts_and_one_part_is_its_own_mean(states, data):
    weights = data.draw(st.lists(st.integers(1, 10**6), min_size=len(states), max_size=len(states)))
    before = [{name: array.copy() for name, array in state.items()} for state in states]
    mean = weighted_mean(states, weights)
    for name, array in mean.items():
        stacked = np.stack([state[name] for state in states])
        assert array.dtype == stacked.dtype
        assert (stacked.min(0) <= array).all()
        assert (array <= stacked.max(0)).all()
        expected = sum(w * p.astype(np.longdouble) for w, p in zip(weights, stacked, strict=True)) / sum(weights)
        np.testing.assert_allclose(array, expected, rtol=1e-6, atol=0.5 if name == "n" else 1e-6)
    assert same(weighted_mean(states, [3 * w for w in weights]), mean)
    assert same(weighted_mean(states[:1], weights[:1]), states[0])
    assert all(same(state, former) for state, former in zip(states, before, strict=True))


def test_a_subclass_that_combines_otherwise_must_say_itself_what_its_parent_may():
    """Under masks its `combine` would see one mean, and never run."""

    @dataclass(frozen=True, kw_only=True)
    class MedianConfig(FedAvgConfig):
        name: ClassVar[str] = "median"

    class Median(FedAvg):
        config_type = MedianConfig

    with pytest.raises(ConfigError, match="masked=true is for methods whose server averages weights and needs nothing"):
        replace(compose(["strategy=fedavg", *JOB, "masked=true"]), strategy=MedianConfig())
    with pytest.raises(ConfigError, match="evaluate-before-mixing is for methods that average or mix models"):
        Median.check(MedianConfig(), Settings(evaluate_before_mixing=True))
    with pytest.raises(ConfigError, match="evaluate-before-mixing is for methods that average or mix models"):
        type("Bare", (FedAvg,), {}).check(FedAvgConfig(), Settings(evaluate_before_mixing=True))
