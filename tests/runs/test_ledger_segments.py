"""A run's ledger is divided into segments: whoever reads it reads all of them, and a checkpoint vouches for each."""

import os
from collections import Counter
from threading import Event

import pytest
from harness import SHARDS, Stopping, node_configs, run, write_shards

from flwr_replay.check import check_strategy
from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import RunError
from flwr_replay.files.atomic import read_json
from flwr_replay.files.lines import segments
from flwr_replay.memory import forget
from flwr_replay.report.progress import Display
from flwr_replay.report.run_page import write_run_page
from flwr_replay.runs.checkpoints import Checkpoints
from flwr_replay.runs.options import resolve
from flwr_replay.wire import ledger
from flwr_replay.wire.ledger import ledger_lines

JOB = ["strategy=fedavg", "task=digits", "partition=iid", "partition.size=20", "model=mlp", "model.width=4", "nodes=2"]
VALUES = {"server-round": 1, "examples-seen": 1, "seconds": 1.0, "state": {}, "label-scale": None, "encoder": ""}


@pytest.fixture
def set_segment_bytes(tmp_path, monkeypatch):
    """Return a function that sets the bytes of a segment."""
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    return lambda size: monkeypatch.setattr(ledger, "SEGMENT", size)


def ran(folder, name, display=None):
    options = [*JOB, "rounds=4", "device=cpu", "record=up", f"runs_dir={folder}", f"run_name={name}"]
    return run_inline(options, display or Display())[1]


def counted_ledger_lines(folder):
    return Counter(str({**line, "message": ""}) for line in ledger_lines(folder))


def test_a_run_with_segments_is_killed_and_resumed_as_one_without(set_segment_bytes):
    set_segment_bytes(4096)
    check_strategy("fedavg", ["rounds=2"])


def test_all_segments_are_read(tmp_path, set_segment_bytes):
    whole = ran(tmp_path, "whole")
    set_segment_bytes(4096)
    with pytest.raises(KeyboardInterrupt):
        ran(tmp_path, "divided", Stopping(3))
    divided = tmp_path / "divided"
    closed = len(segments(divided / "ledger.jsonl"))
    run_inline(resolve([], "", str(divided))[0], Display())
    assert len(segments(divided / "ledger.jsonl")) > closed > 2
    assert counted_ledger_lines(whole) < counted_ledger_lines(divided)  # which has repeated messages, too
    sent = read_json(divided / "result.json")["bytes"]
    assert sum(line["bytes"] for line in ledger_lines(divided)) == sent["up"] + sent["down"]


def test_the_page_says_that_a_segment_is_missing(tmp_path, set_segment_bytes):
    set_segment_bytes(1500)
    folder = ran(tmp_path, "whole")
    assert "were sent" not in write_run_page(folder).read_text()
    (folder / "ledger-0002.jsonl").unlink()
    assert "were sent. So the table of what left the institutions is wrong" in write_run_page(folder).read_text()


@pytest.mark.parametrize("created", [False, True])
@pytest.mark.parametrize("whose", ["the server's", "an institution's"])
def test_a_ledger_that_is_renamed_in_mid_run_ends_what_it_records(tmp_path, monkeypatch, whose, created):
    write_shards(tmp_path, {"a": 30, "b": 30})
    nodes, place = node_configs(tmp_path, tmp_path / "state", "ab"), tmp_path / "runs" / "renamed"
    options = [*SHARDS, "classes=3", "strategy=cwt", "model=mlp", "model.width=4", "rounds=3", "device=cpu"]
    path = (place if whose == "the server's" else tmp_path / "state" / "a") / "ledger.jsonl"

    def exchange(self, *progress):
        if not (old := path.with_name("ledger.jsonl.1")).exists():
            path.rename(old)
            path.touch() if created else None

    monkeypatch.setattr(Stopping, "exchange", exchange)

    def going_on(**how):
        """Return why no more is recorded; empty: all is."""
        try:
            return ";".join(
                str(failure["reason"]) for failure in run(tmp_path, options, nodes, **how).result["failures"]
            )
        except RunError as error:
            return str(error)

    for how in ({"name": "renamed"}, {"resume": str(place)}):
        reasons = going_on(**how)
        assert (f"{path} must stay where it is" if whose == "the server's" else "RunError") in reasons
        assert not path.exists() or not path.stat().st_size
        forget()
    path.with_name("ledger.jsonl.1").rename(path)
    monkeypatch.undo()
    if whose == "the server's":
        assert going_on(resume=str(place)) == ""
    else:
        assert going_on(name="next") == ""


