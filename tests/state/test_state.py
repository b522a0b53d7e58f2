"""What an institution keeps: the last three exchanges of every key, whole, and nothing of anybody's backup."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from flwr_replay.errors import RunError
from flwr_replay.files.atomic import write_atomic
from flwr_replay.files.tensors import write_tensors
from flwr_replay.state import store as state
from flwr_replay.state.store import ORIGIN, StateStore


@pytest.fixture
def store(tmp_path):
    return StateStore(SimpleNamespace(state=tmp_path))


def files(tmp_path):
    return sorted(file.name for file in (tmp_path / "runs" / "run").iterdir())


def test_the_last_three_are_kept_whole(store, tmp_path):
    for exchange, size in enumerate([9, 3, 5, 1, 7], 1):  # a shorter one takes a longer one's place, and the other way
        store.save("model", "run", exchange, {"w": np.full(size, exchange)})
    assert files(tmp_path) == [f"model-00000{exchange}.safetensors" for exchange in (3, 4, 5)]
    for exchange, size in ((3, 5), (4, 1), (5, 7)):
        np.testing.assert_array_equal(store.load("model", "run", exchange + 1)["w"], np.full(size, exchange))
    assert store.load("model", "run", 3) is None


@pytest.mark.skipif(os.name != "posix", reason="other systems have other permissions")
def test_only_its_owner_may_enter_the_folder(store, tmp_path):
    store.save("model", "run", 1, {"w": np.ones(2)})
    assert (tmp_path / "runs" / "run").stat().st_mode & 0o777 == 0o700


def test_what_cannot_be_written_or_removed_is_one_line_with_the_file(store, tmp_path):
    for exchange in range(1, 4):
        store.save("model", "run", exchange, {"w": np.ones(2)})
    for name in ("tests", "model-000003.safetensors"):
        path = tmp_path / "runs" / "run" / name
        path.unlink(missing_ok=True)
        path.mkdir()
    for write in (lambda: store.count_test("run"), lambda: store.forget_after("model", "run", 2)):
        with pytest.raises(
            RunError, match=r"runs/run/(tests|model-000003.safetensors) must be written; Is a directory"
        ):
            write()


def test_two_processes_that_count_a_test_at_once_count_two(store, monkeypatch):
    counts = []

    def opened_by_another_too(*words, **more):
        file = open(*words, **more)  # noqa: SIM115 - the caller closes it
        monkeypatch.undo()
        counts.append(store.count_test("run"))
        return file

    store.count_test("run")
    monkeypatch.setattr(state, "open", opened_by_another_too, raising=False)
    counts.append(store.count_test("run"))
    assert counts == [1, 2]


def test_a_file_that_another_process_has_removed_is_no_error(store, tmp_path, monkeypatch):
    """It was there when the folder was listed."""
    store.save("model", "run", 9, {"w": np.ones(2)})
    monkeypatch.setattr(store, "_exchanges", lambda *_: [1, 2, 3, 4, 9])
    store.save("model", "run", 10, {"w": np.ones(2)})
    store.forget_after("model", "run", 3)
    assert files(tmp_path) == ["model-000010.safetensors"]


def test_an_exchange_that_is_repeated_takes_nobodys_place(store, tmp_path):
    for exchange in (1, 2, 3, 3):
        store.save("model", "run", exchange, {"w": np.ones(2)})
    assert len(files(tmp_path)) == 3


def test_a_crash_while_writing_loses_the_oldest_at_most(store, tmp_path, monkeypatch):
    for exchange in (1, 2, 3):
        store.save("model", "run", exchange, {"w": np.full(2, exchange)})

    def crash(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(KeyboardInterrupt):
        store.save("model", "run", 4, {"w": np.full(2, 4)})
    assert [store.load("model", "run", before)["w"][0] for before in (3, 4, 5)] == [2, 3, 3]


def test_a_backup_with_hard_links_stays_as_it_is(tmp_path):
    old, backup = tmp_path / "old", tmp_path / "backup"
    write_atomic(old, b"before")
    os.link(old, backup)
    write_atomic(tmp_path / "new", b"after", over=old)
    assert (backup.read_bytes(), (tmp_path / "new").read_bytes()) == (b"before", b"after")
    assert not old.exists()


def test_what_is_held_in_memory_is_what_the_file_holds(store, tmp_path):
    store.save("model", "run", 1, {"w": np.ones(2)}, give=True)
    file = tmp_path / "runs" / "run" / "model-000001.safetensors"
    another = tmp_path / "another"
    write_tensors(
        another, {"w": np.full(2, 7.0)}, {ORIGIN: store.origin}
    )  # by another process, or a backup that is put back
    os.replace(another, file)
    assert store.load("model", "run", 2)["w"].tolist() == [7, 7]
    file.unlink()
    assert store.load("model", "run", 2) is None
    assert store.at("model", "run", 1) is None


def test_what_is_taken_may_be_written_to(store):
    store.save("optimizer", "run", 1, {"m": np.ones(2)}, give=True)
    for _ in range(2):  # the second time from the disk
        taken = store.take("optimizer", "run", 2)["m"]
        assert taken.tolist() == [1, 1]
        taken += 1
    assert store.take("optimizer", "run", 1) is None


def test_no_more_is_held_in_memory_than_may_be(store, monkeypatch):
    monkeypatch.setattr(state, "HELD", 100)
    monkeypatch.setattr(state, "_recent", lately := state.RecentArrays())
    for exchange in range(1, 6):
        store.save("model", "run", exchange, {"w": np.full(6, float(exchange))}, give=True)
        store.save("proxy", "run", exchange, {"w": np.full(6, float(exchange))}, give=True)
    assert lately.bytes == 96  # the last of both keys
    assert len(lately.held) == 2
    store.save("large", "run", 5, {"w": np.ones(99)}, give=True)
    assert lately.bytes == 96  # one that is too large drives out nobody
    assert [store.load(key, "run", 6)["w"][0] for key in ("model", "proxy", "large")] == [5, 5, 1]


def test_what_was_not_given_may_go_on_changing(store):
    weights = np.ones(2)
    store.save("decoder", "run", 1, {"w": weights})
    weights += 1
    assert store.load("decoder", "run", 2)["w"].tolist() == [1, 1]
