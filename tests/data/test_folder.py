"""A folder of images: layouts, what is read off it, and images that are wrong."""

from __future__ import annotations

import re
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import draw, draw_folders, manifest, read_off, refused, values
from PIL import Image

from flwr_replay.config.sections import TaskConfig
from flwr_replay.data import load
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.finished.predict import images_in
from flwr_replay.runs.options import resolve

Task = Callable[..., TaskConfig]


def test_class_folders(tmp_path: Path, make: Task) -> None:
    for n in range(10):
        draw(tmp_path / ("ill" if n % 2 else "healthy") / f"{n:02d}.png", n)
    (tmp_path / "ill" / "notes.txt").write_text("no image")
    data = load(make(class_names=("healthy", "ill")))
    assert (len(data.train) + len(data.test), data.val, data.train.sites) == (10, None, None)
    for examples in (data.train, data.test):
        assert (examples.x[:, 0, 0, 0] % 2 == examples.y).all()
    swapped = load(make(class_names=("ill", "healthy")))
    np.testing.assert_array_equal(swapped.train.y, 1 - data.train.y)


def test_class_folders_below_splits(tmp_path: Path, make: Task) -> None:
    for n, split in enumerate(["train", "train", "test", "val"]):
        draw(tmp_path / split / str(n % 2) / f"{n}.png", n)
    data = load(make())
    assert values(data) == ([0, 1], [2])
    assert data.val is not None
    assert data.val.y.tolist() == [1]
    shutil.rmtree(tmp_path / "test")
    refused(make(), "train/", "must have test/", "list the images in a manifest.csv")


@pytest.mark.parametrize(
    ("train", "test", "val"),
    [("Training", "Testing", "Validation"), ("TRAIN", "TEST", "VAL"), ("train_set", "Test Images", "valid")],
)
def test_splits_are_known_by_other_names(tmp_path: Path, train: str, test: str, val: str) -> None:
    draw_folders(tmp_path, *(f"{split}/{label}" for split in (train, test, val) for label in ("glioma", "none")))
    task = read_off(tmp_path)
    data = load(task)
    assert task.class_names == ("glioma", "none")
    assert data.val is not None
    assert (len(data.train), len(data.test), len(data.val)) == (8, 8, 8)
    assert data.test.x[:, 0, 0, 0].min() == 80  # the second folder's


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        (["seg_train/a", "seg_test/a"], ["seg_test/, seg_train/", "may be splits or classes"]),
        (["train2017/a", "val2017/a"], ["may be splits or classes"]),
        (["train/a", "Training/a", "test/a"], ["a split has one folder"]),
        (["Train/a", "Valid/a"], ["Train/", "must have test/"]),
        (["a/train", "a/test", "b/train"], ["splits stand above classes", "/a has test, train"]),
        (["tumours/Training/a", "tumours/Testing/a"], ["set task.data-dir=", "/tumours "]),
    ],
)
def test_splits_that_would_pass_for_classes(tmp_path: Path, make: Task, folders: list[str], words: list[str]) -> None:
    draw_folders(tmp_path, *folders)
    refused(make(), *words)


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["data/a", "data/b"], "data all hold a, b: if these are the classes, set task.data-dir=.*/data;"),
        (
            ["Train/a", "Train/b", "Eval/a", "Eval/b"],
            "Eval, Train all hold a, b: .* into one folder, or into train/ and test/",
        ),
        (["1/a", "1/b", "2/a", "2/b"], "1, 2 all hold a, b"),
    ],
)
def test_what_stands_above_classes_is_asked_about(tmp_path: Path, folders: list[str], message: str) -> None:
    draw_folders(tmp_path, *folders)
    with pytest.raises(DataError, match=message):
        read_off(tmp_path)
    top = sorted({folder.split("/")[0] for folder in folders})
    if len(top) == 1:
        assert read_off(tmp_path / "data").class_names == ("a", "b")  # as the line says
    else:
        assert len(read_off(tmp_path, "task.class-names=['" + "','".join(top) + "']").class_names) == 2


@pytest.mark.parametrize("names", [("valid", "invalid"), ("Train", "Car"), ("ER+", "ER-"), ("none", "glioma")])
def test_classes_that_look_like_something_else(tmp_path: Path, names: tuple[str, str]) -> None:
    draw_folders(tmp_path, *names)
    assert set(read_off(tmp_path).class_names) == set(names)
    draw_folders(tmp_path, f"{names[0]}/test")  # such as a patient's
    assert len(load(read_off(tmp_path)).train)


