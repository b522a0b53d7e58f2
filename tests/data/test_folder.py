"""A folder of images: layouts, manifest, and the same bits for one site as for all."""

from __future__ import annotations

import re
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flwr_replay.config.sections import PartitionConfig, TaskConfig
from flwr_replay.data import Dataset, load, partition
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.finished.predict import images_in
from flwr_replay.runs.options import resolve

Task = Callable[..., TaskConfig]


@pytest.fixture
def make(tmp_path: Path, task: Task) -> Callable[..., TaskConfig]:
    """Folder tasks with grey 8 x 8 images of two classes."""
    return lambda **options: task("folder", **{"data_dir": str(tmp_path), "channels": 1, "size": 8, **options})


def draw(path: Path, value: int = 0, size: tuple[int, int] = (8, 8), mode: str = "L") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    Image.fromarray(np.full(shape, value % 256, np.uint8)).save(path)


def manifest(folder: Path, header: str, rows: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.csv").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")


def values(data: Dataset) -> tuple[list[int], list[int]]:
    return data.train.x[:, 0, 0, 0].tolist(), data.test.x[:, 0, 0, 0].tolist()


def refused(task: TaskConfig, *words: str) -> None:
    with pytest.raises(DataError) as caught:
        load(task)
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line, line


def test_class_folders(tmp_path: Path, make: Task) -> None:
    for n in range(10):
        draw(tmp_path / ("ill" if n % 2 else "healthy") / f"{n:02d}.png", n)
    (tmp_path / "ill" / "notes.txt").write_text("no image")
    data = load(make(class_names=("healthy", "ill")))
    assert (len(data.train) + len(data.test), data.val, data.train.sites) == (10, None, None)
    for part in (data.train, data.test):
        assert (part.x[:, 0, 0, 0] % 2 == part.y).all()
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


def drawn(root: Path, *folders: str, suffix: str = ".png") -> None:
    for place, folder in enumerate(folders):
        for n in range(4):
            draw(root / folder / f"{n}{suffix}", 40 * place + n)


def read_off(folder: Path, *more: str) -> TaskConfig:
    return resolve(["task=folder", f"task.data-dir={folder}", "task.size=8", "nodes=2", *more], "", "")[1].task


@pytest.mark.parametrize(
    ("train", "test", "val"),
    [("Training", "Testing", "Validation"), ("TRAIN", "TEST", "VAL"), ("train_set", "Test Images", "valid")],
)
def test_splits_are_known_by_other_names(tmp_path: Path, train: str, test: str, val: str) -> None:
    drawn(tmp_path, *(f"{split}/{label}" for split in (train, test, val) for label in ("glioma", "none")))
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
    drawn(tmp_path, *folders)
    refused(make(), *words)


@pytest.mark.parametrize(
    ("folders", "said"),
    [
        (["data/a", "data/b"], "data all hold a, b: if these are the classes, set task.data-dir=.*/data;"),
        (
            ["Train/a", "Train/b", "Eval/a", "Eval/b"],
            "Eval, Train all hold a, b: .* into one folder, or into train/ and test/",
        ),
        (["1/a", "1/b", "2/a", "2/b"], "1, 2 all hold a, b"),
    ],
)
def test_what_stands_above_classes_is_asked_about(tmp_path: Path, folders: list[str], said: str) -> None:
    drawn(tmp_path, *folders)
    with pytest.raises(DataError, match=said):
        read_off(tmp_path)
    top = sorted({folder.split("/")[0] for folder in folders})
    if len(top) == 1:
        assert read_off(tmp_path / "data").class_names == ("a", "b")  # as the line says
    else:
        assert len(read_off(tmp_path, "task.class-names=['" + "','".join(top) + "']").class_names) == 2


@pytest.mark.parametrize("names", [("valid", "invalid"), ("Train", "Car"), ("ER+", "ER-"), ("none", "glioma")])
def test_classes_that_look_like_something_else(tmp_path: Path, names: tuple[str, str]) -> None:
    drawn(tmp_path, *names)
    assert set(read_off(tmp_path).class_names) == set(names)
    drawn(tmp_path, f"{names[0]}/test")  # such as a patient's
    assert len(load(read_off(tmp_path)).train)


