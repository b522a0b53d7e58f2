"""What an institution keeps: the last three exchanges of every key, whole, and nothing of anybody's backup."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from flwr_replay.files import write_atomic
from flwr_replay.state import StateStore


@pytest.fixture
def store(tmp_path):
    return StateStore(SimpleNamespace(state=tmp_path))


def files(tmp_path):
    return sorted(file.name for file in (tmp_path / "run").iterdir())


def test_the_last_three_are_kept_whole(store, tmp_path):
    for exchange, size in enumerate([9, 3, 5, 1, 7], 1):  # a shorter one takes a longer one's place, and the other way
        store.save("model", "run", exchange, {"w": np.full(size, exchange)})
    assert files(tmp_path) == [f"model-00000{exchange}.safetensors" for exchange in (3, 4, 5)]
    for exchange, size in ((3, 5), (4, 1), (5, 7)):
        np.testing.assert_array_equal(store.load("model", "run", exchange + 1)["w"], np.full(size, exchange))
    assert store.load("model", "run", 3) is None


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
