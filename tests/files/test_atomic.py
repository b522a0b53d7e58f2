"""Files and folders: for their owner only, whole or not at all on a full disk, and no leftovers of who was killed."""

import errno
import fcntl
import json
import os
import resource
import signal
import stat
import tempfile
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from harness import forked
from replay_runs import GENERATOR

from flwr_replay.config.compose import compose
from flwr_replay.engines.inline import InlineGrid
from flwr_replay.engines.simulate import run_inline
from flwr_replay.errors import RunError
from flwr_replay.files import atomic
from flwr_replay.files.atomic import (
    alone,
    in_use,
    make_folder,
    private_folder,
    read_json,
    sweep,
    sync,
    tighten,
    write_atomic,
    write_json,
)
from flwr_replay.files.disk import lock
from flwr_replay.files.lines import Lines, read_lines
from flwr_replay.files.tensors import write_tensors
from flwr_replay.institution.owner import Institution
from flwr_replay.report.progress import Display
from flwr_replay.runs import opening
from flwr_replay.runs.opening import open_run
from flwr_replay.runs.options import resolve
from flwr_replay.wire.records import config_in

SMALL = ["model=mlp", "model.width=4", "nodes=2", "rounds=1", "device=cpu"]


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


@contextmanager
def disk_full_beyond(size):
    """Let no file grow beyond a size, as a full disk does, but for an error of its own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def open_to_others(folder):
    paths = [path for path in (folder, *folder.rglob("*")) if not path.is_symlink()]
    return [str(path) for path in paths if mode(path) & 0o077]


# --- permissions ------------------------------------------------------------------------------------------------------


def test_what_is_made_is_its_owners_only(tmp_path, open_umask):
    folder = make_folder(tmp_path / "above" / "runs", "runs-dir")
    write_atomic(folder / "whole", "x")
    write_tensors(folder / "arrays", {"w": np.ones(2)})
    Lines(folder / "lines").close()
    private_folder(folder / "a" / "b")
    with alone(folder):
        assert open_to_others(tmp_path / "above") == []


def test_a_process_forked_meanwhile_does_not_keep_the_lock(tmp_path):
    """Ray forks processes while the ServerApp opens its run directory."""
    waiting, end = os.pipe()

    def until_the_test_closes_its_end():
        os.close(end)
        os.read(waiting, 1)

    with alone(tmp_path):
        child = forked(until_the_test_closes_its_end)
    with alone(tmp_path):
        pass
    os.close(end)
    os.waitpid(child, 0)


def test_a_process_forked_while_a_file_is_written_does_not_keep_its_lock(tmp_path):
    """A file that takes an old one's place is locked first, so that whoever writes it would wait for that process."""
    waiting, end = os.pipe()
    children = []

    def until_the_test_closes_its_end():
        os.close(end)
        os.read(waiting, 1)

    write_atomic(tmp_path / "old", Chunks(lambda: children.append(forked(until_the_test_closes_its_end))))
    with open(tmp_path / "old", "rb") as file:
        assert lock(file, wait=False)
    os.close(end)
    os.waitpid(children[0], 0)


def test_who_looks_whether_a_folder_is_in_use_is_in_nobodys_way(tmp_path, monkeypatch):
    with alone(tmp_path):
        assert in_use(tmp_path)
    with open(tmp_path / ".lock", "rb") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert not in_use(tmp_path)  # another one who looks
        monkeypatch.setattr(time, "sleep", lambda seconds: fcntl.flock(looking, fcntl.LOCK_UN))
        with alone(tmp_path):
            assert in_use(tmp_path)


def test_a_folder_that_was_there_keeps_its_permissions(tmp_path):
    tmp_path.chmod(0o755)
    make_folder(tmp_path, "runs-dir")
    assert mode(tmp_path) == 0o755


def test_what_is_written_over_an_older_version_s_file_is_shut(tmp_path):
    for name, readable in (("old", 0o604), ("lines", 0o640)):  # by all others, or by its group only
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(readable)
    write_atomic(tmp_path / "new", "x", over=tmp_path / "old")
    Lines(tmp_path / "lines").close()
    assert open_to_others(tmp_path) == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options",
    [
        ["strategy=fedavgshare", "strategy.optimizer_state=keep"],
        ["strategy=fedreplay", "encoder-epochs=1", "forgetting=true"],
        ["strategy=fedavg", "privacy.dp=classifier", "privacy.sigma=2"],
        [*GENERATOR, "strategy=cwt", "replay=vqvae2", "generator.epochs=1", "task.size=8"],
    ],
)
def test_run_and_state_directories_are_their_owners_only(tmp_path, monkeypatch, open_umask, options):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    _, folder = run_inline([*SMALL, *options, "partition.size=60", f"runs_dir={tmp_path}/runs"], Display())
    assert list(folder.rglob("*.safetensors"))
    assert list((tmp_path / "home" / "state").rglob("ledger.jsonl"))
    assert open_to_others(tmp_path / "runs") + open_to_others(tmp_path / "home") == []
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)  # as older versions left it
    (folder / "result.json").unlink()
    run_inline(resolve([], "", str(folder))[0], Display())
    assert open_to_others(folder) == []


