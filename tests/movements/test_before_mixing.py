"""evaluate-before-mixing: every institution also tests its model as it was trained, before it is averaged or mixed."""

import json

import numpy as np
import pytest
import torch
from hostile_server import HostileServer, refusal
from peers import JOB, NAMES, hospitals, run

from flwr_replay.check import check_strategy
from flwr_replay.config.catalogue import choices
from flwr_replay.config.compose import compose
from flwr_replay.engines.simulate import Simulation
from flwr_replay.errors import ConfigError
from flwr_replay.models.zoo import backbone
from flwr_replay.payloads.avgpush import EvaluatePeer
from flwr_replay.studies.compare import compare_strategies
from flwr_replay.wire.records import arrays_in, config_in
from flwr_replay.wire.weights import load_arrays, parted

BEFORE = "evaluate_before_mixing=true"
MIXES = [
    "fedavg",
    "fedprox",
    "fedavgm",
    "fedavgshare",
    "scaffold",
    "moon",
    "fedbn",
    "ditto",
    "fml",
    "fml proxy_optimizer=travels training.optimizer=adam",
]
MIXES += ["proxyfl", "proxyfl proxy_optimizer=travels training.optimizer=adam", "avgpush", "avgpush external=true"]
REFUSE = sorted({*choices("strategy")} - {job.partition(" ")[0] for job in MIXES})


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("job", "prefix"), [("fedavg", ""), ("fml", "proxy-"), ("fml proxy-optimizer=travels optimizer=adam", "proxy-")]
)
def test_where_a_server_averages_it_is_the_test_of_what_each_has_returned(folder, job, prefix):
    returned = {}

    def keep(grid, message, reply):
        if config_in(message.content).get("stage") in ("train", "train-mutually"):
            returned[grid.name_of(message.metadata.dst_node_id)] = parted(arrays_in(reply.content))[0]

    options = [] if job == "fedavg" else ["dp=none"]
    ran = run(folder, *f"strategy={job}".split(), *options, BEFORE, "rounds=1", "lr=0.3", after=keep)
    for name in NAMES:
        tested = ran.result["final"]["institutions"][name]
        assert tested[f"before-mixing-{prefix}accuracy"] == pytest.approx(accuracy(folder, name, returned[name]))
        assert tested[f"before-mixing-{prefix}loss"] != tested[f"{prefix}loss"]
    lines = [json.loads(line) for line in (ran.folder / "metrics.jsonl").read_text().splitlines()]
    assert f"before-mixing-{prefix}accuracy" in {line["metric"] for line in lines}


@pytest.mark.sampled(1, "strategy")
@pytest.mark.parametrize("strategy", ["avgpush", "proxyfl"])
@pytest.mark.parametrize("topology", ["none", "complete"])
def test_in_gossip_it_is_the_test_of_what_was_released(folder, strategy, topology):
    ran = run(folder, f"strategy={strategy}", f"topology={topology}", "dp=none", "lr=1", BEFORE, "rounds=1")
    prefix, differing = ("proxy-" if strategy == "proxyfl" else ""), 0
    for name in NAMES:
        tested = ran.result["final"]["institutions"][name]
        for key, metric in (("released", f"before-mixing-{prefix}accuracy"), ("mixed", f"{prefix}accuracy")):
            assert tested[metric] == pytest.approx(accuracy(folder, name, ran.model(name, 1, key)[0]))
        differing += tested[f"before-mixing-{prefix}loss"] != tested[f"{prefix}loss"]
    assert differing == (0 if topology == "none" else len(NAMES))


def test_who_has_not_trained_in_this_exchange_has_nothing_to_test(folder):
    ran = run(folder, "strategy=avgpush", "topology=complete", BEFORE, "rounds=2", away={("b", 2)})
    tests = [asked for asked in ran.grid.asked if asked.stage == "evaluate-peer"]
    assert len(tests) == 2 * (4 + 3)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("job", MIXES)
def test_the_contract_is_kept(job, tmp_path, monkeypatch):
    """The forecast is the ledger, a resumed run ends with the same bits and metrics, one institution may fail."""
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    name, *options = job.split()
    check_strategy(name, [*options, BEFORE, "partition.size=60"])


@pytest.mark.parametrize("strategy", REFUSE)
def test_who_mixes_no_models_refuses(strategy):
    with pytest.raises(ConfigError, match="is for methods that average or mix models, not noisy updates; got"):
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
    reply = server.send(EvaluatePeer(run="r", exchange=7, mixed=False))
    assert "has released none in exchange 7" in refusal(reply)
