"""Who looks at an institution's state, or cleans it, while other processes work there."""

import hashlib
import itertools
import json
import os
import shutil
import signal

import pytest
from harness import forked

from flwr_replay.deploy.coordinator import _bytes
from flwr_replay.errors import RunError
from flwr_replay.files.atomic import write_atomic
from flwr_replay.files.lines import segments
from flwr_replay.runs.listing import listed
from flwr_replay.state import kept as module
from flwr_replay.state.kept import kept, ledger_bytes, remove, retire

MODEL, LOOKS = "model-000001.safetensors", 500


@pytest.fixture
def state(tmp_path):
    (tmp_path / "runs" / "run").mkdir(parents=True)
    for file in ("ledger.jsonl", "runs/run/config.yaml"):
        (tmp_path / file).touch()
    return tmp_path


def write_on(state):
    for exchange in itertools.count():
        for folder in (state / "runs" / "run", state / "messages"):
            write_atomic(folder / f"{exchange % 3}.safetensors", b"x", to_disk=False)
        for n in range(9):
            (state / "runs" / "run" / f"latents-{n}").mkdir()
        for n in range(9):
            shutil.rmtree(state / "runs" / "run" / f"latents-{n}")


def test_files_that_come_and_go_meanwhile_are_no_error(state):
    (state / "messages").mkdir()
    child = forked(write_on, state)
    try:
        while len(list((state / "messages").iterdir())) < 3:
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
        for _ in range(LOOKS):
            for look in (kept, ledger_bytes, _bytes):
                look(state)
            listed(state / "runs" / "run")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_ledger_whose_first_segment_is_closed_meanwhile_is_found(state, monkeypatch):
    def closed_meanwhile(path):
        files = segments(path)
        path.rename(path.with_name("ledger-0001.jsonl"))
        return files

    monkeypatch.setattr(module, "segments", closed_meanwhile)
    assert [of.run for of in kept(state)] == ["run"]


def test_what_a_killed_process_was_writing_goes_too(state):
    left = state / "runs" / "run" / f".{MODEL}.123.tmp"
    left.touch()
    remove(state, ["run"])
    assert not left.exists()


def test_what_a_message_keeps_just_before_its_run_is_removed_goes_too(state, monkeypatch):
    def kept_before(path, data):
        write_atomic(path.parent / MODEL, b"late")
        write_atomic(path, data)

    monkeypatch.setattr(module, "write_atomic", kept_before)
    remove(state, ["run"])
    assert kept(state)[0].removed
    assert not (state / "runs" / "run" / MODEL).exists()


def test_who_leaves_for_good_keeps_what_shows_what_has_left_and_nothing_else(tmp_path):
    state, receipt = tmp_path / "north", tmp_path / "receipt"
    files = {
        "ledger.jsonl": b"{}\n",
        "evidence.html": b"signed",
        "identity.key": b"secret",
        "decoded/a.images": b"patients",
        "messages/000001.safetensors": b"weights",
        "runs/r/privacy.jsonl": b"charges",
        "runs/r/options.json": b"{}",
        "runs/r/model-000001.safetensors": b"private",
    }
    for name, content in files.items():
        (state / name).parent.mkdir(parents=True, exist_ok=True)
        (state / name).write_bytes(content)
    with pytest.raises(RunError, match="a receipt is a new folder outside"):
        retire(state, state / "receipt")
    assert {name: (state / name).read_bytes() for name in files} == files
    retire(state, receipt)
    assert not state.exists()
    left = {file.relative_to(receipt).as_posix(): file.read_bytes() for file in receipt.rglob("*") if file.is_file()}
    told = json.loads(left.pop("receipt.json"))
    evidence = {"ledger.jsonl", "evidence.html", "runs/r/privacy.jsonl", "runs/r/options.json"}
    assert {name: content for name, content in left.items() if name in files} == {n: files[n] for n in evidence}
    assert told["kept"] == {name: hashlib.sha256(content).hexdigest() for name, content in left.items()}
    assert told["removed"].keys() == files.keys() - evidence
    with pytest.raises(RunError, match="an institution's state directory"):
        retire(tmp_path, tmp_path / "other")


def test_a_receipt_that_cannot_be_written_leaves_the_state(tmp_path, monkeypatch):
    state = tmp_path / "north"
    (state / "runs" / "r").mkdir(parents=True)
    (state / "ledger.jsonl").write_bytes(b"{}\n")
    monkeypatch.setattr(module, "write_json", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        retire(state, tmp_path / "receipt")
    assert (state / "ledger.jsonl").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["north"]