def test_images_are_known_by_any_suffix_or_their_first_bytes(tmp_path: Path) -> None:
    drawn(tmp_path, "a")
    for folder, suffix in (("b", ".JFIF"), ("c", ""), ("d", ".10008")):
        drawn(tmp_path, folder)
        for file in (tmp_path / folder).iterdir():
            if folder == "d":  # called by a UID, as scanners do
                file.write_bytes(bytes(128) + b"DICM")
            file.rename(file.with_suffix(suffix))
    assert read_off(tmp_path).class_names == ("a", "b", "c", "d")


def test_what_is_not_read_is_said(tmp_path: Path, make: Task, caplog: pytest.LogCaptureFixture) -> None:
    drawn(tmp_path, "a", "b")
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
    drawn(tmp_path, "a", "b", "a/.ipynb_checkpoints", "a/__MACOSX", "a/x/@eaDir", ".git", "__MACOSX", "@eaDir")
    draw(tmp_path / "a" / "._0.png")
    for name in ("Thumbs.db", ".DS_Store", "desktop.ini"):
        (tmp_path / "a" / name).write_text("no image")
    data = load(make(class_names=("a", "b")))
    assert len(data.train) + len(data.test) == len(images_in(tmp_path)) == 8
    assert not caplog.records


def test_folders_called_by_numbers_are_as_many_classes(tmp_path: Path) -> None:
    drawn(tmp_path, "2020", "2021")
    task = read_off(tmp_path)
    assert (task.classes, task.class_names) == (2, ("2020", "2021"))
    assert sorted({*load(task).train.y, *load(task).test.y}) == [0, 1]
    drawn(tmp_path / "plain", "0", "1", "2")
    assert (read_off(tmp_path / "plain").classes, read_off(tmp_path / "plain").class_names) == (3, ())
    drawn(tmp_path / "gap", "0", "2")
    assert (read_off(tmp_path / "gap").classes, read_off(tmp_path / "gap", "task.classes=3").class_names) == (2, ())


@pytest.mark.parametrize("missing", ["nan", "NA", "N/A", "n.a.", "<NA>", "#N/A", "#VALUE!", "?"])
@pytest.mark.parametrize("labels", [["0", "1"], ["ill", "well"]])
def test_missing_labels_are_no_class(tmp_path: Path, missing: str, labels: list[str]) -> None:
    for n in range(9):
        draw(tmp_path / f"{n}.png", n)
    rows = [f"{n}.png,{missing if n in (3, 7) else labels[n % 2]}" for n in range(9)]
    manifest(tmp_path, "image,label", rows)
    named = "task.class-names=['" + "','".join(labels) + "']"
    for more in ((), ("task.classes=2", "task.channels=1"), ("task.classes=2", named)):
        with pytest.raises(DataError, match=rf"2 of 9 have none, the first is '{re.escape(missing)}' .*line 5"):
            load(read_off(tmp_path, *more))
    both = f"{named[:-1]},'{missing}']"
    assert len(load(read_off(tmp_path, "task.classes=3", both)).train)  # a class that is called so, on purpose
    manifest(tmp_path, "image,label", [row.replace(missing, "") for row in rows])
    with pytest.raises(DataError, match=r"'label'; 2 of 9 have none, the first is .*line 5"):
        read_off(tmp_path)


@pytest.mark.parametrize(
    "pair", [("Normal", "normal"), ("grade 1", "grade-1"), ("no tumor", "notumor"), ("a\u200b", "a"), ("ﬁne", "fine")]
)
def test_labels_and_sites_that_are_nearly_the_same_are_asked_about(
    tmp_path: Path, make: Task, pair: tuple[str, str]
) -> None:
    for n in range(9):
        draw(tmp_path / f"{n}.png", n)
    manifest(tmp_path, "image,label", [f"{n}.png,{[*pair, 'ill'][n % 3]}" for n in range(9)])
    with pytest.raises(DataError, match=r"labels must differ by more than spelling; got .*line 3.*line 2"):
        read_off(tmp_path)
    assert len(load(make(classes=3, class_names=(*pair, "ill"))).train)  # as the error says
    manifest(tmp_path, "image,label,site", [f"{n}.png,{n % 2},{[*pair, 'ill'][n % 3]}" for n in range(9)])
    refused(make(), "sites must differ by more than spelling")


