"""Recorded messages: bit for bit, within a limit, whole or not there, their owner's only."""

import json
import os
import stat

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from harness import command, node_configs, run, write_shards

from flwr_replay.config.compose import compose
from flwr_replay.engines.simulate import Simulation
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.files.lines import read_lines
from flwr_replay.files.tensors import write_tensors
from flwr_replay.forecast.forecast import forecast
from flwr_replay.wire import recording as module
from flwr_replay.wire.recording import FOLDER, Recording, read_message
from flwr_replay.wire.records import array_record

ABOUT = {"round": 3, "institution": "a", "direction": "up", "stage": "extract"}
ARRAYS = {
    "half": np.array([[1.5, np.nan], [np.inf, -0.0]], np.float16),
    "codes": np.arange(-3, 3, dtype=np.int8).reshape(2, 3),
    "flags": np.array([True, False]),
    "count": np.array(7, np.int64),
}


def message(arrays, **scalars):
    return RecordDict({"arrays": array_record(arrays), "metrics": MetricRecord(scalars)})


def test_a_message_is_read_back_bit_for_bit(tmp_path):
    content = message(ARRAYS, loss=0.25, counts=[1, 2])
    content["config"] = ConfigRecord({"stage": "extract", "token": b"\x00\xff"})
    name = Recording(tmp_path / FOLDER, ("up",), 1).keep(ABOUT, content)
    message_read = read_message(tmp_path / FOLDER / name)
    assert message_read.about == ABOUT
    assert message_read.scalars == {"loss": 0.25, "counts": [1, 2], "stage": "extract", "token": "00ff"}
    assert message_read.arrays.keys() == ARRAYS.keys()
    for key, array in ARRAYS.items():
        assert (message_read.arrays[key].dtype, message_read.arrays[key].shape) == (array.dtype, array.shape)
        assert message_read.arrays[key].tobytes() == array.tobytes()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / FOLDER, tmp_path / FOLDER / name)}
    assert modes == {0o700, 0o600}


def test_an_array_that_is_not_as_it_says_is_kept_as_its_bytes(tmp_path):
    content = RecordDict({"arrays": ArrayRecord({"x": Array("float32", (9, 9), "numpy.ndarray", b"no array")})})
    name = Recording(tmp_path, ("up",), 1).keep(ABOUT, content)
    assert read_message(tmp_path / name).arrays["x"].tobytes() == b"no array"


def test_only_the_wanted_direction_is_kept_and_nothing_by_default(tmp_path):
    assert Recording(tmp_path / "up", ("up",), 1).keep({**ABOUT, "direction": "down"}, message(ARRAYS)) == ""
    assert Recording(tmp_path / "none", (), 1).keep(ABOUT, message(ARRAYS)) == ""
    assert not list(tmp_path.iterdir())
    assert compose([]).record == "none"


def test_what_does_not_fit_is_left_out_and_the_log_says_so_once(tmp_path, caplog):
    kilobyte = {"x": np.zeros(1000, np.uint8)}
    recording = Recording(tmp_path, ("up",), 0.0035)
    assert [bool(recording.keep(ABOUT, message(kilobyte))) for _ in range(4)] == [True, True, False, False]
    assert recording.summary()["messages"] == 2
    assert recording.summary()["left-out"] == 2
    assert caplog.text.count("record-mb=0.0035") == 1
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == recording.summary()["bytes"] <= 3500
    again = Recording(tmp_path, ("up",), 0.0035)  # after a restart
    assert not again.keep(ABOUT, message(kilobyte))


def test_a_resumed_recording_goes_on_after_the_last_message(tmp_path):
    first = Recording(tmp_path, ("up",), 1).keep(ABOUT, message(ARRAYS))
    second = Recording(tmp_path, ("up",), 1).keep(ABOUT, message(ARRAYS))
    assert (first[:8], second[:8]) == ("00000001", "00000002")


def test_two_processes_give_no_number_twice_though_the_clock_is_coarse(tmp_path, monkeypatch):
    """Before Linux 6.13 the time of a folder changes every 4 ms at most."""

    def in_the_same_tick(*words, **more):
        write_tensors(*words, **more)
        os.utime(tmp_path, (10**9, 10**9))

    monkeypatch.setattr(module, "write_tensors", in_the_same_tick)
    first, second = Recording(tmp_path, ("up",), 1), Recording(tmp_path, ("up",), 1)
    names = [recording.keep(ABOUT, message(ARRAYS))[:8] for recording in (first, second, first)]
    assert names == ["00000001", "00000002", "00000003"]


def test_a_damaged_message_is_named(tmp_path):
    name = Recording(tmp_path, ("up",), 1).keep(ABOUT, message(ARRAYS))
    data = bytearray((tmp_path / name).read_bytes())
    data[-1] ^= 1
    (tmp_path / name).write_bytes(data)
    with pytest.raises(RunError, match=f"{name} must be as it was written; it is damaged"):
        read_message(tmp_path / name)


