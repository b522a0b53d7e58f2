"""Local through real messages against plain loops: every model stays where it is, and outlives its process."""

import shlex

import numpy as np
import pytest
import torch
from grid import Grid
from harness import SHARDS, Seen, node_configs, write_shards
from safetensors.numpy import load_file
from torch.nn.functional import cross_entropy

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose, overrides_of
from flwr_replay.learning.tasks import make_task
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.base import Settings
from flwr_replay.report.progress import Display
from flwr_replay.rng import derived_seed
from flwr_replay.runs.execute import execute
from flwr_replay.strategies.local import Local
from flwr_replay.wire.records import array_record

B = 16
SIZES = {"a": 70, "b": 33, "c": 5}
JOB = ["strategy=local", *SHARDS, "classes=3", "model=cnn", "model.width=4"]
JOB += [f"batch_size={B}", "lr=0.05", "device=cpu"]


def no_weights(grid, message, reply):
    assert "arrays" not in message.content
    assert "arrays" not in reply.content


@pytest.fixture
def shards(tmp_path):
    """Return training and test examples of each."""
    data = write_shards(tmp_path, SIZES)
    for name in SIZES:
        with np.load(tmp_path / f"{name}.npz") as file:
            data[name] += torch.from_numpy(file["test_images"][:, None]) / 255, torch.from_numpy(file["test_labels"])
    return data


@pytest.fixture
def nodes(tmp_path, shards):
    torch.set_num_threads(1)

    return lambda folder: node_configs(tmp_path, tmp_path / folder)


@pytest.fixture
def start(tmp_path, nodes):
    """Run; return each institution's model, and the recorder."""

    def start(*options, folder="state", **script):
        grid, config = Grid(app, {"overrides": shlex.join([*JOB, *options])}, nodes(folder)), compose([*JOB, *options])
        vars(grid).update({"forgetful": True, "after": no_weights, **script})
        strategy = Local(
            config.strategy,
            Settings(roll_call=True, training=config.training, nodes=3, run="run", task=make_task(config.task)),
            Seen(),
        )
        strategy.start(grid, array_record({}), 3)
        return models(tmp_path / folder, "run"), strategy.recorder

    return start


def models(state, run):
    return {name: load_file(state / name / "runs" / run / "model-000003.safetensors") for name in SIZES}


def twin(x, y, name, keep):
    config = compose(JOB)
    model = backbone(config.model, config.task)(derived_seed(0, "model"))
    steps = None
    for exchange in (1, 2, 3):
        if steps is None or not keep:
            steps = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(derived_seed(0, name, exchange)))
        for i in range(max(1, len(y) // B)):
            rows = order[i * B : (i + 1) * B]
            steps.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            steps.step()
    return model


def same(left, right):
    return all(left[k][name].tobytes() == right[k][name].tobytes() for k in SIZES for name in left[k] | right[k])


@pytest.mark.parametrize("rule", ["keep", "reset"])
def test_every_institution_trains_its_own_model_in_new_processes(start, shards, rule):
    models, recorder = start(f"optimizer-state={rule}")
    (pooled, own), right = recorder.last, 0
    for name, (x, y, test_x, test_y) in shards.items():
        model = twin(x, y, name, rule == "keep")
        for key, value in model.state_dict().items():
            np.testing.assert_allclose(models[name][key], value.numpy(), rtol=0, atol=1e-6, err_msg=f"{name} {key}")
        hits = int((model.eval()(test_x).argmax(1) == test_y).sum())
        assert own[name]["accuracy"] == pytest.approx(hits / len(test_y))
        right += hits
    assert pooled["accuracy"] == pytest.approx(right / sum(len(shard[3]) for shard in shards.values()))
    assert recorder.examples == 3 * (4 * B + 2 * B + 5)


def test_a_process_that_remembers_gives_the_same_bits(start):
    models, recorder = start()
    remembered, other = start(folder="other", forgetful=False)
    assert same(models, remembered)
    assert recorder.last == other.last


def test_a_run_that_broke_off_goes_on_with_the_same_bits(tmp_path, start, nodes):
    def run(name, overrides, stopping=()):
        grid = Grid(app, {"overrides": shlex.join(overrides)}, nodes(name))
        grid.stopping, grid.after = stopping, no_weights
        return execute(grid, compose(overrides), Display())[0]

    later, recorder = start()
    for k, where in enumerate([("train-own", "c", 3), ("evaluate-own", "b", 3)]):
        name = f"broken-{k}"
        with pytest.raises(KeyboardInterrupt):
            run(name, [*JOB, "rounds=3", "nodes=3", f"runs_dir={tmp_path}", f"run_name={name}"], [where])
        result = run(name, [*overrides_of(tmp_path / name / "config.yaml"), f"resume={tmp_path / name}"])
        assert same(later, models(tmp_path / name, (tmp_path / name / "run-id").read_text().strip()))
        assert result["final"] == {"global": recorder.last[0], "institutions": recorder.last[1]}
        assert result["examples-seen"] == recorder.examples


def test_who_has_not_trained_yet_has_nothing_to_evaluate(start):
    failing = [("train-own", "b", exchange) for exchange in (1, 2)]
    models, recorder = start(failing=failing, forgetful=False)
    reasons = [(failure["round"], failure["reason"]) for failure in recorder.failures]
    assert [exchange for exchange, _ in reasons] == [1, 1, 2, 2]
    assert all("has no model yet" in reason for _, reason in reasons[1::2])
    assert sorted(recorder.last[1]) == ["a", "b", "c"]  # the third round did
    alone = start(folder="other")[0]
    assert all(models[name][key].tobytes() == alone[name][key].tobytes() for name in "ac" for key in alone[name])
