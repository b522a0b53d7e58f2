"""replay=buffer: what crosses how often, who replays whom, and what is refused."""

import numpy as np
import pytest
import torch
from harness import node_configs, run, write_shards

from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError, FlwrReplayError, RunError
from flwr_replay.files.tensors import read_tensors
from flwr_replay.generators.sampler import ImageSampler
from flwr_replay.runs.execute import Job
from flwr_replay.wire.records import config_in

SIZES = {"a": 40, "b": 33, "c": 20}
TASK = ["task=medmnist", "task.size=8", "classes=3", "model=mlp", "model.width=4", "batch_size=16", "lr=0.05"]
TINY = ["generator.width=4", "generator.codes=8", "generator.dim=4", "generator.epochs=1"]
TINY += ["prior.width=4", "prior.layers=1", "prior.epochs=1", "device=cpu"]
JOB = [*TASK, *TINY, "rounds=2", "replay=buffer", "replay.images=6"]
SYNCENTRAL = ("strategy=syncentral", "replay=none", "strategy.buffer=6")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("hospitals")
    write_shards(folder, SIZES)
    return folder


@pytest.fixture
def start(folder, tmp_path):
    """Run the small job at the three institutions."""

    def start(*options, **more):
        return run(folder, [*JOB, *options], node_configs(folder, tmp_path / "state"), **more)

    return start


def asked_of(ran, stage):
    return [asked for asked in ran.grid.asked if asked.stage == stage]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["fedavg", "cwt", "splitnn", "fedsgd"])
def test_a_buffer_goes_up_once_and_to_every_other_institution_once(start, strategy):
    ran = start(f"strategy={strategy}")
    assert not ran.result["failures"]
    assert len(asked_of(ran, "draw-buffer")) == 3
    assert len(asked_of(ran, "keep-buffer")) == 6
    assert "per-sample" not in {row["kind"] for row in ran.ledger} or strategy == "splitnn"


def test_every_batch_holds_images_of_the_others_buffers_and_none_of_ones_own(start, monkeypatch):
    take, taken = ImageSampler.take, []

    def watched(sampler, rows):
        taken.append((sampler.images.clone(), len(rows)))
        return take(sampler, rows)

    monkeypatch.setattr(ImageSampler, "take", watched)
    ran = start("strategy=fedavg", "rounds=1", "replay.ratio=0.5")
    assert {size for _, size in taken} == {8}
    assert {len(images) for images, _ in taken} == {12}
    buffers = [read_tensors(path)["images"] for path in sorted((ran.folder / "buffers").iterdir())]
    seen = {images.numpy().tobytes() for images, _ in taken}
    assert seen == {np.concatenate([buffers[i], buffers[j]]).tobytes() for i, j in ((0, 1), (0, 2), (1, 2))}


def test_an_institution_that_cannot_draw_is_said_to_be_missing_and_the_run_stops(start):
    failing = tuple(("draw-buffer", "b", at) for at in (1, 2, 3, 4))
    with pytest.raises(RunError, match="b is not replayed"):
        start("strategy=fedavg", failing=failing)
    ran = start("strategy=fedavg", "replay.missing=say", failing=failing)
    assert ran.result["replay-lacks"] == {"b": "is not replayed"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["strategy=local"], "replay is for serial and parallel methods"),
        (["strategy=feder"], "replay is for serial and parallel methods"),
        (
            ["strategy=fedavg", "dp=classifier"],
            r"synthetic images .* no epsilon: choose dp=generator\+prior\+classifier",
        ),
        (["strategy=fedavg", "dp=end-to-end"], "choose generator.codebook=gradient"),
        (["strategy=fedavg", "replay.images=0"], r"replay\.images"),
        (["strategy=fedavg", "task=diabetes"], "has tables"),
        (["strategy=fedavg", "task=isbi2012", "model=unet"], "is a segmentation"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, says):
    task = TASK if not any(option.startswith("task=") for option in options) else []
    with pytest.raises(ConfigError, match=says):
        Job.of(compose([*task, "replay=buffer", *options]))


@pytest.mark.parametrize(
    ("options", "wrong", "says"),
    [
        (("strategy=fedavg",), {"buffer": 7}, r"replay\.images is 6, it asks for 7"),
        (("strategy=fedavg",), {"buffer-refresh": "round", "server-round": 5}, "buffer-refresh is 'never'"),
        (SYNCENTRAL, {"buffer": 7}, r"strategy\.buffer is 6, it asks for 7"),
        (SYNCENTRAL, {"buffer-refresh": "round", "server-round": 5}, r"strategy\.buffer-refresh is 'never'"),
    ],
)
def test_a_server_gets_no_other_images_than_the_run_says(start, options, wrong, says):
    def more(grid, message):
        config = config_in(message.content)
        if config.get("stage") == "draw-buffer":
            message.content["config"].update(wrong)

    with pytest.raises(FlwrReplayError, match=f"a server asks for what its run says; {says}"):
        start(*options, before=more)


@pytest.mark.parametrize("wrong", [{"buffers": [1, 99]}, {"replayed": 5}, {"buffers": []}])
def test_what_an_institution_does_not_hold_as_the_server_says_is_not_trained_on(start, wrong):
    def spoil(grid, message):
        if config_in(message.content).get("stage") == "train":
            message.content["config"].update(wrong)

    with pytest.raises(FlwrReplayError):
        start("strategy=fedavg", "rounds=1", before=spoil)


def test_a_run_whose_others_left_before_they_drew_stops(start):
    """One institution is left in the last round, and knows of others that nobody replays."""

    def fail(grid, message):
        stage, name = config_in(message.content).get("stage"), grid.name_of(message.metadata.dst_node_id)
        if stage == "draw-buffer" and name != "a":
            message.content["config"]["buffer"] = 7  # another number than the run's: refused

    def there(grid):
        return [node for node in grid.contexts if grid.looks < 4 or grid.name_of(node) == "a"]

    with pytest.raises(RunError, match="is not replayed"):
        start("strategy=fedavg", before=fail, there=there)