@pytest.mark.parametrize("copy", ["cat copy", "Cat - Copy (2)", "cat (1)", "cat (copy)", "cat-copy", "cat copy 2"])
def test_a_copied_folder_is_asked_about(tmp_path: Path, copy: str) -> None:
    drawn(tmp_path, "cat", "dog (1)", "dog (2)", "photocopy", "photo", "cats")
    assert len(read_off(tmp_path).class_names) == 6
    drawn(tmp_path, copy)
    with pytest.raises(DataError, match=rf"differ by more than a copy's mark; got 'cat' .* and '{re.escape(copy)}' "):
        read_off(tmp_path)


@pytest.mark.parametrize("folders", [("1", "01", "2"), ("train/1", "train/2", "test/1.0")])
@pytest.mark.parametrize("more", [(), ("task.class-names=[1,2]",)])
def test_folders_that_are_one_number_are_asked_about(
    tmp_path: Path, folders: tuple[str, ...], more: tuple[str, ...]
) -> None:
    drawn(tmp_path, *folders)
    with pytest.raises(DataError, match=r"a class has one folder; .* are one number: join them"):
        load(read_off(tmp_path, *more))


@pytest.mark.parametrize("pair", [("1", "1.0"), ("01", "1")])
def test_sites_and_patients_that_are_one_number_are_asked_about(
    tmp_path: Path, make: Task, pair: tuple[str, str]
) -> None:
    for n in range(9):
        draw(tmp_path / f"{n}.png", n)
    manifest(tmp_path, "image,label,site", [f"{n}.png,{n % 2},{pair[n % 2]}" for n in range(9)])
    refused(make(), "sites must differ by more than spelling")
    patients = [f"{n}.png,{n % 2},{pair[n > 4]},{'test' if n > 4 else 'train'}" for n in range(9)]
    manifest(tmp_path, "image,label,patient,split", patients)
    refused(make(), "patients must differ by more than spelling", "line 7")
    manifest(tmp_path, "image,label,patient,split,site", [f"{row},s{n > 4}" for n, row in enumerate(patients)])
    assert len(load(make()).train)  # of two sites, they are two


@pytest.mark.parametrize("missing", ["nan", "NA", "#N/A"])
def test_a_site_that_is_missing_is_none_and_neither_is_a_patient(tmp_path: Path, make: Task, missing: str) -> None:
    for n in range(9):
        draw(tmp_path / f"{n}.png", n)
    manifest(tmp_path, "image,label,site", [f"{n}.png,{n % 2},{missing if n % 3 else 'x'}" for n in range(9)])
    refused(make(), f"'site'; 6 of 9 have none, the first is {missing} (", "line 3")
    manifest(tmp_path, "image,label,patient", [f"{n}.png,{n % 2},{missing if n else 'p'}" for n in range(9)])
    patients = load(make()).train.patients
    assert patients is not None
    assert len(set(patients)) == len(patients)


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_folders_in_both_unicode_forms_are_one_class(tmp_path: Path, form: Any) -> None:
    drawn(tmp_path, unicodedata.normalize("NFC", "sé"), "x", unicodedata.normalize(form, "sé"))
    assert read_off(tmp_path).class_names == ("sé", "x")


def test_manifest_with_splits_and_number_labels(tmp_path: Path, make: Task) -> None:
    for n in range(4):
        draw(tmp_path / "images" / f"{n}.png", n)
    rows = ["images/2.png,1,test", "images/0.png,0,train", "images/3.png,1.0,val", "images/1.png,1,train"]
    manifest(tmp_path, "image,label,split", rows)
    data = load(make())
    assert values(data) == ([0, 1], [2])
    assert data.train.y.tolist() == [0, 1]
    assert data.val is not None
    assert data.val.y.tolist() == [1]


