"""One institution answers huge numbers, or a negative variance: it is named and left out, and the others go on."""

import shlex
import shutil
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Array
from grid import Grid

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose
from flwr_replay.errors import DivergedError
from flwr_replay.report.progress import Display
from flwr_replay.runs.execute import execute

DIGITS = ["task=digits", "partition.size=20", "model=cnn", "model.width=4", "batch_size=10"]
NUMBERS = ["task=diabetes", "model=mlp", "model.width=4", "batch_size=32"]
FEDREPLAY = ["strategy=fedreplay", "encoder_epochs=1"]
CULPRIT, FIRST = 3, 2  # node ids; the encoder is trained at the first


def run(folder, job, after=None, nodes=3, resume="", **script):
    overrides = [*job, "partition=iid", "device=cpu", "rounds=2", f"nodes={nodes}", f"runs_dir={folder}/runs"]
    grid = Grid.simulated(app, {"overrides": shlex.join(overrides)}, 3, state=f"{folder}/state")
    vars(grid).update(script, after=after)
    return execute(grid, replace(compose(overrides), resume=resume), Display())


def filled(stage, ending, value, node=CULPRIT):
    """Put a number into all arrays whose names end so in one institution's answers of a stage."""

    def after(grid, message, reply):
        if (grid.asked[-1].stage, message.metadata.dst_node_id) == (stage, node):
            record = reply.content["arrays"]
            for name in [name for name in record if name.endswith(ending)]:
                array = record[name].numpy()
                record[name] = Array(np.full_like(array, value))

    return after


@pytest.mark.parametrize(
    ("job", "lie", "reported"),
    [
        ([*DIGITS, "strategy=fedavg"], ("train", "running_var", -1), "variances, step counts and"),
        ([*DIGITS, "strategy=cwt"], ("train", "running_var", -1), "variances, step counts and"),
        ([*DIGITS, *FEDREPLAY], ("encode", "running_var", -1, FIRST), "variances, step counts and"),
        ([*DIGITS, *FEDREPLAY], ("encode", "weight", 1e6, FIRST), "an encoder whose latents of noise reach"),
        ([*DIGITS, *FEDREPLAY], ("extract", "latents", 1e20), "latents must be finite and at most 1e+06"),
        ([*DIGITS, *FEDREPLAY, "latent_dtype=int8"], ("extract", "scales", 1e20), "scales must be finite and at most"),
        ([*NUMBERS, *FEDREPLAY], ("extract", "labels", 1e20), "labels must be the task's"),
    ],
)
def test_its_sender_is_left_out(tmp_path, job, lie, reported):
    result, _ = run(tmp_path, job, filled(*lie))
    assert {failure["institution"] for failure in result["failures"]} == {f"institution-{[*lie, CULPRIT][3] - 1}"}
    assert all(reported in failure["reason"] for failure in result["failures"])
    assert all(np.isfinite(value) for own in result["final"]["institutions"].values() for value in own.values())


def test_a_union_that_cannot_be_trained_on_is_told_by_whose_latents_reach_furthest(tmp_path):
    job = [*NUMBERS, *FEDREPLAY]
    with pytest.raises(DivergedError, match=r"latents of institution-2 reach 1e.06, all others' [0-9.]+: .* resume"):
        run(tmp_path, job, filled("extract", "latents", 1e6))
    [stopped] = tmp_path.glob("runs/*")
    shutil.rmtree(stopped / "latents" / "institution-2")
    result, _ = run(tmp_path, job, nodes=2, resume=str(stopped), there=lambda grid: [2, 4])
    assert result["final"]["institutions"].keys() == {"institution-1", "institution-3"}