JOB = [
    "strategy=cwt",
    "task=medmnist",
    "task.size=8",
    "classes=3",
    "model=mlp",
    "model.width=4",
    "rounds=1",
    "device=cpu",
    "seed=0",
]


@pytest.fixture
def hospitals(tmp_path):
    write_shards(tmp_path, {"a": 40, "b": 30})
    return tmp_path, node_configs(tmp_path, tmp_path / "state", "ab")


def test_every_ledger_line_names_its_message_at_the_server_and_at_the_institution(hospitals):
    folder, nodes = hospitals
    nodes[0] |= {"record": "true"}
    ran = run(folder, [*JOB, "record=all"], nodes, name="kept")
    kept = {path.name: read_message(path) for path in (ran.folder / FOLDER).glob("*.safetensors")}
    assert {line["message"] for line in ran.ledger} == kept.keys()
    for line in ran.ledger:
        about = {key: value for key, value in kept[line["message"]].about.items() if key != "of-run"}
        assert about.items() <= line.items()
    assert ran.result["recorded"]["messages"] == len(kept)
    own = read_lines(folder / "state" / "a" / "ledger.jsonl")
    uploads = [
        read_message(folder / "state" / "a" / FOLDER / name) for name in dict.fromkeys(x["message"] for x in own)
    ]
    received = [recording for name, recording in sorted(kept.items()) if recording.about["institution"] == "a"]
    received = [recording for recording in received if recording.about["direction"] == "up"]
    assert [upload.scalars for upload in uploads] == [recording.scalars for recording in received]
    for sent, came in zip(uploads, received, strict=True):
        assert {name: array.tobytes() for name, array in sent.arrays.items()} == {
            name: array.tobytes() for name, array in came.arrays.items()
        }
    assert not (folder / "state" / "b" / FOLDER).exists()


def test_a_run_that_is_broken_off_keeps_what_travelled_before(hospitals):
    folder, nodes = hospitals
    options = [*JOB, "record=up"]
    with pytest.raises(KeyboardInterrupt):
        run(folder, options, nodes, name="broken", stop_after=1)
    before = {path.name: path.read_bytes() for path in (folder / "runs" / "broken" / FOLDER).glob("*.safetensors")}
    ran = run(folder, options, nodes, resume=str(folder / "runs" / "broken"))
    after = {path.name: path.read_bytes() for path in (ran.folder / FOLDER).glob("*.safetensors")}
    assert before.items() < after.items()
    assert {line["message"] for line in ran.ledger if line["direction"] == "up"} == after.keys()
    assert "message" not in json.dumps([line for line in ran.ledger if line["direction"] == "down"])


def test_an_institution_may_refuse_and_its_own_wishes_are_checked(hospitals):
    folder, nodes = hospitals
    (folder / "policy.yaml").write_text("recording: false")
    nodes[0] |= {"policy": str(folder / "policy.yaml")}
    ran = run(folder, [*JOB, "record=up"], nodes, name="refused")
    assert "policy allows no run that keeps messages" in ran.result["failures"][0]["reason"]
    assert run(folder, JOB, nodes, name="none").result["failures"] == []
    for wrong in ({"record": "yes"}, {"record": "true", "record-mb": "0"}, {"record-mb": "much"}):
        nodes[1] |= {"record": "false", "record-mb": "9"} | wrong
        ran = run(folder, JOB, nodes, name=f"wrong-{len(wrong)}-{wrong.get('record-mb')}")
        assert ran.result["failures"][0]["reason"].startswith("ConfigError")


@pytest.mark.parametrize("option", ["record=everything", "record-mb=0", "record-mb=nan"])
def test_wrong_options_are_refused(option):
    with pytest.raises(ConfigError, match=option.partition("=")[0]):
        compose([option])


def test_forecast_and_summary_say_what_is_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path))
    options = ["strategy=fedavg", "task=digits", "nodes=2", "rounds=1", "model=mlp", "model.width=64", "record=up"]
    for words, message in (
        (["--dry-run"], "record=up keeps"),
        ([], f"to delete them: rm -r {tmp_path / 'run' / FOLDER}"),
    ):
        command(monkeypatch, "run", *options, "run_name=run", "--runs-dir", str(tmp_path), *words)
        out = " ".join(capsys.readouterr().out.split())  # lines may be wrapped
        assert message in out
        assert "patients' data" in out
    expected = sum(line.bytes for line in forecast(Simulation.of(compose(options))) if line.direction == "up")
    kept = [read_message(path) for path in (tmp_path / "run" / FOLDER).glob("*.safetensors")]
    assert sum(sum(array.nbytes for array in recording.arrays.values()) for recording in kept) == pytest.approx(
        expected, rel=0.2
    )