def test_one_site_alone_gets_the_bits_it_has_among_all(tmp_path: Path, make: Task) -> None:
    """What a deployment rests on: each institution reads its own rows, a simulation reads all of them."""
    rng = np.random.default_rng(0)
    sites = rng.permutation(np.repeat(["c", "a", "b"], [17, 30, 6]))
    rows = []
    for n, site in enumerate(sites):
        draw(tmp_path / "all" / site / f"{n}.png", n)
        rows.append(f"{site}/{n}.png,{'ill' if n % 2 else 'healthy'},{site}")
    manifest(tmp_path / "all", "image,label,site", rows)
    names = ("healthy", "ill")
    whole = load(make(data_dir=str(tmp_path / "all"), class_names=names))
    part = partition(whole, PartitionConfig(name="natural"), 3, 0)
    assert part.names == ("a", "b", "c")
    for k, name in enumerate(part.names):
        own = [row.removeprefix(f"{name}/") for row in rows if row.endswith(f",{name}")]  # a site has its own folders
        for kind, header in (("with", "image,label,site"), ("without", "image,label")):
            folder = tmp_path / f"{name}-{kind}"
            manifest(folder, header, own if kind == "with" else [row.rpartition(",")[0] for row in own])
            for row in own:
                shutil.copy(tmp_path / "all" / name / row.split(",")[0], folder)
            alone, among = load(make(data_dir=str(folder), class_names=names)), part.examples(whole, k)
            for split in ("train", "test"):
                a, b = getattr(alone, split), getattr(among, split)
                np.testing.assert_array_equal(a.x, b.x)
                np.testing.assert_array_equal(a.y, b.y)
                assert len(a)


def dealt_to(folder: Path, task: TaskConfig) -> dict[int, str]:
    data = load(task)
    return {int(x[0, 0, 0]): split for split in ("train", "test") for x in getattr(data, split).x}


def test_one_patient_more_moves_nobody_else(tmp_path: Path, make: Task) -> None:
    """What an epsilon is for: neighbouring data differ by one example, wherever it stands in the table."""
    for n in range(61):
        draw(tmp_path / f"{n}.png", n)
    rows = [f"{n}.png,{n % 2}" for n in range(61)]
    manifest(tmp_path, "image,label", rows[1:])
    before = dealt_to(tmp_path, make())
    assert 4 < list(before.values()).count("test") < 30
    for changed in (rows, [*rows[1:], rows[0]], rows[:30:-1] + rows[30::-1]):
        manifest(tmp_path, "image,label", changed)
        after = dealt_to(tmp_path, make())
        assert {n: split for n, split in after.items() if n} == before
    manifest(tmp_path, "image,label", rows[2:])
    assert dealt_to(tmp_path, make()).items() <= before.items()


def test_one_image_more_in_a_class_folder_moves_nobody_else(tmp_path: Path, make: Task) -> None:
    for n in range(40):
        draw(tmp_path / str(n % 2) / f"{n}.png", n)
    before = dealt_to(tmp_path, make())
    draw(tmp_path / "0" / "00.png", 200)
    after = dealt_to(tmp_path, make())
    assert after.pop(200)
    assert after == before


def test_all_images_of_a_patient_lie_on_one_side(tmp_path: Path, make: Task) -> None:
    for n in range(60):
        draw(tmp_path / f"{n}.png", n)
    rows = [f"{n}.png,{n % 2},{f'p{n // 3}' if n < 45 else ''}" for n in range(60)]
    manifest(tmp_path, "image,label,patient", rows)
    dealt = dealt_to(tmp_path, make())
    assert all(len({dealt[3 * p + n] for n in range(3)}) == 1 for p in range(15))
    assert len({dealt[n] for n in range(45, 60)}) == 2


@pytest.mark.parametrize(
    ("column", "meant"),
    [
        ("PatientID", "patient"),
        ("patient_id", "patient"),
        ("Patient", "patient"),
        ("Site", "site"),
        ("Splits", "split"),
    ],
)
def test_a_column_that_is_named_nearly_as_one_that_is_read(tmp_path: Path, make: Task, column: str, meant: str) -> None:
    """Unread, a patient would be in training and test, and nobody would say so."""
    for n in range(4):
        draw(tmp_path / f"{n}.png", n)
    manifest(tmp_path, f"image,label,{column}", [f"{n}.png,{n % 2},train" for n in range(4)])
    refused(make(), f"{column!r}", f"call it {meant!r}")
    manifest(
        tmp_path, f"image,label,{column},{meant}", [f"{n}.png,{n % 2},x,{'train' if n else 'test'}" for n in range(4)]
    )
    assert len(load(make()).train) + len(load(make()).test) == 4


