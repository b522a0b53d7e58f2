"""Many institutions in one process: what they hold open and write, and that a run's files say the same as before."""

import os
import shutil
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from harness import Stopping

from flwr_replay.engines.inline import InlineGrid
from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import RunError
from flwr_replay.files.atomic import home
from flwr_replay.files.lines import each_line, read_lines
from flwr_replay.files.tensors import read_with_texts
from flwr_replay.institution.owner import Institution
from flwr_replay.memory import forget
from flwr_replay.report.progress import Display
from flwr_replay.report.run_files import write_of
from flwr_replay.report.summary import summary
from flwr_replay.runs.checkpoints import TakingPart
from flwr_replay.runs.options import resolve
from flwr_replay.server.members import Member, Members
from flwr_replay.server.recorder import Snapshot
from flwr_replay.state.store import proof_of
from flwr_replay.wire.ledger import Ledger, Traffic, ledger_lines
from flwr_replay.wire.payload import LedgerRow

NODES = 70  # more than have their examples in memory and their ledgers open
SMALL = ["task=digits", "partition=iid", "partition.size=10", "model=mlp", "model.width=4", "device=cpu"]


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    forget()


def ran(folder, *options, name="run", display=None):
    return run_inline([*SMALL, *options, f"runs_dir={folder}/runs", f"run_name={name}"], display or Display())


class Open(Display):
    """Notes how many institutions' ledgers this process has open."""

    most = 0

    def exchange(self, *progress):
        held = []
        for file in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # another thread has closed it meanwhile
                held.append(str(file.readlink()))
        self.most = max(self.most, sum(path.startswith(f"{home().resolve()}/state/") for path in held))


@pytest.mark.sampled(2, of="slow runs")
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system does not list open files")
def test_many_institutions_have_few_files_open_and_five_each_on_the_disk(tmp_path):
    display = Open()
    result, _ = ran(tmp_path, "strategy=fedavg", f"nodes={NODES}", "rounds=2", display=display)
    assert len(result["final"]["institutions"]) == NODES
    assert 0 < display.most <= 64
    files = Counter(path.name for path in home().rglob("*") if path.is_file())
    assert files == dict.fromkeys(
        ("ledger.jsonl", "ledger.begun", "identity.key", "options.json", "fingerprints.json", "tests"), NODES
    )


