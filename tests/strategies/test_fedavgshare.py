"""FedAvg+Share: who gives what to whom, and FedAvg on the enlarged data."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from averaging import JOB, SIZES, TASK, assert_weights_close, local_sgd, mean, run
from harness import write_shards
from safetensors.numpy import load_file

from flwr_replay.check import check_strategy
from flwr_replay.clients.fedavgshare import FedAvgShareClient
from flwr_replay.config.compose import compose
from flwr_replay.engines.simulate import Simulation, run_inline
from flwr_replay.errors import ConfigError, RefusedError, RunError
from flwr_replay.forecast.forecast import forecast_page
from flwr_replay.institution.policy import Policy
from flwr_replay.learning.training import torch_rng
from flwr_replay.models.zoo import backbone
from flwr_replay.payloads.fedavgshare import Given
from flwr_replay.report.progress import Display
from flwr_replay.rng import derived_seed


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path, SIZES)


def test_it_is_fedavg_on_ones_own_and_what_others_gave(tmp_path, shards):
    given = {}
    for name, (x, y) in shards.items():
        chosen = torch.randperm(len(y), generator=torch_rng(0, name, "share"))[: max(1, round(0.2 * len(y)))]
        given[name] = x[chosen], y[chosen]
    enlarged = {
        name: tuple(torch.cat([own, *(given[o][i] for o in sorted(given) if o != name)]) for i, own in enumerate(pair))
        for name, pair in shards.items()
    }
    config = compose(JOB)
    build = backbone(config.model, config.task)
    state = build(derived_seed(0, "model")).state_dict()
    for exchange in (1, 2, 3):
        trained = []
        for name, (x, y) in enlarged.items():
            model = build(0)
            model.load_state_dict(state)
            local_sgd(model, x, y, name, exchange)
            trained.append(model.state_dict())
        state = mean(trained, [len(y) for _, y in enlarged.values()])
    assert_weights_close(
        run(tmp_path, "fedavgshare", "share=0.2")[0], {name: value.numpy() for name, value in state.items()}
    )


def test_everybody_gives_once_and_holds_what_all_others_gave(tmp_path, shards):
    _, strategy = run(tmp_path, "fedavgshare")
    folder = strategy.recorder.folder("shared")
    sizes = {name: len(load_file(folder / f"{name}.safetensors")["labels"]) for name in SIZES}
    assert sizes == {"a": 4, "b": 2, "c": 1}  # 5 %, at least one
    assert strategy.received == {"a": ["b", "c"], "b": ["a", "c"], "c": ["a", "b"]}


def test_the_ledger_calls_raw_examples_what_they_are(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    options = ["strategy=fedavgshare", "task=digits", "model=cnn", "model.width=4", "nodes=3", "rounds=1", "split=test"]
    result, folder = run_inline([*options, f"runs_dir={tmp_path}"], Display())
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    raw = [line for line in lines if line["field"] == "images"]
    assert {(line["kind"], line["direction"]) for line in raw} == {("per-sample-raw", "up"), ("per-sample-raw", "down")}
    up = result["bytes-by-kind"]["up"]
    assert up["raw-bytes-they-stand-for"] == 3 * round(0.05 * 1438 / 3) * (64 + 8)
    assert up["per-sample-raw"] > up["raw-bytes-they-stand-for"]


@pytest.mark.parametrize(
    ("spoil", "reported"),
    [
        (lambda g: replace(g, labels=g.labels + 9), "a share must have 2 labels"),
        (lambda g: replace(g, labels=g.labels[:1]), "a share must have 2 labels"),
        (lambda g: replace(g, images=g.images[:, :, :4]), "2 images of"),
        (lambda g: replace(g, images=g.images.astype(np.float32)), "all images must have one dtype"),
        (lambda g: replace(g, images=np.full(g.images.shape, np.nan, np.float32)), "images must be finite"),
        (lambda g: replace(g, images=np.repeat(g.images, 9, 0), labels=np.repeat(g.labels, 9)), "a share must have 2"),
    ],
)
def test_a_bad_share_is_reported_and_spoils_nobody_elses_training(tmp_path, shards, monkeypatch, spoil, reported):
    honest = FedAvgShareClient.give

    def give(self, request):
        given = honest(self, request)
        return spoil(given) if self.institution.name == "b" else given

    monkeypatch.setattr(FedAvgShareClient, "give", give)
    _, strategy = run(tmp_path, "fedavgshare", "rounds=1", input_shape=(1, 8, 8))
    assert {failure["institution"] for failure in strategy.recorder.failures} == {"b"}
    assert reported in strategy.recorder.failures[0]["reason"]
    assert strategy.received == {"a": ["c"], "b": ["a", "c"], "c": ["a"]}


def test_what_others_gave_is_not_lost_unnoticed(tmp_path, shards, monkeypatch):
    honest = FedAvgShareClient.train_enlarged

    def losing(self, visit):
        if (self.institution.name, visit.exchange) == ("a", 2):
            self.state.forget("shared", visit.run)
        return honest(self, visit)

    monkeypatch.setattr(FedAvgShareClient, "train_enlarged", losing)
    _, strategy = run(tmp_path, "fedavgshare")
    reported = {(failure["institution"], failure["round"]): failure["reason"] for failure in strategy.recorder.failures}
    assert reported.keys() == {("a", 2), ("a", 3)}
    assert "3 examples of others that it has received; they are gone" in reported["a", 2]


def test_what_the_server_does_not_know_to_be_received_is_not_trained_on(tmp_path, shards, monkeypatch):
    """As after a kill, when the disk is full at the second attempt; or when only the answer was lost."""
    honest = FedAvgShareClient.receive

    def receive(self, request):
        received = honest(self, request)
        if (self.institution.name, request.exchange) == ("a", 1):
            raise RunError("the disk is full")
        return received

    monkeypatch.setattr(FedAvgShareClient, "receive", receive)
    _, strategy = run(tmp_path, "fedavgshare")
    [failure] = strategy.recorder.failures
    assert (failure["institution"], failure["round"]) == ("a", 1)
    assert failure["reason"].startswith("RunError")
    assert strategy.received["a"] == ["b", "c"]
    assert strategy.received_in == {"a": 2, "b": 1, "c": 1}
    assert strategy.held == {"a": 3, "b": 5, "c": 6}


def test_it_keeps_the_contract_with_momentum_that_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    check_strategy("fedavgshare", ["strategy.optimizer_state=keep"])


@pytest.mark.parametrize("share", ["0", "1.5"])
def test_a_share_is_a_share(share):
    with pytest.raises(ConfigError, match="share is a share"):
        compose(["strategy=fedavgshare", *TASK, f"share={share}"])


def test_a_policy_that_allows_latents_does_not_allow_raw_examples(tmp_path):
    with pytest.raises(RefusedError, match="images is per-sample-raw"):
        Policy(kinds=("model", "statistic", "per-sample")).check_release(Given)


def test_the_forecast_says_that_raw_examples_leave():
    page = {
        name: forecast_page(
            Simulation.of(compose([f"strategy={name}", "task=digits", "model=cnn", "nodes=3", "rounds=1"]))
        )
        for name in ("fedavg", "fedavgshare", "fedreplay")
    }
    assert "They never leave" in page["fedavg"]
    assert "of examples, to every other institution" in page["fedavgshare"]
    assert "the institutions send: all labels, as they are" in page["fedreplay"]
