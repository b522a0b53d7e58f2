"""Images as files: they are read back as they were, and nothing else is replaced."""

from pathlib import Path

import numpy as np
import pytest

from flwr_replay.cli.main import app
from flwr_replay.config.compose import compose
from flwr_replay.data import load
from flwr_replay.data.folder import read_image
from flwr_replay.data.show import write_images
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.finished.predict import images_in


def test_what_predict_reads_is_what_the_data_set_has(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    app(["data", "images", "d", "--count", "30"], standalone_mode=False)
    assert capsys.readouterr().out == f"30 test images of digits, a folder for each label: {tmp_path / 'd'}\n"
    task = compose([]).task
    test, rows = load(task).test, images_in(tmp_path / "d")
    assert len(rows) == 30
    for row in rows:
        at = int(row.file.stem)
        np.testing.assert_array_equal(read_image(row, task), test.x[at])
        assert row.file.parent.name == str(test.y[at])
    app(["data", "images", "d", "--count", "40"], standalone_mode=False)  # the same images again, and ten more
    assert len(images_in(tmp_path / "d")) == 40


def test_images_in_colour_have_the_names_of_their_classes_where_a_folder_can(tmp_path: Path, task, dataset) -> None:
    made = task("folder", channels=3, size=8, classes=2, class_names=("ill", "../well"))
    examples = dataset(12).test
    colour = type(examples)(np.random.default_rng(0).integers(0, 256, (6, 3, 8, 8), np.uint8), examples.y[:6] % 2)
    assert write_images(colour, made, 100, tmp_path) == 6
    for row in images_in(tmp_path):
        at = int(row.file.stem)
        np.testing.assert_array_equal(read_image(row, made), colour.x[at])
        assert row.file.parent.name == ("ill", "class-1")[colour.y[at]]  # the other would lie elsewhere


def test_another_image_is_not_replaced_and_what_is_no_image_is_refused(tmp_path: Path, task, dataset) -> None:
    made = task("digits", channels=1, size=8)
    test = load(compose([]).task).test
    write_images(test, made, 3, tmp_path)
    theirs = next(tmp_path.rglob("00001.png"))
    theirs.write_bytes(b"mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RunError, match=r"00001\.png is there already, and is another image: choose another folder"):
        write_images(test, made, 9, tmp_path)
    assert theirs.read_bytes() == b"mine"
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(ConfigError, match="--count must be at least 1; got 0"):
        write_images(test, made, 0, tmp_path)
    with pytest.raises(ConfigError, match="only images with a class each"):
        app(["data", "images", str(tmp_path), "task=diabetes"], standalone_mode=False)