def test_a_simulations_institutions_do_not_wait_for_the_disk_and_a_deployments_do(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def noting(descriptor):
        synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    ran(tmp_path, "strategy=fedavg", "nodes=2", "rounds=1")
    assert synced
    assert not [path for path in synced if path.startswith(str(home()))]
    (tmp_path / "clinic").mkdir()
    proof_of(tmp_path / "clinic", "run-1")
    assert [path for path in synced if path.startswith(str(tmp_path / "clinic"))]


def test_in_process_one_request_is_there_at_a_time_with_the_same_bits(tmp_path, monkeypatch):
    pushed, push = [], InlineGrid.push_messages

    def noting(grid, messages):
        messages = list(messages)
        pushed.append(len(messages))
        return push(grid, messages)

    monkeypatch.setattr(InlineGrid, "push_messages", noting)
    _, alone = ran(tmp_path, "strategy=fedavg", "nodes=3", "rounds=2", name="one")
    assert {*pushed[1:]} == {1}  # after the roll call
    monkeypatch.setattr(InlineGrid, "at_once", None)
    _, all_ = ran(tmp_path, "strategy=fedavg", "nodes=3", "rounds=2", name="all")
    assert 3 in pushed[1:]
    model = Path("models") / "global.safetensors"
    assert (alone / model).read_bytes() == (all_ / model).read_bytes()
    lines = [Counter(map(str, read_lines(folder / "ledger.jsonl"))) for folder in (alone, all_)]
    assert lines[0] == lines[1]


def test_a_state_directory_that_was_removed_is_made_again(tmp_path):
    def state():
        return Institution("a", lambda: None, "cpu", state_root=tmp_path / "state").state

    state().rmdir()
    assert state().is_dir()
    (state() / ".ledger.jsonl.1.tmp").touch()
    assert (state() / ".ledger.jsonl.1.tmp").exists()  # swept once in a process, not with every message
    forget()
    assert not (state() / ".ledger.jsonl.1.tmp").exists()


# --- the run directory ------------------------------------------------------------------------------------------------


def test_checkpoints_of_visits_do_not_repeat_the_institutions(tmp_path):
    _, folder = ran(tmp_path, "strategy=cwt", "nodes=6", "rounds=3")
    rows = read_lines(folder / "members.jsonl")
    assert Counter(row["institution"] for row in rows) == {
        "institution-1": 3,  # it is the first to train, before the first checkpoint
        **{f"institution-{k}": 4 for k in range(2, 7)},  # once when it joins, once for each training
    }
    _, texts = read_with_texts(max((folder / "checkpoints").iterdir()))
    assert "proof" not in texts["values"]
    assert "bindings" not in texts["values"]


def test_a_run_that_breaks_off_goes_on_with_who_had_trained_by_its_checkpoint(tmp_path):
    options = ("strategy=cwt", "optimizer_state=keep", "nodes=5", "rounds=2")
    _, whole = ran(tmp_path, *options, name="whole")
    with pytest.raises(KeyboardInterrupt):
        ran(tmp_path, *options, name="broken", display=Stopping(3))
    folder = tmp_path / "runs" / "broken"
    checkpoint = folder / "checkpoints" / "000003.safetensors"
    checkpoint.unlink(missing_ok=True)  # what members.jsonl says of the third visit belongs to no checkpoint now
    _, resumed = run_inline(resolve([], "", str(folder))[0], Display())
    rows = [[{**row, "proof": ""} for row in read_lines(ran / "members.jsonl")] for ran in (whole, resumed)]
    assert rows[0] == rows[1]
    model = Path("models") / "global.safetensors"
    assert (whole / model).read_bytes() == (resumed / model).read_bytes()


def test_a_checkpoint_that_a_killed_process_could_not_remove_goes_when_the_run_resumes(tmp_path):
    _, folder = ran(tmp_path, "strategy=cwt", "nodes=2", "rounds=2")
    last = sorted((folder / "checkpoints").iterdir())
    shutil.copy(last[0], folder / "checkpoints" / "000001.safetensors")
    (folder / "result.json").unlink()
    run_inline(resolve([], "", str(folder))[0], Display())
    assert sorted((folder / "checkpoints").iterdir()) == last


def test_a_checkpoint_says_how_much_of_the_institutions_file_is_its_own(tmp_path):
    known = {"examples": {"a": 7, "b": 9}, "trained": {"b": 1}, "bindings": {"a": (2, "x"), "b": (3, "y")}}
    members = TakingPart(tmp_path)
    members.note(Snapshot(4, {}, {}, {}, known["trained"], known["examples"], None, known["bindings"]))
    members.close()
    size = (tmp_path / "members.jsonl").stat().st_size
    assert TakingPart(tmp_path).restore({"files": {"members.jsonl": (size, 0)}}) == known


def test_sums_of_bytes_are_those_of_the_ledger(tmp_path):
    ledger, traffic = Ledger(tmp_path), Traffic()
    messages = [
        (
            "up",
            [
                LedgerRow("latents", "per-sample", 90),
                LedgerRow("labels", "per-sample", 8),
                LedgerRow("n", "statistic", 8),
            ],
            500,
        ),
        ("up", [LedgerRow("arrays", "model", 40)], 700),  # no samples: the raw bytes are those of nothing
        ("down", [LedgerRow("arrays", "model", 40), LedgerRow("run", "instruction", 3)], None),
        ("up", [LedgerRow("answer", "not received", 0)], None),
    ]
    for direction, rows, raw in messages:
        about = {"round": 1, "institution": "a", "direction": direction, "stage": "s"}
        ledger.record(about, rows, raw)
        traffic.record(direction, rows, raw)
    ledger.close()
    read = Traffic(ledger_lines(tmp_path))
    assert traffic.by_kind == read.by_kind
    assert traffic.by_kind["up"] == {
        "per-sample": 98,
        "raw-bytes-they-stand-for": 500,
        "statistic": 8,
        "model": 40,
    }
    assert traffic.bytes == {"up": 146, "down": 43}


def test_lines_are_read_one_by_one(tmp_path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    each = each_line(path)
    assert next(each) == {"a": 1}
    with pytest.raises(RunError, match="line 2 is not"):
        next(each)


def test_members_are_in_the_order_of_names_whoever_joins_when():
    members, names = Members(), [f"{k:03d}" for k in np.random.default_rng(0).permutation(50)]
    for node, name in enumerate(names):
        members.add(Member(name, node, 5))
        assert members.names == sorted(names[: node + 1]) == [member.name for member in members]
    members.add(Member("007", names.index("007"), 5))
    assert [member.name for member in members.known] == sorted(names)


# --- the summary ------------------------------------------------------------------------------------------------------


def test_a_summary_of_many_shows_the_lowest_and_the_highest(tmp_path):
    result, folder = ran(tmp_path, "strategy=fedavg", "nodes=3", "rounds=1")
    names = [f"clinic-{k:02d}" for k in range(40)]
    result["final"]["institutions"] = {name: {"accuracy": k % 7 / 10 + k / 1000} for k, name in enumerate(names)}
    account = {"delta": 0.1, "mechanism": "DP-SGD", "proven": True}
    result["privacy"] = {name: {**account, "epsilon": 40.0 - k} for k, name in enumerate(names)}
    result["failures"] = [{"institution": name, "round": 1, "reason": "gone"} for name in names]
    (folder / "confusion.json").unlink()
    text = summary(result, folder)
    assert text.count("… 24 more are in result.json …") == 3
    assert "clinic-00: 0.0000" in text
    assert "clinic-34: 0.6340" in text
    assert "clinic-38: 0.3380" not in text
    assert "clinic-00: epsilon 40 at delta 0.1, DP-SGD" in text  # the largest is never left out
    assert "clinic-20: epsilon" not in text
    write_of(folder, "confusion.json", {"round": 1, "institutions": {}})
    few = {name: result["final"]["institutions"][name] for name in names[:16]}
    result |= {"final": {**result["final"], "institutions": few}, "privacy": {}, "failures": []}
    assert "more are in" not in summary(result, folder)