def test_links_are_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").write_text("")
    (tmp_path / "elsewhere").chmod(0o644)
    (tmp_path / "run" / "link").symlink_to(tmp_path / "elsewhere")
    tighten(tmp_path / "run")
    assert (mode(tmp_path / "run"), mode(tmp_path / "elsewhere")) == (0o700, 0o644)


# --- full disks -------------------------------------------------------------------------------------------------------


def test_lines_are_whole_where_the_disk_is_full(tmp_path):
    lines = Lines(tmp_path / "ledger.jsonl")
    lines.append([{"a": "x" * 50}])
    lines.flush()
    lines.append({"a": "y" * 50} for _ in range(9))
    with (
        disk_full_beyond(150),
        pytest.raises(RunError, match=r"ledger\.jsonl must be written; File too large: raise the limit"),
    ):
        lines.flush()
    lines.append([{"a": "z"}])  # once there is room again
    lines.close()
    assert [row["a"][0] for row in read_lines(tmp_path / "ledger.jsonl")] == ["x", "z"]
    assert (tmp_path / "ledger.jsonl").read_bytes().count(b"\n") == 2


def test_no_room_is_reported_with_the_file(tmp_path):
    (tmp_path / "ledger.jsonl").symlink_to("/dev/full")
    lines = Lines(tmp_path / "ledger.jsonl")
    lines.append([{"a": 1}])
    with pytest.raises(
        RunError, match=r"ledger\.jsonl must be written; No space left on device: make room on its disk"
    ):
        lines.flush()
    lines.close()


def test_a_folder_whose_entries_cannot_be_flushed_is_named(tmp_path, monkeypatch):
    def failing(descriptor):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(RunError, match=f"{tmp_path} must be written; Read-only file system"):
        sync(tmp_path)


def test_a_file_is_as_it_was_where_the_disk_is_full(tmp_path):
    write_json(tmp_path / "result.json", {"rounds": 1})
    with disk_full_beyond(1000), pytest.raises(RunError, match=r"result\.json must be written; File too large"):
        write_json(tmp_path / "result.json", {"rounds": list(range(1000))})
    assert read_json(tmp_path / "result.json") == {"rounds": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("size", "reported"), [(20, "run-id"), (3000, "ledger.jsonl"), (12_000, "000001.safetensors")])
def test_a_run_on_a_full_disk_ends_with_one_line_and_goes_on(tmp_path, monkeypatch, caplog, size, reported):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    options = [*SMALL, "strategy=fedavg", "rounds=3", f"runs_dir={tmp_path}/runs", "run_name=one"]
    with disk_full_beyond(size), pytest.raises(RunError) as caught:
        run_inline(options, Display())
    assert "File too large: raise the limit" in str(caught.value)
    assert not [record for record in caplog.records if record.exc_info]
    folder = tmp_path / "runs" / "one"
    resumed, _ = run_inline(resolve([], "", str(folder))[0] if folder.exists() else options, Display())
    whole, _ = run_inline([*options, "run_name=whole"], Display())
    assert resumed["final"] == whole["final"]
    for ledger in tmp_path.rglob("ledger.jsonl"):
        assert all(json.loads(line) for line in ledger.read_bytes().split(b"\n") if line)


# --- kills ------------------------------------------------------------------------------------------------------------


def test_a_torn_line_is_cut_off_when_the_file_is_opened(tmp_path):
    path = tmp_path / "ledger.jsonl"
    for torn, kept in ((b'{"a": 1}\n{"b"', 1), (b'{"a": 1}\n{"b": 2}', 2), (b'{"a', 0), (b"", 0)):
        path.write_bytes(torn)
        assert len(read_lines(path)) == kept
        assert path.read_bytes() == torn  # who only reads changes nothing
        lines = Lines(path)
        lines.append([{"c": 3}])
        lines.close()
        assert [json.loads(line) for line in path.read_bytes().splitlines()][-1] == {"c": 3}
        assert len(path.read_bytes().splitlines()) == kept + 1


def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)


class Chunks(list):
    """Parts of a file of which the second comes never, or kills."""

    def __init__(self, then):
        self.then = then

    def __iter__(self):
        yield b"private" * 9999
        self.then()