def test_images_are_known_by_any_suffix_or_their_first_bytes(tmp_path: Path) -> None:
    draw_folders(tmp_path, "a")
    for folder, suffix in (("b", ".JFIF"), ("c", ""), ("d", ".10008")):
        draw_folders(tmp_path, folder)
        for file in (tmp_path / folder).iterdir():
            if folder == "d":  # called by a UID, as scanners do
                file.write_bytes(bytes(128) + b"DICM")
            file.rename(file.with_suffix(suffix))
    assert read_off(tmp_path).class_names == ("a", "b", "c", "d")


def test_what_is_not_read_is_said(tmp_path: Path, make: Task, caplog: pytest.LogCaptureFixture) -> None:
    draw_folders(tmp_path, "a", "b")
    for name in ("0.nii", "1.nii", "notes.txt", "README"):
        (tmp_path / "b" / name).write_text("no image")
    (tmp_path / "b" / "gone.png").symlink_to("nowhere")
    draw(tmp_path / "stray.png")
    data = [load(make(class_names=("a", "b"))) for _ in range(2)]
    assert len(data[0].train) + len(data[0].test) == 8
    assert [record.getMessage() for record in caplog.records] == [
        f"not read in {tmp_path}, being no images, or out of place: 2 .nii, 1 without suffix, 1 broken links, 1 .txt, "
        "1 images outside the folders of classes"
    ]
    (tmp_path / "c").mkdir()
    assert len(load(make(class_names=("a", "b"))).train)  # an institution may have none of a class
    assert "1 empty folders called c/" in caplog.records[-1].getMessage()
    (tmp_path / "c" / "0.nii").write_text("no image")
    refused(make(), "c/ has files but no image (1 .nii)")


def test_what_systems_leave_behind_is_not_read(tmp_path: Path, make: Task, caplog: pytest.LogCaptureFixture) -> None:
    draw_folders(tmp_path, "a", "b", "a/.ipynb_checkpoints", "a/__MACOSX", "a/x/@eaDir", ".git", "__MACOSX", "@eaDir")
    draw(tmp_path / "a" / "._0.png")
    for name in ("Thumbs.db", ".DS_Store", "desktop.ini"):
        (tmp_path / "a" / name).write_text("no image")
    data = load(make(class_names=("a", "b")))
    assert len(data.train) + len(data.test) == len(images_in(tmp_path)) == 8
    assert not caplog.records


def test_folders_called_by_numbers_are_as_many_classes(tmp_path: Path) -> None:
    draw_folders(tmp_path, "2020", "2021")
    task = read_off(tmp_path)
    assert (task.classes, task.class_names) == (2, ("2020", "2021"))
    assert sorted({*load(task).train.y, *load(task).test.y}) == [0, 1]
    draw_folders(tmp_path / "plain", "0", "1", "2")
    assert (read_off(tmp_path / "plain").classes, read_off(tmp_path / "plain").class_names) == (3, ())
    draw_folders(tmp_path / "gap", "0", "2")
    assert (read_off(tmp_path / "gap").classes, read_off(tmp_path / "gap", "task.classes=3").class_names) == (2, ())


@pytest.mark.parametrize("copy", ["cat copy", "Cat - Copy (2)", "cat (1)", "cat (copy)", "cat-copy", "cat copy 2"])
def test_a_copied_folder_is_asked_about(tmp_path: Path, copy: str) -> None:
    draw_folders(tmp_path, "cat", "dog (1)", "dog (2)", "photocopy", "photo", "cats")
    assert len(read_off(tmp_path).class_names) == 6
    draw_folders(tmp_path, copy)
    with pytest.raises(DataError, match=rf"differ by more than a copy's mark; got 'cat' .* and '{re.escape(copy)}' "):
        read_off(tmp_path)


@pytest.mark.parametrize("folders", [("1", "01", "2"), ("train/1", "train/2", "test/1.0")])
@pytest.mark.parametrize("more", [(), ("task.class-names=[1,2]",)])
def test_folders_that_are_one_number_are_asked_about(
    tmp_path: Path, folders: tuple[str, ...], more: tuple[str, ...]
) -> None:
    draw_folders(tmp_path, *folders)
    with pytest.raises(DataError, match=r"a class has one folder; .* are one number: join them"):
        load(read_off(tmp_path, *more))


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_folders_in_both_unicode_forms_are_one_class(tmp_path: Path, form: Any) -> None:
    draw_folders(tmp_path, unicodedata.normalize("NFC", "sé"), "x", unicodedata.normalize(form, "sé"))
    assert read_off(tmp_path).class_names == ("sé", "x")


