"""SynCentral: the server trains on synthetic images only, as a plain loop over all buffers does."""

import json
import re

import numpy as np
import pytest
import torch
from harness import json_lines, node_configs, run, write_shards
from safetensors.numpy import load_file
from torch.nn.functional import cross_entropy

from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError
from flwr_replay.models.zoo import backbone
from flwr_replay.rng import derived_seed
from flwr_replay.strategies.syncentral import SynCentral

SIZES = {"a": 40, "b": 33, "c": 20}
JOB = ["task=medmnist", "task.size=8", "classes=3", "model=cnn", "model.width=4", "model.norm=group", "device=cpu"]
JOB += ["generator.width=4", "generator.epochs=1", "prior.width=4", "prior.layers=1", "prior.epochs=1"]
JOB += ["strategy=syncentral", "buffer=20", "batch_size=16", "lr=0.05", "rounds=2"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("hospitals")
    write_shards(folder, SIZES)
    return run(folder, JOB, node_configs(folder, folder / "state"))


def test_the_server_trains_on_the_union_of_all_buffers(ran):
    config = compose(JOB)
    model = backbone(config.model, config.task)(derived_seed(0, "model"))
    buffers = [load_file(file) for file in sorted((ran.folder / "buffers").glob("*.safetensors"))]
    x, y = (torch.from_numpy(np.concatenate([buffer[key] for buffer in buffers])) for key in ("images", "labels"))
    assert x.shape == (60, 1, 8, 8)
    steps = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for exchange in (1, 2):
        order = torch.randperm(60, generator=torch.Generator().manual_seed(derived_seed(0, "server", exchange)))
        for i in range(60 // 16):
            rows = order[i * 16 : (i + 1) * 16]
            steps.zero_grad()
            cross_entropy(model(x[rows] / 255), y[rows]).backward()
            steps.step()
    weights = load_file(ran.folder / "models" / "global.safetensors")
    for key, value in model.state_dict().items():
        np.testing.assert_allclose(weights[key], value.numpy(), rtol=0, atol=1e-6, err_msg=key)
    assert ran.result["examples-seen"] == 2 * 3 * 16


def test_nothing_but_synthetic_images_goes_up_and_each_once(ran):
    up = [row for row in ran.ledger if row["direction"] == "up" and row["kind"] not in ("statistic", "notice")]
    assert sorted((row["institution"], row["field"]) for row in up) == [
        (k, f) for k in "abc" for f in ("images", "labels")
    ]
    assert {row["kind"] for row in up} == {"synthetic"}


def test_a_loss_that_no_picture_can_show_costs_its_sender_only(tmp_path):
    def after(grid, message, reply):
        if grid.asked[-1][:2] == ("train-piece", "a"):
            reply.content["metrics"]["loss"] = 1.7e308
        return reply

    write_shards(tmp_path, SIZES)
    ran = run(tmp_path, JOB, node_configs(tmp_path, tmp_path / "state"), after=after)
    assert {failure["institution"] for failure in ran.result["failures"]} == {"a"}
    assert all("TrainedPiece.loss must be float, finite" in failure["reason"] for failure in ran.result["failures"])
    assert {row["institution"] for row in json_lines(ran.folder / "generator.jsonl")} == {"b", "c"}


def test_a_picture_that_cannot_be_drawn_costs_no_result(tmp_path, caplog):
    """As in a run whose losses an older version has taken, and when it is resumed."""

    def after(grid, message, reply):
        losses = next((tmp_path / "runs").glob("*/generator.jsonl"), None)
        if losses and "1.7e308" not in losses.read_text():
            losses.write_text(3 * re.sub('"loss": [^,}]*', '"loss": 1.7e308', losses.read_text()))
        return reply

    write_shards(tmp_path, SIZES)
    ran = run(tmp_path, JOB, node_configs(tmp_path, tmp_path / "state"), after=after)
    assert (ran.folder / "models" / "global.safetensors").exists()
    [line] = [line for line in caplog.messages if "is not written" in line]
    assert line.startswith(f"{ran.folder / 'generator.png'} is not written, all results are: ")
    assert json.loads((ran.folder / "result.json").read_text())["rounds"] == 2


def test_without_a_generator_it_is_refused():
    with pytest.raises(ConfigError, match="SynCentral needs a generator"):
        SynCentral()
