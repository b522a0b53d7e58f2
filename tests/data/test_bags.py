"""Bags of feature vectors: what is read, what is refused, and whose examples are external."""

import shlex
import zipfile
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from slides import CLASSES, SEEN, TASK, F, write_slides

from flwr_replay.config.compose import compose
from flwr_replay.data import Examples, load
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.institution.node import institution_of
from flwr_replay.institution.owner import Institution


def task(folder, *more):
    return compose([*TASK, "split=test", f"task.data-dir={folder}", *more]).task


def test_a_bag_is_an_image_of_its_vectors_and_of_empty_places(tmp_path):
    rows = write_slides(tmp_path)
    dataset = load(task(tmp_path))
    assert (len(dataset.train), len(dataset.test)) == (60, 20)
    first = np.load(tmp_path / rows[0][0])["features"]
    x_FP = dataset.train.x[0].reshape(F, 9)
    np.testing.assert_array_equal(x_FP[:, : len(first)], first.T)
    assert not x_FP[:, len(first) :].any()
    assert dataset.external is None


def simulated(overrides, k, nodes=4):
    """Return the k-th institution of a simulation."""
    config = shlex.join([*overrides, "device=cpu"])
    context = SimpleNamespace(
        run_config={"overrides": config}, node_config={"partition-id": k, "num-partitions": nodes}
    )
    return institution_of(context)[0]


def test_external_examples_are_the_others_of_classes_that_one_trains_on(tmp_path):
    rows = write_slides(tmp_path)
    for k, name in enumerate(sorted(SEEN)):
        institution = simulated([*TASK, f"task.data-dir={tmp_path}", "partition=natural"], k)
        seen = {row[1] for row in rows if row[2] == name and row[3] == "train"}
        others = [row[1] for row in rows if row[2] != name and row[3] == "test" and row[1] in seen]
        assert institution.name == name
        assert sorted(institution.external.y.tolist()) == sorted(others)


def test_external_examples_look_as_they_do_where_they_are(tmp_path):
    options = ["task=digits", "partition=iid", "contrast=0.5"]
    first, second = (simulated(options, k, nodes=2) for k in range(2))
    assert torch.equal(first.external.x, second.test.x)
    assert not torch.equal(first.external.x, simulated(options[:2], 0, nodes=2).external.x)


def test_of_numbers_all_external_examples_count():
    first, *others = (simulated(["task=diabetes", "partition=iid"], k) for k in range(4))
    assert len(first.external) == sum(len(other.test) for other in others)


def test_an_institution_may_bring_external_examples_of_its_own(tmp_path):
    write_slides(tmp_path, sites={"a": (0, 1)}, external=True)
    dataset = load(task(tmp_path))
    assert [len(examples) for examples in (dataset.train, dataset.test, dataset.external)] == [10, 5, 5]
    stranger = Examples(np.concatenate([dataset.external.x] * 2), np.r_[dataset.external.y, [3] * 5])
    institution = Institution("a", lambda: replace(dataset, external=stranger), torch.device("cpu"))
    assert len(institution.external) == 5  # none of a class that it has never seen


@pytest.mark.parametrize(
    ("features", "says"),
    [
        (np.ones((2, F + 1)), rf"\(n, {F}\); got float64 of shape \(2, {F + 1}\)"),
        (np.ones((10, F)), "1 to task.size squared = 9 vectors; .* has 10"),
        (np.ones((0, F)), "has 0"),
        (np.eye(3, F) * [[1], [0], [1]], "must not be all zero"),
        (np.full((2, F), np.inf), "must be finite"),
        (np.array([["a"] * F]), "must be numbers"),
    ],
)
def test_a_bag_that_is_none_is_named(tmp_path, features, says):
    rows = write_slides(tmp_path, each=4)
    np.savez(tmp_path / rows[1][0], features=features)
    with pytest.raises(DataError, match=says):
        load(task(tmp_path))


def test_files_that_cannot_be_are_named(tmp_path):
    rows = write_slides(tmp_path, each=4)
    file = tmp_path / rows[0][0]
    np.savez(file, other=np.ones((2, F)))
    with pytest.raises(DataError, match=r"an array features; .*asterand-0\.npz is not"):
        load(task(tmp_path))
    file.write_bytes(b"no zip")
    with pytest.raises(DataError, match=r"asterand-0\.npz is not"):
        load(task(tmp_path))
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1125899906842624,)}".ljust(117) + b"\n"
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("features.npy", b"\x93NUMPY\x01\x00" + bytes([118, 0]) + header)
    with pytest.raises(DataError, match=r"asterand-0\.npz is not \(Unable to allocate 1\.00 PiB"):
        load(task(tmp_path))
    file.unlink()
    with pytest.raises(DataError, match=r"does not exist .*line 2"):
        load(task(tmp_path))
    with pytest.raises(ConfigError, match=f"a name for each of {CLASSES} classes; got 2"):
        task(tmp_path, "class_groups=[lung,kidney]")
    with pytest.raises(ConfigError, match=r"set task\.data-dir=FOLDER"):
        load(compose(TASK).task)


def test_bags_are_not_replayed(tmp_path):
    from flwr_replay.generators.plan import ReplayPlan

    with pytest.raises(ConfigError, match="replay needs images; task=histopathology has bags"):
        ReplayPlan.of(compose([*TASK, "strategy=cwt", "replay=vqvae2"]))
