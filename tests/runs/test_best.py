"""The best round's model: what is left of it at a run's end, also where a file was damaged or removed."""

import shutil
from hashlib import sha256

import numpy as np
import pytest

from flwr_replay.files.tensors import read_tensors
from flwr_replay.report.run_files import BOUND, CONFIG, RUN_ID, SUMS
from flwr_replay.runs.checkpoints import BestModel, best_of

ONE, TWO = ({"w": np.full(2, value, np.float32)} for value in (1, 2))


def names(best):
    return [path.name for path in best.files().values()]


def begun_directory(folder):
    """Return a run directory with its options and its id, which is its name."""
    folder.mkdir()
    files = {CONFIG: f"{BOUND}nodes: 1\n", RUN_ID: f"{folder.name}\n"}
    for name, text in files.items():
        (folder / name).write_text(text)
    sums = [f"{sha256(text.encode()).hexdigest()}  {name}" for name, text in files.items()]
    (folder / SUMS).write_text("\n".join(sums))
    return folder


def test_at_the_end_the_best_alone_is_left(tmp_path):
    best = BestModel(tmp_path)
    best.write(1, ONE)
    best.write(2, TWO)
    assert best.end(2, None) == tmp_path / "best" / "000002.safetensors"
    assert names(best) == ["000002.safetensors"]


def test_another_runs_model_is_never_the_best(tmp_path):
    best, other, logged = (
        BestModel(begun_directory(tmp_path / "mine")),
        BestModel(begun_directory(tmp_path / "other")),
        [],
    )
    best.write(1, ONE)
    other.write(2, TWO)
    shutil.copy(other.file(), best.folder)
    best.rewind(2, logged.append)
    assert names(best) == ["000001.safetensors"]
    assert "must be of the run mine" in logged[0]


def test_an_earlier_model_never_passes_for_the_best_that_is_lost(tmp_path):
    best = BestModel(tmp_path)
    best.write(1, ONE)
    assert best.end(2, None) is None
    assert names(best) == []


def test_the_last_weights_are_kept_again_where_they_are_the_best(tmp_path):
    best = BestModel(tmp_path)
    best.write(1, ONE)
    path = best.end(2, TWO)
    assert names(best) == ["000002.safetensors"]
    assert path is not None
    np.testing.assert_array_equal(read_tensors(path)["w"], TWO["w"])


@pytest.mark.parametrize(("higher", "best"), [(True, 1), (False, 2)])
def test_the_best_round_is_the_first_one_of_those_at_the_most_institutions(higher, best):
    rounds = [(1, 3.0, "ab"), (2, 2.0, "ab"), (3, 2.0, "ab"), (4, 3.0, "ab"), (5, 1.0, "a"), (6, 4.0, "b")]
    history = [(at, {"mae": value}, {name: {"mae": value} for name in names}) for at, value, names in rounds]
    assert best_of(history, "mae", higher)[0] == best
