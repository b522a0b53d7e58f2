"""Data that changed while a run was broken off, with as many examples as before."""

import logging

import numpy as np
import pytest
from harness import SHARDS, node_configs, run, same, write_shards
from safetensors.numpy import load_file

from flwr_replay.memory import forget

JOB = [*SHARDS, "classes=3", "model=mlp", "model.width=4", "batch_size=8", "device=cpu", "nodes=2", "strategy=fedavg"]
CHANGES = {"pixel": "train_images", "label": "train_labels", "test": "test_labels"}
DP = ["dp=classifier", "sigma=1"]


def change_first_value(file, array):
    with np.load(file) as stored:
        arrays = dict(stored)
    first = arrays[array].reshape(-1)[:1]  # a view
    first[:] = (first + 1) % 3
    np.savez(file, **arrays)


def ran(folder, *options, **more):
    forget()
    return run(folder, [*JOB, "rounds=2", *options], node_configs(folder, folder / "state", "ab"), **more)


@pytest.fixture
def begin_and_break(tmp_path):
    """Break runs off after their first round; return what goes on with one."""
    write_shards(tmp_path, {"a": 24, "b": 20})

    def begin(*options, **more):
        with pytest.raises(KeyboardInterrupt):
            ran(tmp_path, *options, name="broken", stop_after=1)
        return lambda: ran(tmp_path, *options, resume=str(tmp_path / "runs" / "broken"), **more)

    return begin


@pytest.mark.parametrize("changed", CHANGES)
@pytest.mark.parametrize("dp", [[], DP], ids=["without", "under dp"])
def test_a_pixel_or_a_label_is_told_in_one_line_and_refused_under_dp(begin_and_break, tmp_path, caplog, changed, dp):
    go_on = begin_and_break(*dp)
    change_first_value(tmp_path / "a.npz", CHANGES[changed])
    with caplog.at_level(logging.WARNING, "flwr"):
        resumed = go_on()
    messages = [line for line in caplog.messages if "examples or labels are others than when run" in line]
    assert len(messages) == 1
    assert f"the {'test' if changed == 'test' else 'training'} examples or labels are others" in messages[0]
    failures = {failure["institution"]: failure["reason"] for failure in resumed.result["failures"]}
    if dp and changed != "test":
        assert failures["a"].startswith("a privacy account is about one data set; the training examples or labels")
        assert [len(resumed.charges(name)) for name in "ab"] == [1, 2]
    else:
        assert not failures
        assert resumed.grid.who("train") == ["a", "b"]


@pytest.mark.parametrize("dp", [[], [*DP, "noise=seeded"]], ids=["without", "under dp"])
def test_unchanged_data_go_on_with_the_same_bits(begin_and_break, tmp_path, caplog, dp):
    whole, resumed = ran(tmp_path, *dp, name="whole"), begin_and_break(*dp)()
    assert same(*(load_file(ran.folder / "models" / "global.safetensors") for ran in (whole, resumed)))
    assert "are others" not in caplog.text


def test_under_dp_it_is_looked_before_every_charge(tmp_path):
    """The roll call is only asked at the beginning, and a server may leave it out."""
    write_shards(tmp_path, {"a": 24, "b": 20})
    changed = []

    def tampering(grid, message):
        if len(grid.who("train")) == 3 and not changed:
            changed.append(change_first_value(tmp_path / "a.npz", "train_labels"))
        return None

    result = ran(tmp_path, *DP, "rounds=3", name="whole", forgetful=True, before=tampering).result
    assert {failure["institution"] for failure in result["failures"]} == {"a"}


def test_what_is_kept_depends_on_the_institutions_key(tmp_path):
    write_shards(tmp_path, {"a": 24})
    (tmp_path / "b.npz").write_bytes((tmp_path / "a.npz").read_bytes())
    kept = ran(tmp_path, "rounds=1", name="twins")
    left, right = ((kept.state(name) / "fingerprints.json").read_text() for name in "ab")
    assert left != right
