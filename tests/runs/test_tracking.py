"""Trackers: what they are told is what the run wrote down, once, and nothing in the run changes by it."""

import json
import logging
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
from deployed import until

from flwr_replay import run
from flwr_replay.cli.main import app
from flwr_replay.config.compose import compose
from flwr_replay.errors import ConfigError
from flwr_replay.runs.tracking import TRACKERS, TensorBoard, Tracking
from flwr_replay.studies.cells import A_RUN_WRITES
from flwr_replay.terminal import installing

TINY = {"strategy": "cwt", "partition.size": 60, "nodes": 2, "rounds": 2, "model.width": 4, "run_name": "x"}


@pytest.fixture(scope="module")
def untracked_run(tmp_path_factory):
    """Return a run without a tracker."""
    place = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLWR_REPLAY_HOME", str(place / "home"))
        yield run(TINY, runs_dir=place)


@pytest.fixture(autouse=True)
def tracking_home(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)


def written(folder):
    """Return what the run wrote: by name as a tracker has it, (round, value) in order."""
    values = {}
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        name = f"{row['institution']}/{row['metric']}" if row["institution"] else row["metric"]
        values.setdefault(name, []).append((row["round"], pytest.approx(row["value"], rel=1e-6)))
    return values


def in_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    seen = EventAccumulator(str(folder / "tensorboard"), purge_orphaned_data=False).Reload()
    return {name: [(e.step, e.value) for e in seen.Scalars(name)] for name in seen.Tags()["scalars"]}


def in_mlflow(folder):
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    [logged] = client.search_runs([client.get_experiment_by_name("flwr-replay").experiment_id])
    assert (logged.info.status, logged.info.run_name) == ("FINISHED", "x")
    assert logged.data.params["strategy.name"] == "cwt"
    assert not {"runs_dir", "task.data_dir", "resume"} & logged.data.params.keys()
    names = logged.data.metrics
    return {name: [(m.step, m.value) for m in client.get_metric_history(logged.info.run_id, name)] for name in names}


def records(file):
    """Yield the records of a .wandb file: LevelDB's log format, in blocks of 32 kB, after seven bytes."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record, at = record + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # a whole one, or the last part
            yield record
            record = b""


def in_wandb(folder):
    from wandb.proto.wandb_internal_pb2 import Record

    values, ids = {}, set()
    for file in sorted((folder / "wandb").glob("offline-run-*/*.wandb")):
        for data in records(file):
            record = Record.FromString(data)
            ids |= {record.run.run_id} - {""}
            assert record.run.host in ("", "flwr-replay")
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            for name in items.keys() - {name for name in items if name.startswith("_")}:
                values.setdefault(name, []).append((record.history.step.num, float(items[name])))
        for own in (str(folder), sys.executable):
            assert own.encode() not in file.read_bytes()
    assert len(ids) == 1
    return values


READ = {"tensorboard": in_tensorboard, "mlflow": in_mlflow, "wandb": in_wandb}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_is_told_all_once_also_of_a_resumed_run(tracker, untracked_run, tmp_path):
    first = run(TINY, tracking=tracker, runs_dir="runs")
    assert (first.folder / "models" / "global.safetensors").read_bytes() == (
        untracked_run.folder / "models" / "global.safetensors"
    ).read_bytes()
    assert first.result["final"] == untracked_run.result["final"]
    (first.folder / "result.json").unlink()  # as if it had been killed before its end
    more = run(resume=first.folder, rounds=3)
    with suppress(AssertionError):  # W&B's own process may still write when its `finish` has returned
        until(lambda: READ[tracker](more.folder) == written(more.folder), 20, str)
    assert READ[tracker](more.folder) == written(more.folder)
    assert more.result["rounds"] == 3
    assert all(A_RUN_WRITES.fullmatch(path.name) for path in more.folder.iterdir() if path.name != "result.json")


def test_a_run_that_lost_its_last_exchange_tells_no_point_twice(untracked_run, tmp_path):
    folder, config = tmp_path / "run", replace(compose([]), tracking="tensorboard", run_name="x")
    shutil.copytree(untracked_run.folder, folder)
    history = [(2, {"accuracy": 0.5}, {}), (4, {"accuracy": 0.6}, {})]
    for known in (history, history[:1], history):  # the second time from the checkpoint before
        tracking = Tracking(config, folder)
        tracking.tell(known, 2, {})
        tracking.close(True)
    assert in_tensorboard(folder) == {"accuracy": [(1, pytest.approx(0.5)), (2, pytest.approx(0.6))]}


@pytest.mark.parametrize("moment", ["open", "tell", "close"])
def test_a_tracker_that_fails_is_given_up_with_one_warning(moment, untracked_run, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # where no server is
    caplog.set_level(logging.WARNING, "flwr")
    tracker = "mlflow"
    if moment != "open":
        tracker = "tensorboard"

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(TensorBoard, moment, full)
    ended = run(TINY, tracking=tracker, runs_dir="runs")
    assert ended.result["final"] == untracked_run.result["final"]
    assert [line for line in caplog.messages if "stops, and the run goes on" in line] == caplog.messages
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_missing_package_is_said_before_anything_is_written(tracker, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [place for place in sys.path if "site-packages" not in place])
    monkeypatch.delitem(sys.modules, tracker, raising=False)
    with pytest.raises(ConfigError, match=rf"tracking={tracker} needs .* {re.escape(installing(tracker))}"):
        app(["run", "task=digits", f"tracking={tracker}", "--runs-dir", "runs"], standalone_mode=False)
    assert not (tmp_path / "runs").exists()
