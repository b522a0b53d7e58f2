"""evaluate-before-mixing: every institution also tests its model as it was trained, before it is averaged or mixed."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hostile_server import HostileServer, refusal
from peers import JOB, NAMES, hospitals, run

from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError
from flwr_replay.models.zoo import backbone
from flwr_replay.payloads.avgpush import EvaluatePeer
from flwr_replay.report.progress import Display
from flwr_replay.runs.forecast import forecast
from flwr_replay.runs.simulate import Simulation, simulate
from flwr_replay.studies.compare import compare_strategies
from flwr_replay.wire.records import arrays_in, config_in
from flwr_replay.wire.weights import load_arrays

BEFORE = "evaluate_before_mixing=true"
MIXES = ["fedavg", "fedprox", "fedavgm", "fml", "proxyfl", "avgpush"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    hospitals(folder)
    return folder


def accuracy(folder, name, weights):
    config = compose(JOB)
    model, shard = backbone(config.model, config.task)(0), np.load(folder / f"{name}.npz")
    load_arrays(model, weights)
    with torch.no_grad():
        x = torch.from_numpy(shard["test_images"]).view(-1, 1, 8, 8).float() / 255
        return float((model.eval()(x).argmax(1).numpy() == shard["test_labels"].ravel()).mean())


def test_in_fedavg_it_is_the_test_of_what_each_has_returned(folder):
    returned = {}

    def keep(grid, message, reply):
        if config_in(message.content).get("stage") == "train":
            returned[grid.name_of(message.metadata.dst_node_id)] = arrays_in(reply.content).state_dict()

    ran = run(folder, "strategy=fedavg", BEFORE, "rounds=1", "lr=1", after=keep)
    for name in NAMES:
        found = ran.result["final"]["institutions"][name]
        assert found["before-mixing-accuracy"] == pytest.approx(accuracy(folder, name, returned[name]))
    lines = [json.loads(line) for line in (ran.folder / "metrics.jsonl").read_text().splitlines()]
    assert "before-mixing-accuracy" in {line["metric"] for line in lines}


@pytest.mark.parametrize("strategy", ["avgpush", "proxyfl"])
@pytest.mark.parametrize("topology", ["none", "complete"])
def test_in_gossip_it_is_the_test_of_what_was_released(folder, strategy, topology):
    ran = run(folder, f"strategy={strategy}", f"topology={topology}", "dp=none", "lr=1", BEFORE, "rounds=1")
    prefix, differing = ("proxy-" if strategy == "proxyfl" else ""), 0
    for name in NAMES:
        found = ran.result["final"]["institutions"][name]
        for key, metric in (("released", f"before-mixing-{prefix}accuracy"), ("mixed", f"{prefix}accuracy")):
            assert found[metric] == pytest.approx(accuracy(folder, name, ran.model(name, 1, key)[0]))
        differing += found[f"before-mixing-{prefix}loss"] != found[f"{prefix}loss"]
    assert differing == (0 if topology == "none" else len(NAMES))


def test_who_has_not_trained_in_this_exchange_has_nothing_to_test(folder):
    ran = run(folder, "strategy=avgpush", "topology=complete", BEFORE, "rounds=2", away={("b", 2)})
    tests = [asked for asked in ran.grid.asked if asked.stage == "evaluate-peer"]
    assert len(tests) == 2 * (4 + 3)


@pytest.mark.parametrize("strategy", MIXES)
def test_the_forecast_is_the_ledger(tmp_path, strategy):
    job = [
        f"strategy={strategy}",
        "task=digits",
        "partition=iid",
        "partition.size=40",
        "nodes=3",
        "model=mlp",
        "width=4",
    ]
    job += ["dp=none", "rounds=2", "batch_size=20", "device=cpu", BEFORE, f"runs_dir='{tmp_path}'"]
    simulation, sums = Simulation.of(compose(job)), [Counter(), Counter()]
    for line in forecast(simulation):
        sums[0][line.institution, line.direction, line.stage, line.field] += line.bytes
    _, folder = simulate(simulation, job, Display())
    for row in map(json.loads, (folder / "ledger.jsonl").read_text().splitlines()):
        sums[1][row["institution"], row["direction"], row["stage"], row["field"]] += row["bytes"]
    assert sums[0] == sums[1]


@pytest.mark.parametrize("strategy", ["cwt", "fedsgd", "local", "feder", "central", "fedreplay"])
def test_who_mixes_no_models_refuses(strategy):
    with pytest.raises(ConfigError, match="evaluate-before-mixing is for methods that average or mix models; got"):
        Simulation.of(compose([f"strategy={strategy}", "task=digits", "model=mlp", "nodes=2", BEFORE]))


def test_a_comparison_by_it(tmp_path):
    options = ["task=digits", "nodes=2", "model=mlp", "width=4", "rounds=1", "seeds=1", "device=cpu", BEFORE]
    _, report = compare_strategies(["fedavg", "avgpush"], options, "fedavg", 1, tmp_path, "before-mixing-accuracy")
    assert report["metric"] == "before-mixing-accuracy"
    assert report["higher-is-better"]
    assert all(row["mean"] is not None for row in report["strategies"].values())


def test_a_server_that_asks_before_anything_was_released_is_told_so(tmp_path):
    hospitals(tmp_path, "a")
    server = HostileServer(tmp_path, *JOB, "strategy=avgpush")
    reply = server.send(EvaluatePeer(run="r", server_round=7, mixed=False))
    assert "has released none in exchange 7" in refusal(reply)