def test_other_columns_are_not_read(tmp_path: Path, make: Task) -> None:
    for n in range(4):
        draw(tmp_path / f"{n}.png", n)
    manifest(tmp_path, "age,id,image,,label,image_id", [f",{n},{n}.png,,{n % 2},{n}" for n in range(4)])
    assert len(load(make()).train) + len(load(make()).test) == 4


def test_a_manifest_without_rows(tmp_path: Path) -> None:
    manifest(tmp_path, "image,label", [])
    with pytest.raises(DataError, match="a row for each image; got none"):
        resolve(["task=folder", f"task.data_dir='{tmp_path}'", "nodes=2"], "", "")


def test_two_patients_lie_on_two_sides(tmp_path: Path, make: Task) -> None:
    for n in range(8):
        draw(tmp_path / f"{n}.png", n)
    for first in range(7):
        manifest(tmp_path, "image,label", [f"{first}.png,0", f"{first + 1}.png,1"])
        assert sorted(dealt_to(tmp_path, make()).values()) == ["test", "train"]


def test_images_that_one_can_see_through_are_refused(tmp_path: Path, make: Task) -> None:
    draw(tmp_path / "0" / "a.png")
    (tmp_path / "1").mkdir()
    pixels = np.full((8, 8, 4), 255, np.uint8)
    Image.fromarray(pixels).save(tmp_path / "1" / "b.png")
    assert len(load(make()).train) == 1
    pixels[0, 0, 3] = 254
    Image.fromarray(pixels).save(tmp_path / "1" / "b.png")
    refused(make(), "must be opaque", "b.png", "alpha channel")


def test_another_site_column(tmp_path: Path, make: Task) -> None:
    for n in range(4):
        draw(tmp_path / f"{n}.png", n)
    manifest(tmp_path, "image,label,hospital", [f"{n}.png,{n % 2},{'xy'[n // 2]}" for n in range(4)])
    assert load(make()).train.sites is None
    sites = load(make(site_column="hospital")).train.sites
    assert sites is not None
    assert sites.tolist() == ["x", "y"]
    refused(make(site_column="hospitl"), "'hospitl'", "did you mean hospital?")


def test_colour_and_grey_follow_the_channels(tmp_path: Path, make: Task) -> None:
    draw(tmp_path / "0" / "a.png", 7)
    draw(tmp_path / "1" / "b.png", 9, mode="RGB")
    for channels in (1, 3):
        data = load(make(channels=channels))
        assert data.train.x.shape == (1, channels, 8, 8)
        assert {int(part.x.mean()) for part in (data.train, data.test)} == {7, 9}
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


def test_manifests_that_are_wrong(tmp_path: Path, make: Task) -> None:
    draw(tmp_path / "a.png")
    draw(tmp_path / "c.png")
    manifest(tmp_path, "image,lable", ["a.png,0"])
    refused(make(), "'label'", "did you mean lable?")
    manifest(tmp_path, "image,label", ["a.png,0", "a.png"])
    refused(make(), "'label'", "line 3")
    manifest(tmp_path, "image,label,split", ["a.png,0,training"])
    refused(make(), "'training'", "line 2")
    manifest(tmp_path, "image,label", ["a.png,0", "c.png,2"])
    refused(make(), "0..1", "got '2'", "line 3")
    manifest(tmp_path, "image,label", ["a.png,99999999999999999999999"])
    refused(make(), "0..1", "line 2")
    (tmp_path / "link.png").symlink_to("a.png")
    for again in ("a.png", "./a.png", "../" + tmp_path.name + "/a.png", "link.png"):
        manifest(tmp_path, "image,label", ["a.png,0", f"{again},1"])
        refused(make(), "listed once", "line 2 and in", "line 3")
    manifest(tmp_path, "image,label", ["a.png,0", "c.png,one"])
    refused(make(), "all numbers or all names; got 'one' and '0'", "line 2")
    for label in ("9" * 5000, "x" * 5000):
        manifest(tmp_path, "image,label", [f"a.png,{label}", "c.png,0" if label[0] == "9" else "c.png,ill"])
        with pytest.raises(DataError) as caught:
            load(make(class_names=("healthy", "ill")) if label[0] == "x" else make())
        assert len(str(caught.value)) < 400
    manifest(tmp_path, "image,label", ["a.png," + "x" * 200_000])
    refused(make(), "field larger than field limit")
    manifest(tmp_path, "image,label,label", ["a.png,0,1"])
    refused(make(), "two are named 'label'")
    manifest(tmp_path, "image,label", ["a.png,0,1"])
    refused(make(), "2 cells", "line 2 has more")
    manifest(tmp_path, "image,label", ["a.png,-1"])
    refused(make(), "got '-1'")
    manifest(tmp_path, "image,label", ["a.png,helthy", "c.png,ill"])
    refused(make(class_names=("healthy", "ill")), "'helthy'", "line 2", "did you mean healthy?")
    manifest(tmp_path, "image,label", ["a\0.png,0", "a.png,1"])
    refused(make(), "manifest.csv", "zero bytes")
    manifest(tmp_path, "image,label", ["b.png,0", "a.png,1"])
    refused(make(), "b.png", "line 2", "does not exist")
    (tmp_path / "manifest.csv").write_bytes(b"image,label\n\xff\xfe,0\n")
    refused(make(), "manifest.csv", "UTF-8")


