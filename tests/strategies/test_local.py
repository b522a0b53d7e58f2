"""Local through real messages against plain loops: every model stays where it is, and outlives its process."""

import contextlib
import shlex

import numpy as np
import pytest
import torch
from flwr.app import Error, Message
from safetensors.numpy import load_file
from torch.nn.functional import cross_entropy

from flwr_replay import client, client_app, compose, institution
from flwr_replay.check import Quiet
from flwr_replay.client_app import app, backbone
from flwr_replay.engine import InlineGrid
from flwr_replay.rng import derived_seed
from flwr_replay.server_app import execute

B = 16
SIZES = {"a": 70, "b": 33, "c": 5}
JOB = ["strategy=local", "task=medmnist", "task.size=8", "classes=3", "model=cnn", "model.width=4"]
JOB += [f"batch_size={B}", "lr=0.05", "device=cpu", "rounds=3", "nodes=3", "run_name=run"]


class Grid(InlineGrid):
    """Serves every message from memory as a new process has it; looks for weights; breaks off where told."""

    forgetful = True
    failing = breaking = ()

    def _answer(self, message):
        stage = message.content["config"].get("stage", "")
        server_round = message.content["config"]["server-round"]
        name = self.contexts[message.metadata.dst_node_id].node_config["name"]
        if (name, stage, server_round) in self.breaking:
            raise KeyboardInterrupt
        if (name, stage, server_round) in self.failing:
            return Message(Error(2, "made to fail"), reply_to=message)
        if self.forgetful:
            for cache in (client._scratch, client_app.backbone, institution._institution):
                cache.cache_clear()
        reply = super()._answer(message)
        assert "arrays" not in message.content
        assert "arrays" not in reply.content
        return reply


@pytest.fixture
def shards(tmp_path):
    rng = np.random.default_rng(0)
    data = {}
    for name, n in SIZES.items():
        x, y = rng.integers(0, 256, (n + 9, 8, 8), np.uint8), rng.integers(0, 3, n + 9)
        parts = {"train_images": x[:n], "train_labels": y[:n], "test_images": x[n:], "test_labels": y[n:]}
        np.savez(tmp_path / f"{name}.npz", **parts)
        data[name] = [
            torch.from_numpy(a) for a in (x[:n, None] / np.float32(255), y[:n], x[n:, None] / np.float32(255), y[n:])
        ]
    return data


@pytest.fixture
def run(tmp_path, shards):
    def start(*options, folder="x", **watched):
        overrides = [*JOB, *options, f"runs_dir={tmp_path / folder}"]
        if watched.pop("resume", False):
            overrides = [*compose.overrides_of(tmp_path / folder / "run" / "config.yaml")]
            overrides.append(f"resume={tmp_path / folder / 'run'}")
        state = tmp_path / folder / "state"
        nodes = [{"name": name, "data": str(tmp_path / f"{name}.npz"), "state": str(state)} for name in "cab"]
        grid = Grid(app, {"overrides": shlex.join(overrides)}, nodes)
        vars(grid).update(watched)
        result, _ = execute(grid, compose.compose(overrides), Quiet())
        return {name: load_file(state / name / "run" / "model-000003.safetensors") for name in SIZES}, result

    torch.set_num_threads(1)
    return start


def twin(x, y, name, keep):
    config = compose.compose(JOB)
    model = backbone(config.model, config.task)(derived_seed(0, "model"))
    steps = None
    for server_round in (1, 2, 3):
        if steps is None or not keep:
            steps = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(derived_seed(0, name, server_round)))
        for i in range(max(1, len(y) // B)):
            rows = order[i * B : (i + 1) * B]
            steps.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            steps.step()
    return model


def same(one, other):
    return all(one[k][name].tobytes() == other[k][name].tobytes() for k in SIZES for name in one[k] | other[k])


@pytest.mark.parametrize("rule", ["keep", "reset"])
def test_every_institution_trains_its_own_model_in_new_processes(run, shards, rule):
    models, result = run(f"optimizer-state={rule}")
    right = 0
    for name, (x, y, test_x, test_y) in shards.items():
        model = twin(x, y, name, rule == "keep")
        for key, value in model.state_dict().items():
            np.testing.assert_allclose(models[name][key], value.numpy(), rtol=0, atol=1e-6, err_msg=f"{name} {key}")
        hits = int((model.eval()(test_x).argmax(1) == test_y).sum())
        assert result["final"]["institutions"][name]["accuracy"] == pytest.approx(hits / len(test_y))
        right += hits
    assert result["final"]["global"]["accuracy"] == pytest.approx(right / sum(len(s[3]) for s in shards.values()))
    assert result["examples-seen"] == 3 * (4 * B + 2 * B + 5)
    assert result["bytes-by-kind"]["up"].keys() == {"statistic", "notice"}


def test_a_process_that_remembers_gives_the_same_bits(run):
    models, result = run()
    remembered, other = run(folder="y", forgetful=False)
    assert same(models, remembered)
    assert result["final"] == other["final"]


@pytest.mark.parametrize("where", [("a", "train-own", 2), ("c", "train-own", 3), ("b", "evaluate-own", 3)])
def test_a_run_that_broke_off_goes_on_with_the_same_bits(run, where):
    models, result = run()
    with contextlib.suppress(KeyboardInterrupt):
        run(folder="y", breaking=[where])
    resumed, other = run(folder="y", resume=True)
    assert same(models, resumed)
    assert result["final"] == other["final"]
    assert result["examples-seen"] == other["examples-seen"]


def test_who_has_not_trained_yet_has_nothing_to_evaluate(run):
    failing = [("b", "train-own", server_round) for server_round in (1, 2)]
    models, result = run(failing=failing, forgetful=False)
    reasons = [(failure["round"], failure["reason"]) for failure in result["failures"]]
    assert [server_round for server_round, _ in reasons] == [1, 1, 2, 2]
    assert all("has no model yet" in reason for _, reason in reasons[1::2])
    assert sorted(result["final"]["institutions"]) == ["a", "b", "c"]  # the third round did
    alone = run(folder="y")[0]
    assert all(models[name][key].tobytes() == alone[name][key].tobytes() for name in "ac" for key in alone[name])