def test_leftovers_of_the_killed_are_removed_and_of_the_living_are_not(tmp_path):
    state = tmp_path / "state" / "a" / "run"
    state.mkdir(parents=True)
    killed = forked(write_atomic, state / "private.safetensors", Chunks(kill))
    os.waitpid(killed, 0)
    living = forked(
        write_atomic, state / "shared.safetensors", Chunks(lambda: ((tmp_path / "begun").touch(), time.sleep(60)))
    )
    try:
        while not (tmp_path / "begun").exists():  # it holds the lock of its file then
            time.sleep(0.01)
        (state.parent / f".write-{killed}").touch()  # of an older version
        institution = Institution("a", lambda: None, None, state_root=tmp_path / "state")
        assert institution.state == state.parent
        assert [path.name for path in state.parent.rglob(".*")] == [f".shared.safetensors.{living}.tmp"]
    finally:
        os.kill(living, signal.SIGKILL)
        os.waitpid(living, 0)
    sweep(tmp_path)
    assert list(state.iterdir()) == []


def test_a_file_that_is_begun_while_another_process_sweeps_is_not_removed(tmp_path, monkeypatch):
    """The one that was found has its final name when its lock is free, and the writer has begun the next one."""
    begun = tmp_path / f".notes.json.{os.getpid()}.tmp"
    begun.write_text("first")

    def next_one(file, wait):
        begun.rename(tmp_path / "notes.json")
        begun.write_text("second")
        return lock(file, wait)

    monkeypatch.setattr(atomic, "lock", next_one)
    sweep(tmp_path)
    assert begun.read_text() == "second"


def test_a_folder_can_be_written_though_another_process_sweeps_what_it_is_tried_by(tmp_path, monkeypatch):
    """File systems without nameless files, such as NFS, give it a name for a moment."""
    unlink, removed = os.unlink, []

    def swept(path, **more):
        if not removed:
            removed.append(path)
            sweep(tmp_path)
        unlink(path, **more)

    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False)
    monkeypatch.setattr(os, "unlink", swept)
    assert make_folder(tmp_path, "the folder") == tmp_path
    assert removed
    assert list(tmp_path.iterdir()) == []


def test_a_run_directory_that_is_not_locked_yet_is_not_swept(tmp_path, monkeypatch):
    """While one run makes its folder another begins, and sweeps."""
    config = compose([*SMALL, "strategy=local", f"runs_dir={tmp_path}"])
    others = []

    def meanwhile(folder):
        monkeypatch.undo()
        private_folder(folder)
        others.append(forked(open_run, replace(config, run_name="two")))
        time.sleep(1)  # in which the other one sweeps, or waits
        return folder

    monkeypatch.setattr(opening, "private_folder", meanwhile)
    open_run(replace(config, run_name="one"))
    os.waitpid(others[0], 0)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "one", tmp_path / "two"]


def test_a_kill_while_a_run_directory_is_made_leaves_nothing_in_the_way(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    options = [*SMALL, "strategy=local", f"runs_dir={tmp_path}/runs", "run_name=one"]
    config = compose(options)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", kill)
        child = forked(open_run, config)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    (tmp_path / "runs" / "one").mkdir()  # of an older version, killed between both
    assert len(list((tmp_path / "runs").iterdir())) == 2
    result, folder = run_inline(options, Display())
    assert (result["rounds"], folder.name) == (1, "one")
    assert list((tmp_path / "runs").iterdir()) == [folder]
    with pytest.raises(RunError, match="run-name must be new"):
        run_inline(options, Display())


def test_answers_that_a_kill_lost_are_noted_in_the_servers_ledger(tmp_path, monkeypatch):
    """Both institutions have written down what they send, and the server is killed before it has read it."""
    monkeypatch.setenv("FLWR_REPLAY_HOME", str(tmp_path / "home"))
    options = [*SMALL, "strategy=fedavg", f"runs_dir={tmp_path}/runs", "run_name=one"]
    answer, asked = InlineGrid.answer, []

    def killed(grid, message):
        asked.append(config_in(message.content)["stage"])
        if asked.count("train") == 2:
            answer(grid, message)
            kill()
        return answer(grid, message)

    with monkeypatch.context() as patch:
        patch.setattr(InlineGrid, "answer", killed)
        patch.setattr(InlineGrid, "at_once", None)  # both are asked before the first answer, as over a network
        child = forked(run_inline, options, Display())
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    folder = tmp_path / "runs" / "one"
    own = [read_lines(path) for path in (tmp_path / "home" / "state").rglob("ledger.jsonl")]
    assert [{row["stage"] for row in rows} for rows in own] == [{"roll-call", "train"}] * 2
    result, _ = run_inline(resolve([], "", str(folder))[0], Display())
    rows = read_lines(folder / "ledger.jsonl")
    lost = [(row["institution"], row["round"], row["stage"]) for row in rows if row["kind"] == "not received"]
    assert sorted(lost) == [("institution-1", 1, "train"), ("institution-2", 1, "train")]
    assert sum(result["bytes"].values()) > 0
    assert "not received" not in result["bytes-by-kind"]["up"]
