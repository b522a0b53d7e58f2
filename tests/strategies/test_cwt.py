"""CWT through real messages against a plain loop: one model, one institution after another."""

import shlex
from collections import defaultdict

import numpy as np
import pytest
import torch
from grid import Grid, nth
from harness import SHARDS, Seen, fresh, node_configs, write_shards
from torch.nn.functional import cross_entropy

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose
from flwr_replay.errors import DivergedError, RunError
from flwr_replay.learning.tasks import make_task
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.base import Settings
from flwr_replay.rng import derived_rng, derived_seed
from flwr_replay.server.recorder import Recorder
from flwr_replay.strategies.cwt import CWT
from flwr_replay.wire.records import metrics_in, opened

B = 16
SIZES = {"a": 70, "b": 33, "c": 5}  # 4, 2 and 1 iterations
TASK = [*SHARDS, "classes=3", "model=cnn", "model.width=4"]
JOB = [*TASK, f"batch_size={B}", "lr=0.05", "device=cpu", "rounds=3"]


def each_exchange_is_a_visit(grid, message, reply):
    if grid.asked[-1].stage == "train":
        assert grid.asked[-1].exchange == len(grid.who("train"))


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path, SIZES)


@pytest.fixture
def start(tmp_path, shards):
    def start(*options, recorder=None, **script):
        overrides = ["strategy=cwt", *JOB, *options]
        config = compose(overrides)
        grid = Grid(app, {"overrides": shlex.join(overrides)}, node_configs(tmp_path, tmp_path))
        vars(grid).update({"after": each_exchange_is_a_visit, **script})
        options = {"evaluate_every": config.evaluate_every, "seed": config.seed, "task": make_task(config.task)}
        strategy = CWT(
            config.strategy, Settings(roll_call=True, training=config.training, nodes=3, **options), recorder or Seen()
        )
        return opened(strategy.start(grid, fresh(config), config.rounds).arrays), grid, strategy.recorder

    torch.set_num_threads(1)
    return start


def twin(shards, visits, momentum=0.9, keep=False):
    """Train one model, visit after visit, with SGD spelled out."""
    config = compose(JOB)
    model = backbone(config.model, config.task)(derived_seed(0, "model"))
    velocity = defaultdict(lambda: [0.0 for _ in model.parameters()])
    for exchange, name in enumerate(visits, start=1):
        if name is None:  # a visit that came to nothing
            continue
        x, y = shards[name]
        who = name if keep else exchange
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(derived_seed(0, name, exchange)))
        for i in range(max(1, len(y) // B)):
            rows = order[i * B : (i + 1) * B]
            gradients = torch.autograd.grad(cross_entropy(model(x[rows]), y[rows]), list(model.parameters()))
            with torch.no_grad():
                for k, (theta, gradient) in enumerate(zip(model.parameters(), gradients, strict=True)):
                    velocity[who][k] = momentum * velocity[who][k] + gradient
                    theta.add_(velocity[who][k], alpha=-0.05)
    return {name: value.detach().numpy() for name, value in model.state_dict().items()}


def assert_weights_close(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_allclose(left[name], right[name], rtol=0, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("keep", [False, True])
def test_a_fixed_order_is_that_of_the_names(start, shards, keep):
    weights, grid, recorder = start(f"optimizer-state={'keep' if keep else 'reset'}")
    assert grid.who("train") == [*"abc" * 3]
    assert_weights_close(weights, twin(shards, grid.who("train"), keep=keep))
    assert recorder.examples == 3 * (4 * B + 2 * B + 5)


def test_a_visit_is_max_1_floor_n_over_b_iterations(start):
    _, grid, _ = start()
    answers = {name: [metrics_in(reply.content) for _, reply in grid.of("train", name)] for name in SIZES}
    counts = {
        name: {(metrics["examples-seen"], metrics["num-steps"]) for metrics in of} for name, of in answers.items()
    }
    assert counts == {"a": {(4 * B, 4)}, "b": {(2 * B, 2)}, "c": {(5, 1)}}


def test_a_shuffled_order_is_a_new_permutation_in_every_cycle(start, shards):
    weights, grid, _ = start("order=shuffled", "rounds=6", "evaluate-every=6")
    visits = grid.who("train")
    cycles = [tuple(visits[i : i + 3]) for i in range(0, 18, 3)]
    assert all(sorted(cycle) == ["a", "b", "c"] for cycle in cycles)
    assert len(set(cycles)) > 1
    assert cycles == [tuple("abc"[i] for i in derived_rng(0, "order", n).permutation(3)) for n in range(6)]
    assert_weights_close(weights, twin(shards, grid.who("train")))


def test_a_visit_that_fails_goes_to_the_next_with_the_same_weights(start, shards):
    weights, grid, recorder = start(failing=nth(("train", "b", 1)))
    assert grid.who("train") == [*"abcabcabc"]
    assert_weights_close(weights, twin(shards, ["a", None, *"cabcabc"]))
    assert [(failure["institution"], failure["round"]) for failure in recorder.failures] == [("b", 2)]


def test_a_cycle_of_failures_ends_the_run(start):
    with pytest.raises(RunError, match=r"no institution answered in exchange 4; .*made to fail"):
        start(failing=nth(("train", "b", 1), ("train", "c", 1), ("train", "a", 2)))


def test_a_cycle_of_losses_that_are_not_finite_stops_the_run_at_the_last_good_checkpoint(start, shards):
    class Kept(Recorder):
        snapshots = ()

        def end_exchange(self, snapshot):
            self.snapshots += (snapshot,)

    diverging = nth(("train", "b", 1), ("train", "c", 1), ("train", "a", 2))

    def steep(grid, message):
        if diverging(grid, grid.asked[-1]):
            message.content["config"]["lr"] = 1e30

    recorder = Kept()
    with pytest.raises(DivergedError, match=r"^a: the loss must stay finite"):
        start(recorder=recorder, before=steep)
    for kept in recorder.snapshots:
        assert_weights_close(kept.arrays, twin(shards, ["a"]))
