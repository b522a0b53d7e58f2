"""FedReplay's uploads: of whatever form they are, and however many institutions there are."""

import resource
import shlex

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from grid import Grid
from harness import SHARDS, node_configs, write_shards

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.errors import RunError, WireError
from flwr_replay.learning.latents import LatentStore
from flwr_replay.payloads.fedreplay import Latents
from flwr_replay.report.progress import Display
from flwr_replay.runs.execute import execute
from flwr_replay.server import uploads
from flwr_replay.wire.records import arrays_in

JOB = [*SHARDS, "classes=3", "model=cnn", "model.width=4", "batch_size=16", "device=cpu"]
FEDREPLAY = [*JOB, "strategy=fedreplay", "encoder=random", "rounds=2"]


def run(folder, *options, lie=None, names="abc"):
    """Return the result, its directory, and how many uploads waited to be fetched at once."""
    write_shards(folder, dict.fromkeys(names, 40))
    overrides = [*FEDREPLAY, f"nodes={len(names)}", f"runs_dir={folder / 'runs'}", *options]
    grid = Grid(app, {"overrides": shlex.join(overrides)}, node_configs(folder, folder / "state", names))
    waiting = [0]

    def uploaded(grid, message, reply):
        if grid.asked[-1].stage == "extract":
            waiting.append(len(grid._replies) + 1)
        if lie and grid.asked[-1][:2] == ("extract", "a"):  # the first institution by name
            numbers, arrays = reply.content["metrics"], arrays_in(reply.content)
            lie(numbers, arrays)
            reply.content["arrays"] = ArrayRecord({key: Array(np.asarray(array)) for key, array in arrays.items()})

    grid.after = uploaded
    result, path = execute(grid, compose(overrides), Display())
    return result, path, max(waiting)


def grown(rows):
    def lie(numbers, arrays):
        numbers["total"] = rows

    return lie


def reshaped(numbers, arrays):
    arrays["latents"] = arrays["latents"][:, :, :2]


def doubled(numbers, arrays):
    arrays["latents"] = arrays["latents"].astype(np.float16)


def widened(numbers, arrays):
    arrays["labels"] = arrays["labels"] + 3


def endless(numbers, arrays):
    arrays["latents"] = np.full_like(arrays["latents"], np.inf)


@pytest.mark.parametrize(
    ("lie", "reported"),
    [
        (grown(10**9), "examples times views rows; a announces 1000000000"),
        (grown(10**13), "examples times views rows; a announces 10000000000000"),
        (reshaped, "must have shapes ((4, 4, 4), ()); got ((4, 2, 4), ())"),
        (doubled, "latents must be float32, as asked for; got float16"),
        (widened, "labels must be the task's"),
        (endless, "latents must be finite"),
    ],
)
def test_an_upload_that_cannot_be_leaves_no_file_and_spoils_nothing(tmp_path, lie, reported):
    result, path, _ = run(tmp_path, lie=lie)
    assert {failure["institution"] for failure in result["failures"]} == {"a"}
    assert all(reported in failure["reason"] for failure in result["failures"])
    assert sorted(folder.name for folder in (path / "latents").iterdir()) == ["b", "c"]


def test_what_the_server_holds_does_not_grow_with_the_institutions(tmp_path, monkeypatch):
    final = {}
    for at_once, under_way in ((2, 128e6), (6, 1e12)):
        monkeypatch.setattr(uploads, "UNDER_WAY", under_way)
        (folder := tmp_path / str(at_once)).mkdir()
        _, path, most = run(folder, "chunk_mb=50", names="fedcba")
        assert most == at_once
        final[at_once] = (path / "models" / "global.safetensors").read_bytes()
    assert final[2] == final[6]


def test_a_disk_that_is_full_is_one_line_and_the_upload_goes_on_where_it_was(tmp_path):
    rows = np.ones((64, 4096), np.float32)

    def chunk(first):
        labels, numbers = np.zeros(64, np.int64), {"num_examples": 128, "raw_bytes": 1}
        return Latents(latents=rows, labels=labels, first=first, total=128, **numbers)

    store = LatentStore(tmp_path)
    store.add("a", chunk(0))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (rows.nbytes + 5000, limits[1]))
    try:
        with pytest.raises(RunError, match=r"latents\.npy must be written; File too large"):
            store.add("a", chunk(64))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert LatentStore(tmp_path).next_row("a") == 64
    store.add("a", chunk(64))
    assert store.complete == ["a"]
    assert store._open("a")["latents"].tobytes() == rows.tobytes() * 2


def test_rows_of_one_upload_have_one_form(tmp_path):
    store, numbers = LatentStore(tmp_path), {"num_examples": 4, "raw_bytes": 1, "total": 4}
    labels = np.zeros(2, np.int64)
    store.add("a", Latents(latents=np.ones((2, 3), np.float32), labels=labels, first=0, **numbers))
    with pytest.raises(WireError, match="must keep their form"):
        store.add("a", Latents(latents=np.ones((2, 5), np.float32), labels=labels, first=2, **numbers))


def foreign(lie):
    """Return an app of somebody's own, one node of which lies."""
    other = ClientApp()

    def answered(message, **metrics):
        content = RecordDict({"metrics": MetricRecord(metrics)})
        if message.metadata.message_type == "train":
            content["arrays"] = ArrayRecord(dict(message.content["arrays"].items()))
        if message.metadata.dst_node_id == 3:
            lie(content)
        return Message(content, reply_to=message)

    @other.train()
    def train(message, context):
        return answered(message, **{"num-examples": 3, "train-loss": 0.5})

    @other.evaluate()
    def evaluate(message, context):
        return answered(message, **{"num-examples": 3, "error": 0.25})

    return other


def metric(name, value):
    def lie(content):
        content["metrics"][name] = value

    return lie


def renamed(content):
    if "arrays" in content:
        content["arrays"] = ArrayRecord({f"x{name}": array for name, array in content["arrays"].items()})


@pytest.mark.parametrize(
    ("lie", "times", "reported"),  # once for its training, once for its evaluation
    [
        (metric("num-examples", float("nan")), 2, "num-examples must be a whole number from 1 to"),
        (metric("num-examples", 10**12), 2, "num-examples must be a whole number from 1 to"),
        (metric("num-examples", 2.5), 2, "num-examples must be a whole number from 1 to"),
        (metric("num-examples", [1, 2]), 2, "num-examples must be a whole number from 1 to"),
        (metric("num-steps", -1), 1, "num-steps must be a whole number from 0 to"),
        (metric("train-loss", float("inf")), 1, "train-loss must be a number of at most"),
        (metric("error", float("nan")), 1, "metrics, all finite"),
        (renamed, 1, "weights must come back as they were sent"),
    ],
)
@pytest.mark.parametrize("strategy", ["fedavg", "cwt"])
def test_an_app_of_ones_own_answers_what_can_be_or_is_left_out(tmp_path, strategy, lie, times, reported):
    overrides = ["task=digits", "model=mlp", "model.width=4", f"strategy={strategy}", "nodes=3", "rounds=1"]
    overrides += [f"runs_dir={tmp_path}", "partition.size=20"]
    grid = InlineGrid.simulated(foreign(lie), {"overrides": shlex.join(overrides)}, 3)
    result, _ = execute(grid, compose(overrides), Display())
    assert {failure["institution"] for failure in result["failures"]} == {"3"}
    assert sum(reported in failure["reason"] for failure in result["failures"]) == times
    assert result["final"]["global"] == {"error": 0.25}
