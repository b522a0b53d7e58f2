"""What cannot be read is neither empty nor damaged: nothing begins anew, is overwritten, deleted or left out."""

import builtins
import errno
import io
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from harness import write_shards

from flwr_replay.ciphers.arrivals import Arrivals
from flwr_replay.config.compose import compose
from flwr_replay.data.folder import folder_rows
from flwr_replay.data.readers import read_medmnist
from flwr_replay.errors import DataError, PrivacyError, RunError
from flwr_replay.files.atomic import write_json, write_once
from flwr_replay.files.disk import entries, files_below, there
from flwr_replay.files.lines import Lines, read_lines, segments
from flwr_replay.learning.latents import LatentStore
from flwr_replay.payloads.fedreplay import Latents
from flwr_replay.privacy.secret import KEY, secret_key
from flwr_replay.runs.checkpoints import BestModel, Checkpoints
from flwr_replay.state.store import StateStore
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


def test_a_closed_segment_is_not_overwritten(tmp_path, unreadable, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    lines = Lines(path, most=20)
    for number in range(3):  # two segments are closed
        lines.append([{"n": number, "text": "x" * 20}])
        lines.flush()
    lines.append([{"n": 3}])
    unreadable(tmp_path)
    with pytest.raises(RunError, match="must be a readable folder; Permission denied"):
        lines.flush()
    monkeypatch.undo()
    assert [row["n"] for segment in segments(path) for row in read_lines(segment)] == [0, 1, 2]


def test_a_run_does_not_begin_anew(tmp_path, unreadable):
    written = Checkpoints(tmp_path, [])
    written.write(
        1, {}, {"server-round": 1, "examples-seen": 1, "seconds": 1.0, "state": {}, "label-scale": None, "encoder": ""}
    )
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


# --- a file that could not be read is not damaged ---------------------------------------------------------------------


@pytest.fixture(params=["EACCES", "EIO", "ESTALE", "ENOMEM", "EMFILE"])
def refusing(request, monkeypatch):
    """Return a function after which files of this name cannot be opened; EMFILE is the system's own, for all files."""

    def now(name, spare=0):
        if request.param == "EMFILE":
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            os.close(lowest := os.dup(0))
            request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)))
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + spare, hard))
            return
        number = getattr(errno, request.param)

        def refused(path, *words, honest=open, **more):
            if Path(path).name == name:
                raise OSError(number, os.strerror(number), str(path))
            return honest(path, *words, **more)

        for module in (builtins, io):
            monkeypatch.setattr(module, "open", refused)

    return now


def refused(work):
    """Let work be refused, and return the line."""
    with pytest.raises((RunError, PrivacyError), match=r"could not be read|be a readable folder") as caught:
        work()
    assert "damaged" not in str(caught.value)
    assert "remove the" not in str(caught.value)
    return str(caught.value)


W = {"w": np.zeros(2, np.float32)}


def test_a_sound_model_of_the_best_round_is_not_deleted(tmp_path, refusing):
    best = BestModel(tmp_path)
    best.write(1, W)
    best.write(2, W)
    kept, logged = best.files().values(), []
    refusing("000002.safetensors")
    refused(lambda: best.rewind(2, logged.append))
    assert not logged
    assert len(kept) == sum(file.exists() for file in kept) == 2


def test_a_run_does_not_go_on_from_an_earlier_checkpoint(tmp_path, refusing):
    written, logged = Checkpoints(tmp_path, []), []
    values = {"examples-seen": 1, "seconds": 1.0, "state": {}, "label-scale": None, "encoder": ""}
    for at in (1, 2):
        written.write(at, W, {"server-round": at, **values})
    written.close()
    refusing("000002.safetensors")
    refused(lambda: Checkpoints(tmp_path, []).read(logged.append))
    assert not logged


@pytest.mark.parametrize("name", ["upload.json", "latents.npy"])
def test_whole_latents_are_not_called_damaged(tmp_path, refusing, name):
    more = {"num_examples": 1, "first": 0, "total": 1, "raw_bytes": 0, "scales": None}
    LatentStore(tmp_path).add("a", Latents(latents=np.zeros((1, 2), np.float32), labels=np.zeros(1, np.int64), **more))
    refusing(name, spare=1)
    assert str(tmp_path / "a") in refused(lambda: LatentStore(tmp_path))


def test_a_key_is_not_made_anew(tmp_path, refusing):
    key = secret_key(tmp_path)
    refusing(KEY)
    refused(lambda: secret_key(tmp_path))
    assert (tmp_path / KEY).stat().st_size == len(key)


def test_notes_of_parcels_are_not_called_damaged(tmp_path, refusing):
    store = StateStore(SimpleNamespace(state=tmp_path))
    notes = Arrivals(store, "run", "a")
    notes.file.parent.mkdir(parents=True)
    write_json(notes.file, {"newest": 1, "released": 0, "release": "", "parcels": [], "shares": []})
    refusing(notes.file.name)
    refused(lambda: Arrivals(store, "run", "a"))


def test_a_data_set_is_not_to_be_downloaded_again(tmp_path, refusing):
    write_shards(tmp_path, {"a": 9})
    task = compose(["task=medmnist", f"task.data_dir={tmp_path / 'a.npz'}"]).task
    refusing("a.npz")
    with pytest.raises(DataError, match="mend that, and try again"):
        read_medmnist(task)


def test_who_may_not_look_is_not_told_that_there_is_nothing(tmp_path, monkeypatch):
    def refused_to_look(path, **more):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    (tmp_path / "a").mkdir()

    monkeypatch.setattr(os, "stat", refused_to_look)
    monkeypatch.setattr(Path, "exists", lambda path: False)  # as from Python 3.14 on
    monkeypatch.setattr(Path, "stat", refused_to_look)
    for work in (
        lambda: there(tmp_path),
        lambda: LatentStore(tmp_path),
        lambda: StateStore(SimpleNamespace(state=tmp_path)).bind("run", "{}"),
        lambda: write_once(tmp_path / "key", ""),
        lambda: Cell(method=None, seed=0, folder=tmp_path, overrides=()).begun,
    ):
        refused(work)
