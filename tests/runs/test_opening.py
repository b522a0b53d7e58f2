"""Run directories are there whole, or not at all."""

import errno
import fcntl
import os
from dataclasses import replace

import pytest

from flwr_replay.config.compose import compose
from flwr_replay.errors import RunError
from flwr_replay.files.atomic import write_atomic
from flwr_replay.runs import opening
from flwr_replay.runs.opening import open_run, resumable


def test_a_disk_that_becomes_read_only_while_a_run_is_begun_is_one_line(monkeypatch, tmp_path):
    """Neither the directory's name nor the removal of what was begun can be written then."""
    config = compose([f"runs_dir={tmp_path}", "run_name=one"])

    def refused(*arguments, **more):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as broken:
        for name in ("rename", "unlink", "rmdir"):
            broken.setattr(os, name, refused)
        with pytest.raises(RunError, match=f"{tmp_path}/one must be a new folder; Read-only file system"):
            open_run(config)
    assert [entry.name for entry in tmp_path.iterdir() if not entry.name.startswith(".")] == []
    open_run(config)
    assert [entry.name for entry in tmp_path.iterdir()] == ["one"]  # what was left is swept


def test_a_resumed_run_keeps_its_options_and_its_version(monkeypatch, tmp_path):
    config = compose([f"runs_dir={tmp_path}", "run_name=one"])
    open_run(config)
    with pytest.raises(RunError, match="a resumed run keeps its options; seed was 0, now 1: leave it out"):
        open_run(compose([f"resume={tmp_path / 'one'}", "seed=1"]))
    options = opening.saved_options(tmp_path / "one")
    monkeypatch.setattr(opening, "saved_options", lambda folder: options | {"later": 1})
    with pytest.raises(RunError, match="is of a newer version of flwr-replay, which has an option later: begin a new"):
        open_run(compose([f"resume={tmp_path / 'one'}"]))


def test_where_there_are_no_locks_a_run_directory_is_not_swept_while_it_is_made(tmp_path, monkeypatch):
    config = compose([f"runs_dir={tmp_path}"])
    old = tmp_path / ".old.01234567.new"
    old.mkdir()
    os.utime(old, (1, 1))

    def refused(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    def meanwhile(path, data):
        monkeypatch.setattr(opening, "write_atomic", write_atomic)
        write_atomic(path, data)
        open_run(replace(config, run_name="two"))

    monkeypatch.setattr(fcntl, "flock", refused)
    monkeypatch.setattr(opening, "write_atomic", meanwhile)
    open_run(replace(config, run_name="one"))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["one", "two"]


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_run_of_a_cluster_says_that_it_goes_on_there(tmp_path, capsys, raised):
    """In one process a run would lack the institutions whose state lies on the cluster's other machines."""
    on = "--engine ray --ray-address 10.0.0.1:6379"
    with pytest.raises(raised), resumable(tmp_path, 3, engine=on):
        raise raised
    error = capsys.readouterr().err
    assert error.startswith("interrupted; to continue: ")
    assert error.endswith(f" run {on} --resume {tmp_path}\n")
