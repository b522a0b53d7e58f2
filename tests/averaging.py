"""What the tests of the averaging strategies share: three unequal hospitals, one of them tiny, and plain rounds."""

import shlex

import numpy as np
import torch
from harness import SHARDS, fresh, node_configs
from torch.nn.functional import cross_entropy

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose
from flwr_replay.config.halves import load_strategy
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.learning.tasks import make_task
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.base import Settings
from flwr_replay.rng import derived_seed
from flwr_replay.wire.records import opened

B = 16
SIZES = {"a": 70, "b": 33, "c": 5}
TASK = [*SHARDS, "classes=3", "model=cnn", "model.width=4"]
JOB = [*TASK, f"batch_size={B}", "lr=0.05", "device=cpu", "rounds=3"]


def run(folder, strategy, *options, names="cab", input_shape=None):
    """Run a strategy through real messages; return the final weights and the strategy."""
    torch.set_num_threads(1)
    overrides = [f"strategy={strategy}", *JOB, *options]
    config, nodes = compose(overrides), node_configs(folder, folder / strategy, names)
    grid = InlineGrid(app, {"overrides": shlex.join(overrides)}, nodes)
    method = load_strategy(strategy)[0](
        config.strategy,
        Settings(
            roll_call=True,
            training=config.training,
            nodes=len(names),
            evaluate_every=9,
            task=make_task(config.task),
            model=backbone(config.model, config.task),
            input_shape=input_shape,
        ),
    )
    return opened(method.start(grid, fresh(config), config.rounds).arrays), method


def local_sgd(model, x, y, name, exchange, momentum=0.9, penalty=None):
    """Train one pass with plain PyTorch."""
    steps = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(derived_seed(0, name, exchange)))
    for i in range(max(1, len(y) // B)):
        rows = order[i * B : (i + 1) * B]
        steps.zero_grad()
        loss = cross_entropy(model(x[rows]), y[rows])
        (loss + penalty(model) if penalty else loss).backward()
        steps.step()


def mean(states, sizes):
    """Average state dicts, weighed n_k / n."""
    total = {
        name: sum(n / sum(sizes) * s[name].double() for n, s in zip(sizes, states, strict=True)) for name in states[0]
    }
    return {name: value.round() if name.endswith("tracked") else value for name, value in total.items()}


def assert_weights_close(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], np.asarray(right[name]), rtol=0, atol=2e-6, err_msg=name)


def rounds(shards, local):
    """Return the weights after three rounds of FedAvg, where `local(model, fixed, x, y, name, exchange)` trains.

    Both networks begin a round with the global weights; `fixed` keeps them.
    """
    config = compose(JOB)
    build = backbone(config.model, config.task)
    state = build(derived_seed(0, "model")).state_dict()
    for exchange in (1, 2, 3):
        trained = []
        for name, (x, y) in shards.items():
            model, fixed = build(0), build(0)
            for network in (model, fixed):
                network.load_state_dict(state)
            local(model, fixed, x, y, name, exchange)
            trained.append(model.state_dict())
        state = mean(trained, [len(y) for _, y in shards.values()])
    return {name: value.numpy() for name, value in state.items()}
