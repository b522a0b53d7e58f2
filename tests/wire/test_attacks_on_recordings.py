"""Attacks on recordings: messages made to overfill a disk, or to be unreadable."""

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict

from flwr_replay.wire import recording as module
from flwr_replay.wire.recording import Recording, read_message
from flwr_replay.wire.records import array_record

ABOUT = {"round": 3, "institution": "a", "direction": "up", "stage": "extract"}
KILOBYTE = {"x": np.zeros(1000, np.uint8)}


def arrays(weights):
    return RecordDict({"arrays": array_record(weights)})


def bytes_in(folder):
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        arrays({"😀" * 1000: np.zeros(1)}),
        RecordDict({"config": ConfigRecord({"text": "\\" * 3000})}),
        RecordDict({"config": ConfigRecord({"text": '"' * 3000})}),
        RecordDict({"config": ConfigRecord({"é" * 1000: 1})}),
        arrays({f"{i:02}": np.zeros((1,) * 64) for i in range(12)}),
    ],
    ids=["array's name", "backslashes", "quotes", "scalar's name", "axes"],
)
def test_what_is_longer_in_a_file_than_in_a_message_counts_as_in_the_file(tmp_path, content):
    whole = Recording(tmp_path / "whole", ("up",), 1)
    assert whole.keep(ABOUT, content)
    assert bytes_in(tmp_path / "whole") == whole.bytes
    small = Recording(tmp_path / "small", ("up",), (whole.bytes - 1) / 1e6)
    assert small.keep(ABOUT, content) == ""
    assert bytes_in(tmp_path / "small") == 0


def test_two_processes_together_keep_within_the_limit(tmp_path):
    first, second = (Recording(tmp_path, ("up",), 0.0045) for _ in range(2))
    kept = [recording.keep(ABOUT, arrays(KILOBYTE)) for _ in range(3) for recording in (first, second)]
    assert [bool(name) for name in kept] == [True, True, True, False, False, False]
    assert bytes_in(tmp_path) <= 4500
    assert first.bytes == second.bytes == bytes_in(tmp_path)


def test_messages_that_were_removed_meanwhile_make_room(tmp_path):
    recording = Recording(tmp_path, ("up",), 0.002)
    name = recording.keep(ABOUT, arrays(KILOBYTE))
    assert recording.keep(ABOUT, arrays(KILOBYTE)) == ""
    (tmp_path / name).unlink()
    assert recording.keep(ABOUT, arrays(KILOBYTE)) > name


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800"])
def test_a_name_that_no_file_can_have_makes_no_message_unreadable(tmp_path, name):
    kept = Recording(tmp_path, ("up",), 1).keep(ABOUT, arrays({name: np.arange(3), "x": np.arange(2)}))
    arrays_read = read_message(tmp_path / kept).arrays
    assert arrays_read.keys() == {repr(name), "x"}
    assert arrays_read[repr(name)].tolist() == [0, 1, 2]


def test_a_header_that_no_reader_takes_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LONGEST", 2000)
    recording = Recording(tmp_path, ("up",), 1)
    assert recording.keep(ABOUT, arrays({"x" * 2000: np.zeros(1)})) == ""
    assert recording.keep(ABOUT, arrays(KILOBYTE))
    assert recording.summary()["left-out"] == 1