def test_names_are_numbered_by_the_class_names_only(tmp_path: Path, make: Task) -> None:
    draw(tmp_path / "a.png")
    draw(tmp_path / "b.png", 1)
    for labels in (("ill", "ill"), ("ill", "sick")):  # another institution may have healthy and ill
        manifest(tmp_path, "image,label", [f"{name}.png,{label}" for name, label in zip("ab", labels, strict=True)])
        refused(make(), "are names", "ill", "set task.class-names to all 2 of them")
    manifest(tmp_path, "image,label", ["a.png,ill", "b.png,ill"])
    assert load(make(class_names=("healthy", "ill"))).train.y.tolist() == [1]


def test_a_manifests_labels_are_names_and_no_positions_among_them(tmp_path: Path, make: Task) -> None:
    for n in range(4):
        draw(tmp_path / f"{n}.png", n)
    task = make(classes=4, class_names=("1", "2", "3", "4"))
    manifest(tmp_path, "image,label", [f"{n}.png,{n}" for n in range(4)])
    refused(task, "unknown class '0'", "line 2", "known: 1, 2, 3, 4")  # once three classes, without a word
    manifest(tmp_path, "image,label", [f"{n}.png,{label}" for n, label in enumerate(("1", "2.0", "03", "+4"))])
    data = load(task)
    assert sorted([*data.train.y, *data.test.y]) == [0, 1, 2, 3]


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


@pytest.mark.parametrize("labels", ["{}.5", "{}"])
@pytest.mark.parametrize("more", [(), ("task.classes=1",), ("task.classes=1", "task.class-names=[a]")])
def test_images_with_numbers_are_told_so_at_once(tmp_path: Path, labels: str, more: tuple[str, ...]) -> None:
    """One advice led to the next refusal, and the last to the first."""
    for n in range(9):
        draw(tmp_path / f"{n}.png", n)
    manifest(tmp_path, " image , label ", [f"{n}.png,{labels.format(n) if n else 20}" for n in range(9)])
    with pytest.raises(ConfigError, match=r"task=folder has classes only; got task\.kind=regression"):
        read_off(tmp_path, "task.kind=regression", *more)


def test_a_site_of_one_image_is_told_what_helps(tmp_path: Path, make: Task) -> None:
    for n in range(9):
        draw(tmp_path / f"{n}.png", n)
    manifest(tmp_path, "image,label,site", [f"{n}.png,{n % 2},{'B' if n == 4 else 'AC'[n > 4]}" for n in range(9)])
    with pytest.raises(
        DataError, match=r"B of 3 got none with partition=natural: add test examples of B, or leave it out"
    ):
        partition(load(make()), PartitionConfig(name="natural"), 3, 0)


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


def test_shared_microscopy(shared: Path, tmp_path: Path, make: Task) -> None:
    """Real grey PNG files, read where they lie: a manifest may name files elsewhere."""
    files = sorted((shared / "isbi2012").glob("image_*.png"))[:5]
    manifest(tmp_path, "image,label", [f"{file},{n % 2}" for n, file in enumerate(files)])
    data = load(make(size=512))
    assert (data.train.x.shape, data.test.x.shape) == ((4, 1, 512, 512), (1, 1, 512, 512))
    assert 50 < data.train.x.mean() < 200
