"""Several processes train as one would, end with the process that asked, and refuse what they cannot share."""

import signal
import time
from contextlib import closing
from copy import deepcopy
from functools import partial

import numpy as np
import psutil
import pytest
import torch
from forks import Command
from torch import nn

from flwr_replay.config.sections import TrainingConfig
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.learning.latents import LatentStore
from flwr_replay.learning.ranks import Ranks
from flwr_replay.learning.tasks import Classification
from flwr_replay.learning.training import make_optimizer, torch_rng
from flwr_replay.payloads.fedreplay import Latents
from flwr_replay.strategies.fedreplay import descend
from flwr_replay.wire.weights import load_optimizer_arrays, optimizer_arrays

SIZES = {"a": 30, "b": 11}
LOSS = Classification(3).loss


@pytest.fixture
def store(tmp_path):
    kept, rng = LatentStore(tmp_path), np.random.default_rng(0)
    for name, n in SIZES.items():
        rows = {"latents": rng.normal(size=(n, 4, 6, 6)).astype(np.float32), "labels": rng.integers(0, 3, n)}
        kept.add(name, Latents(**rows, scales=None, num_examples=n, first=0, total=n, raw_bytes=1))
    return kept


@pytest.fixture(scope="module")
def several():
    """Two processes, which start where none are left by the test before: each takes seconds to start."""
    with closing(Ranks(2, "cpu")) as ranks:
        yield ranks


def network():
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    return nn.Sequential(*layers)


def epoch(ranks, module, optimizer, training, store, number):
    """Train for one epoch; return the losses of its batches."""
    size = min(training.batch_size, len(store))
    batches = partial(store.epoch, training.batch_size, torch_rng(0, number))
    return torch.stack(ranks.train(descend, module, optimizer, training, LOSS, batches, size)).tolist()


def assert_weights_close(left, right):
    for name, value in left.state_dict().items():
        torch.testing.assert_close(right.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_two_processes_train_as_one_would(store, several, forks):
    others = 0
    for kind, b in (("sgd", 7), ("adam", 8), ("sgd", 100)):  # shares of two sizes; one batch of all 41
        training = TrainingConfig(optimizer=kind, lr=0.05, batch_size=b)
        single, shared = network(), network()
        optimizers = [make_optimizer(module, training, training.lr) for module in (single, shared)]
        for number in range(2):
            losses = epoch(Ranks(1, "cpu"), single, optimizers[0], training, store, number)
            assert len(losses) == max(1, 41 // b)
            loss = epoch(several, shared, optimizers[1], training, store, number)
            assert loss == pytest.approx(losses, rel=1e-5)
            others += loss != losses
            assert_weights_close(single, shared)
            state = optimizer_arrays(optimizers[1])
            assert state.keys() == optimizer_arrays(optimizers[0]).keys()
            optimizers[1] = make_optimizer(shared, training, training.lr)  # as after a restart
            load_optimizer_arrays(optimizers[1], state)
    assert others  # the sums were others, so something was shared out


def test_a_rank_that_ends_is_one_line_and_ends_the_others(store, several, forks):
    training, module = TrainingConfig(batch_size=8), network()
    optimizer = make_optimizer(module, training, 0.1)
    epoch(several, module, optimizer, training, store, 0)
    before = deepcopy(module.state_dict())
    started = [psutil.Process(process.pid) for process in several.processes]
    started[1].kill()
    with pytest.raises(RunError, match=r"all 2 processes .*process 1 ended with exit code -9: run again"):
        epoch(several, module, optimizer, training, store, 1)
    assert not any(process.is_running() for process in started)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_what_fails_in_a_rank_is_one_line(store, several, forks):
    training, module = TrainingConfig(batch_size=8), nn.Sequential(nn.Flatten(), nn.Linear(5, 3))
    with pytest.raises(RunError, match=r"process [01]: RuntimeError: .*mat1 and mat2"):
        epoch(several, module, make_optimizer(module, training, 0.1), training, store, 0)


@pytest.mark.sampled(1, of="worker processes")
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_none_outlives_the_run(tmp_path, by):
    job = ["strategy=fedreplay", "encoder=random", "model.norm=group", "partition.size=60", "nodes=2", "rounds=5000"]
    words = ["run", *job, "server-processes=2", "device=cpu", "--runs-dir", str(tmp_path), "run-name=long"]
    run = Command(words, tmp_path, FLWR_REPLAY_HOME=str(tmp_path))
    try:
        metrics = tmp_path / "long" / "metrics.jsonl"
        while not metrics.exists() or not metrics.stat().st_size:
            assert run.poll() is None, run.rest()
            time.sleep(0.1)
        children = psutil.Process(run.pid).children(recursive=True)
        assert sum("spawn_main" in " ".join(process.cmdline()) for process in children) == 2
        run.send_signal(by)
        run.rest()
        assert not psutil.wait_procs(children, timeout=20)[1]
    finally:
        run.kill()
        run.wait()


class Unsent(nn.Linear):
    def __reduce__(self):
        raise TypeError("cannot pickle this")


@pytest.mark.parametrize(
    ("module", "size", "device", "says"),
    [
        (nn.BatchNorm2d(2), 8, "cpu", "batch norm normalises over all of it: set model.norm=group"),
        (nn.Linear(2, 2), 1, "cpu", "got batches of 1: raise training.batch-size"),
        (nn.Linear(2, 2), 8, "cuda", "takes as many GPUs; there are 1: take fewer"),
        (nn.Linear(2, 2), 8, "cuda:1", "got device=cuda:1: set device=cuda"),
        (Unsent(2, 2), 8, "cpu", "it cannot be sent: cannot pickle this: define its layers at the top of a module"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(monkeypatch, module, size, device, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match=says):
        Ranks(2, device).check(module, size)
    Ranks(1, device).check(module, size)
