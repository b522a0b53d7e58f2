"""A folder that cannot be read is not an empty one: nothing begins anew, is overwritten or left out because of it."""

import errno
import os
from pathlib import Path

import pytest

from flwr_replay.data.folder import folder_rows
from flwr_replay.errors import RunError
from flwr_replay.files.disk import entries, files_below
from flwr_replay.files.lines import Lines, parts, read_lines
from flwr_replay.learning.latents import LatentStore
from flwr_replay.runs.checkpoints import Checkpoints
from flwr_replay.studies.cells import Cell


@pytest.fixture
def unreadable(monkeypatch):
    """Return a function after which no folder of this path can be listed."""

    def now(folder):
        for name in ("listdir", "scandir"):
            honest = getattr(os, name)

            def refused(place=".", honest=honest):
                if Path(place) == folder:
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
                return honest(place)

            monkeypatch.setattr(os, name, refused)

    return now


def test_entries_are_those_of_the_pattern_in_order(tmp_path):
    for name in ("b.txt", "a.txt", "c.png"):
        (tmp_path / name).touch()
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "d.txt").touch()
    assert entries(tmp_path, "*.txt") == [tmp_path / "a.txt", tmp_path / "b.txt"]
    assert entries(tmp_path / "none") == []
    assert {file.name for file in files_below(tmp_path)} == {"a.txt", "b.txt", "c.png", "d.txt"}


def test_only_where_processes_work_may_a_folder_go_while_it_is_listed(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    scandir = os.scandir

    def gone(place):
        if Path(place).name == "a":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place))
        return scandir(place)

    monkeypatch.setattr(os, "scandir", gone)
    assert files_below(tmp_path, at_work=True) == [tmp_path / "b" / "file"]
    for work in (lambda: files_below(tmp_path), lambda: files_below(tmp_path / "a", at_work=True)):
        with pytest.raises(RunError, match="a must be a readable folder"):
            work()


def test_a_closed_part_is_not_overwritten(tmp_path, unreadable, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    lines = Lines(path, most=20)
    for number in range(3):  # two parts are closed
        lines.append([{"n": number, "text": "x" * 20}])
        lines.flush()
    lines.append([{"n": 3}])
    unreadable(tmp_path)
    with pytest.raises(RunError, match="must be a readable folder; Permission denied"):
        lines.flush()
    monkeypatch.undo()
    assert [row["n"] for part in parts(path) for row in read_lines(part)] == [0, 1, 2]


def test_a_run_does_not_begin_anew(tmp_path, unreadable):
    written = Checkpoints(tmp_path, [])
    written.write(1, {}, {"server-round": 1, "examples-seen": 1, "seconds": 1.0, "state": {}, "label-scale": None})
    written.close()
    unreadable(tmp_path / "checkpoints")
    (tmp_path / "config.yaml").touch()
    for looked in (
        lambda: Checkpoints(tmp_path, []).read(print),
        lambda: Cell(method=None, seed=0, folder=tmp_path, overrides=()).begun,
    ):
        with pytest.raises(RunError, match="checkpoints must be a readable folder"):
            looked()


def test_latents_are_not_asked_for_again(tmp_path, unreadable):
    unreadable(tmp_path)
    with pytest.raises(RunError, match="must be a readable folder"):
        LatentStore(tmp_path)


def test_no_image_is_left_out(tmp_path, unreadable):
    for place in ("one/a", "one/b", "two/a"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "image.png").touch()
    assert len(folder_rows(tmp_path)) == 3
    unreadable(tmp_path / "one" / "b")
    with pytest.raises(RunError, match="one/b must be a readable folder"):
        folder_rows(tmp_path)