def test_images_that_one_can_see_through_are_refused(tmp_path: Path, make: Task) -> None:
    draw(tmp_path / "0" / "a.png")
    (tmp_path / "1").mkdir()
    pixels = np.full((8, 8, 4), 255, np.uint8)
    Image.fromarray(pixels).save(tmp_path / "1" / "b.png")
    assert len(load(make()).train) == 1
    pixels[0, 0, 3] = 254
    Image.fromarray(pixels).save(tmp_path / "1" / "b.png")
    refused(make(), "must be opaque", "b.png", "alpha channel")


def test_colour_and_grey_follow_the_channels(tmp_path: Path, make: Task) -> None:
    draw(tmp_path / "0" / "a.png", 7)
    draw(tmp_path / "1" / "b.png", 9, mode="RGB")
    for channels in (1, 3):
        data = load(make(channels=channels))
        assert data.train.x.shape == (1, channels, 8, 8)
        assert {int(examples.x.mean()) for examples in (data.train, data.test)} == {7, 9}
    with pytest.raises(ConfigError, match="got 2"):
        load(make(channels=2))


def test_folders_that_are_not_there_or_empty(tmp_path: Path, make: Task) -> None:
    with pytest.raises(ConfigError, match="data-dir=FOLDER"):
        load(make(data_dir=""))
    refused(make(data_dir=str(tmp_path / "nowhere")), "nowhere", "is not")
    refused(make(), str(tmp_path), "manifest.csv", "a folder of images for each class")
    manifest(tmp_path, "image,label", [])
    refused(make(), "manifest.csv", "got none")
    draw(tmp_path / "a.png")
    manifest(tmp_path, "image,label,split", ["a.png,0,test"])
    refused(make(), "needs train examples")
    manifest(tmp_path, "image,label", ["a.png,0"])
    refused(make(), "needs test examples")


def test_a_run_reads_channels_and_classes_off_the_folder(tmp_path: Path) -> None:
    for n in range(12):
        draw(tmp_path / f"{n}.png", n, mode="RGB" if n else "L")
    manifest(tmp_path, "image,label", [f"{n}.png,{label}" for n, label in enumerate(["ill", "well", "fine"] * 4)])
    given = ["task=folder", f"task.data-dir={tmp_path}", "task.size=8"]
    task = resolve(given, "", "")[1].task
    assert (task.channels, task.classes, task.class_names) == (1, 3, ("fine", "ill", "well"))
    task = resolve([*given, "channels=3", "task.class-names=[well,ill,fine]", "classes=3"], "", "")[1].task
    assert (task.channels, task.classes, task.class_names) == (3, 3, ("well", "ill", "fine"))
    task = resolve([*given, "channels=1", "classes=3"], "", "")[1].task
    assert task.class_names == ("fine", "ill", "well")  # predict asks for them
    assert resolve(["task=folder", "data-dir=elsewhere", "channels=1", "classes=3"], "", "")[1].task.class_names == ()
    with pytest.raises(DataError, match="must be a folder"):
        resolve(["task=folder", "task.data-dir=nowhere"], "", "")


def test_images_that_are_wrong(tmp_path: Path, make: Task) -> None:
    draw(tmp_path / "a.png")
    draw(tmp_path / "b.png", size=(9, 7))
    manifest(tmp_path, "image,label", ["a.png,0", "b.png,1"])
    refused(make(fit="exact"), "1 x 8 x 8", "b.png is 7 x 9 pixels", "task.size", "task.fit=pad")
    assert {len(load(make(fit=fit)).train) for fit in ("pad", "crop", "stretch")} == {1}
    (tmp_path / "b.png").write_text("not an image")
    refused(make(), "b.png", "line 3", "cannot be read")
    (tmp_path / "b.png").write_bytes(b"")
    refused(make(), "b.png", "cannot be read")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)).save(tmp_path / "b.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "b.png").read_bytes()[:70])
    refused(make(), "b.png", "cannot be read")
