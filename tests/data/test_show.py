"""The description of a partition says its numbers, and the picture is whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flwr_replay.config.sections import PartitionConfig
from flwr_replay.data import partition, show
from flwr_replay.errors import RunError

Make = Callable[..., Any]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("nodes", "made"),
    [(4, {}), (25, {}), (3, {"classes": 40}), (3, {"continuous": True}), (1, {"val": False}), (1, {"classes": 1})],
)
def test_text_and_picture(dataset: Make, tmp_path: Path, nodes: int, made: dict[str, Any]) -> None:
    data = dataset(400, **made)
    dealing = partition(data, PartitionConfig(name="iid"), nodes, 0)
    text = show(data, dealing, tmp_path / "new")
    assert f"{nodes} institutions, 400 training examples" in text
    assert f"KS {dealing.ks:.3f}" in text
    assert f"variation {dealing.tv:.3f}" in text
    assert all(name in text for name in dealing.names)
    path = Path(text.splitlines()[-1].removeprefix("picture: "))
    assert [path] == list((tmp_path / "new").iterdir())
    with Image.open(path) as picture:
        assert np.asarray(picture).std() > 0


def test_every_count_stands_in_the_table(dataset: Make, tmp_path: Path) -> None:
    data = dataset(400, classes=5)
    dealing = partition(data, PartitionConfig(name="majority", p=0.7, size=50), 4, 0)
    lines = show(data, dealing, tmp_path).splitlines()
    assert "200 unused" in lines[0]
    for k, name in enumerate(dealing.names):
        counts = np.bincount(data.train.y[dealing.train[k]], minlength=5)
        row = next(line for line in lines if f" {name} " in line)
        cells = [cell.strip() for cell in row.split("│")[2:-1]]
        assert cells == [str(n) for n in (50, len(dealing.val[k]), len(dealing.test[k]), *counts)]


def test_classes_have_their_names_and_not_the_number_of_another(dataset: Make) -> None:
    data = replace(dataset(400, classes=4), classes=("1", "2", "3", "4"))
    dealing = partition(data, PartitionConfig(name="majority", p=0.7, size=50), 2, 0)
    text = show(data, dealing)
    for k, classes in enumerate(dealing.skew["classes"]["institutions"].values()):
        majority = np.bincount(data.train.y[dealing.train[k]]).argmax()
        assert classes["largest"]["class"] == str(majority + 1)
        assert f"largest {classes['largest']['examples']} of class {majority + 1}" in text
    heads = next(line for line in text.splitlines() if " train " in line).split("┃")
    assert [head.strip() for head in heads[-5:-1]] == ["1", "2", "3", "4"]


def test_dropped_examples_are_said(examples: Make, tmp_path: Path) -> None:
    from flwr_replay.data import Dataset

    data = Dataset("rare", examples(np.repeat([0, 1], [40, 360])), examples(np.arange(40) % 2))
    dealing = partition(data, PartitionConfig(name="ks", ks=0.5, drop=True), 4, 0)
    first = show(data, dealing, tmp_path).splitlines()[0]
    assert f"{dealing.dropped} left out" in first
    assert "unused" not in first


def test_a_folder_that_cannot_be_written(dataset: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    data = dataset()
    with pytest.raises(RunError, match="file"):
        show(data, partition(data, PartitionConfig(name="iid"), 2, 0), tmp_path / "file")
