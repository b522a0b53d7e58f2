"""Attacks: a run's replay that is dropped, arrays that belong to no parcel, steps beyond what was charged."""

import numpy as np
import pytest
from harness import write_shards
from hostile_server import HostileServer, metrics, refusal, weights

from flwr_replay.config.compose import compose
from flwr_replay.config.halves import load_client, load_strategy
from flwr_replay.config.strategy import StrategyConfig
from flwr_replay.errors import ConfigError
from flwr_replay.payloads.avgpush import Push
from flwr_replay.payloads.common import Train
from flwr_replay.payloads.local import TrainOwn
from flwr_replay.payloads.relay import Deliver
from flwr_replay.privacy.plan import PrivacyPlan

TASK = ["task=medmnist", "task.size=8", "classes=3", "model=mlp", "model.width=6", "batch_size=16", "device=cpu"]
START = {"run": "r", "lr": 0.1, "init_seed": 1, "exchange": 1}


@pytest.fixture
def folder(tmp_path):
    write_shards(tmp_path, {"a": 40})
    return tmp_path


@pytest.mark.parametrize(
    ("strategy", "request_"), [("avgpush", Push(**START, committed=0)), ("local", TrainOwn(**START))]
)
def test_a_run_whose_options_name_replay_does_not_train_without_it(folder, strategy, request_):
    server = HostileServer(folder, *TASK, f"strategy={strategy}", "replay=vqvae2")
    reply = server.send(request_)
    assert refusal(reply)
    assert not weights(reply)


@pytest.mark.parametrize("name", ["junk", ""])
def test_parcels_bring_no_arrays_that_belong_to_none(folder, name):
    server = HostileServer(folder, *TASK, "strategy=avgpush")
    server.send(Push(**START, committed=0))
    arrays = {**{f"00000.{key}": array for key, array in server.weights.items()}, name: np.zeros(3, np.float32)}
    dealt = {"parcels": [7], "shares": [0.5], "weights": [1.0]}
    reply = server.send(Deliver(run="r", released_in=1, kept=0.5, arrays=arrays, exchange=1, **dealt))
    assert refusal(reply)


def test_a_loop_of_more_passes_than_it_has_charged_does_not_leave_under_dp(folder, monkeypatch):
    """A third party's: it was possible before, too."""

    def train(self, request):
        data, learner = self.training_data(), self.learner(request)  # charges one pass
        for _ in range(10):
            for x_B, y_B in learner.batches(data, self.shuffle(1)):
                learner.step(x_B, y_B)
        return self.trained(request, learner, len(data))

    monkeypatch.setattr(load_client("fedavg"), "train", train)
    server = HostileServer(folder, *TASK, "strategy=fedavg", "dp=classifier", "sigma=1")
    reply = server.send(Train(arrays=server.weights, run="ten", lr=0.1))
    assert refusal(reply)
    assert "epsilon" not in metrics(reply)


def test_parcels_that_never_came_bring_no_arrays(folder):
    server = HostileServer(folder, *TASK, "strategy=avgpush")
    server.send(Push(**START, committed=0))
    dealt = {"parcels": [], "shares": [], "weights": []}
    reply = server.send(Deliver(run="r", released_in=1, kept=1.0, arrays={".x": np.zeros(3)}, exchange=1, **dealt))
    assert refusal(reply)


def test_a_proxy_is_proven_only_if_its_strategy_says_so(monkeypatch):
    options = load_strategy("fml")[1]
    monkeypatch.setattr(options, "unproven", StrategyConfig.unproven)
    with pytest.raises(ConfigError, match="let it declare `unproven`"):
        PrivacyPlan.of(compose(["strategy=fml", "task=digits", "nodes=2"]))


@pytest.mark.parametrize(("asked", "refused"), [(1, False), (7, True)])
def test_an_instruction_of_another_name_is_held_to_its_option(folder, monkeypatch, asked, refused):
    monkeypatch.setattr(load_strategy("cwt")[1], "instructed", property(lambda self: {"local_epochs": 1}))
    server = HostileServer(folder, *TASK, "strategy=cwt")
    reply = server.send(Train(arrays=server.weights, run="r", lr=0.1, exchange=1, local_epochs=asked))
    assert bool(refusal(reply)) == refused