@pytest.mark.parametrize("damaged", ["ledger-0001.jsonl", "ledger-0002.jsonl"])
def test_a_checkpoint_vouches_for_each_segment(tmp_path, set_segment_bytes, damaged):
    """The second segment was still the current one when the checkpoint was written."""
    set_segment_bytes(100)
    growing = ledger.Ledger(tmp_path)
    for n in range(5):
        growing.append([{"line": "x" * 60, "n": n}])
        growing.flush()
        if n == 2:
            assert [segment.name for segment in segments(growing.path)] == ["ledger-0001.jsonl", "ledger.jsonl"]
            written = Checkpoints(tmp_path, ["ledger.jsonl"])
            written.write(1, {}, VALUES)
            written.close()
    growing.close()
    assert damaged in [segment.name for segment in segments(growing.path)[:-1]]
    assert Checkpoints(tmp_path, ["ledger.jsonl"]).read(print)
    content = (tmp_path / damaged).read_text()
    (tmp_path / damaged).write_text(content.replace("x", "y", 1))
    with pytest.raises(RunError, match=f"{damaged} must begin with the"):
        Checkpoints(tmp_path, ["ledger.jsonl"]).read(print)


def test_who_reads_a_ledger_that_is_divided_meanwhile_reads_all_lines(tmp_path, set_segment_bytes):
    set_segment_bytes(100)
    growing = ledger.Ledger(tmp_path)

    def add(*numbers):
        for n in numbers:
            growing.append([{"line": "x" * 100, "n": n}])
            growing.flush()

    add(0, 1, 2)
    reading = ledger_lines(tmp_path)
    assert next(reading)["n"] == 0
    add(3, 4)
    assert [line["n"] for line in reading] == [1, 2, 3, 4]
    growing.close()


@pytest.mark.parametrize("listed", [False, True], ids=["before they are listed", "after they are listed"])
def test_who_reads_a_ledger_while_another_process_divides_it_reads_all_lines(
    tmp_path, set_segment_bytes, monkeypatch, listed
):
    set_segment_bytes(100)
    growing = ledger.Ledger(tmp_path)

    def add(n):
        growing.append([{"line": "x" * 100, "n": n}])
        growing.flush()

    def meanwhile(path):
        monkeypatch.setattr(ledger, "segments", segments)
        files = segments(path) if listed else None
        add(1)
        return files or segments(path)

    add(0)
    monkeypatch.setattr(ledger, "segments", meanwhile)
    assert next(ledger_lines(tmp_path))["n"] == 0
    assert len(segments(growing.path)) == 2
    growing.close()


def test_tallies_go_on_over_segments(tmp_path, set_segment_bytes):
    """What one process has counted from checkpoint to checkpoint is what another counts at once."""
    set_segment_bytes(100)
    growing, counting = ledger.Ledger(tmp_path), Checkpoints(tmp_path, ["ledger.jsonl"])
    for n in range(7):
        growing.append([{"line": "x" * 60, "n": n}])
        growing.flush()
        if n % 3 == 0:
            counting.write(n + 1, {}, VALUES)
    counting.close()
    assert len(segments(growing.path)) == 4
    assert Checkpoints(tmp_path, ["ledger.jsonl"]).read(print)
    growing.close()


def test_what_a_checkpoint_counts_is_on_the_disk_before_it_though_the_ledger_is_divided_meanwhile(
    tmp_path, set_segment_bytes, monkeypatch
):
    set_segment_bytes(100)
    growing, counting, flushed, go = ledger.Ledger(tmp_path), Checkpoints(tmp_path, ["ledger.jsonl"]), [], Event()
    growing.append([{"line": "x" * 100}])
    growing.flush()
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.fstat(file).st_ino))
    counting.write(1, {}, VALUES, first=[go.wait])
    growing.append([{"line": "of the next segment"}])
    growing.flush()
    go.set()
    counting.wait()
    assert (tmp_path / "ledger-0001.jsonl").stat().st_ino in flushed
    growing.close()
    counting.close()
