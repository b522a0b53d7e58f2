"""The images that an attack is given: folders, refused by the option that named them, and what is the victim's."""

import pytest
import torch
from harness import SHARDS, write_shards

from flwr_replay.attacks.attacker import Auxiliary
from flwr_replay.config.compose import compose
from flwr_replay.errors import DataError
from flwr_replay.lab.auxiliary import auxiliary_of, without
from flwr_replay.lab.judge import load_for


@pytest.mark.parametrize("option", ["--aux", "--data"])
def test_a_wrong_folder_is_refused_by_its_option(option, tmp_path):
    task = compose(["task=folder", f"task.data_dir={tmp_path / 'nothing'}", "classes=2", "task.size=8"]).task
    with pytest.raises(DataError) as refused:
        load_for(option, task)
    assert str(refused.value).startswith(f"{option}={tmp_path / 'nothing'}: {option} must be a folder")
    assert "task.data-dir" not in str(refused.value)


def test_auxiliary_images_of_the_victim_are_removed():
    x, y = torch.rand(5, 1, 2, 2), torch.arange(5)
    kept = without(Auxiliary("five images", x, y), [x[1:3], x[:1]])
    assert kept.labels_m.tolist() == [3, 4]
    assert "without 3" in kept.source
    assert without(Auxiliary("five images", x, y), [x]) is None
    assert without(Auxiliary("five images", x, y), []).source == "five images"


def test_an_attackers_folder_may_have_any_name(tmp_path):
    write_shards(tmp_path, {"a{b}": 40})
    task = compose([*SHARDS, "classes=3", "nodes=2", "split=validation"])  # the attacker holds none out
    assert auxiliary_of(task, str(tmp_path / "a{b}.npz")).source == "40 images of a{b}.npz"
