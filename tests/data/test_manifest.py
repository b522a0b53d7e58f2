"""A folder's `manifest.csv`: labels, sites, patients and splits, and the same bits for one site as for all."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from folders import draw, manifest, read_off, refused, values

from flwr_replay.config.sections import PartitionConfig, TaskConfig
from flwr_replay.data import load, partition
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.runs.options import resolve

Task = Callable[..., TaskConfig]


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


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("p0", "patients must differ by more than spelling"),  # beside P0
        ("1.2E+11", "a patient must have a whole value; got 1.2E+11"),
        ('"7', "all quotes closed; it cannot be read"),  # the rest of the file would be one cell
        ('"7\nb.png,1,"8', "all quotes closed; it cannot be read"),
    ],
)
def test_a_table_that_a_spreadsheet_or_a_hand_has_spoilt_is_refused(
    tmp_path: Path, make: Task, cell: str, message: str
) -> None:
    manifest(tmp_path, "image,label,patient", ["a.png,0,P0", f"b.png,1,{cell}", "c.png,0,9"])
    refused(make(), message)


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
    dealing = partition(whole, PartitionConfig(name="natural"), 3, 0)
    assert dealing.names == ("c", "a", "b")  # of the training rows in their order
    for k, name in enumerate(dealing.names):
        own = [row.removeprefix(f"{name}/") for row in rows if row.endswith(f",{name}")]  # a site has its own folders
        for kind, header in (("with", "image,label,site"), ("without", "image,label")):
            folder = tmp_path / f"{name}-{kind}"
            manifest(folder, header, own if kind == "with" else [row.rpartition(",")[0] for row in own])
            for row in own:
                shutil.copy(tmp_path / "all" / name / row.split(",")[0], folder)
            alone, among = load(make(data_dir=str(folder), class_names=names)), dealing.examples(whole, k)
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


def test_another_site_column(tmp_path: Path, make: Task) -> None:
    for n in range(4):
        draw(tmp_path / f"{n}.png", n)
    manifest(tmp_path, "image,label,hospital", [f"{n}.png,{n % 2},{'xy'[n // 2]}" for n in range(4)])
    assert load(make()).train.sites is None
    sites = load(make(site_column="hospital")).train.sites
    assert sites is not None
    assert sites.tolist() == ["x", "y"]
    refused(make(site_column="hospitl"), "'hospitl'", "did you mean hospital?")


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
        refused(make(), "are names", "ill", "task.classes to their number; it is 2")
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


def test_shared_microscopy(shared: Path, tmp_path: Path, make: Task) -> None:
    """Real grey PNG files, read where they lie: a manifest may name files elsewhere."""
    files = sorted((shared / "isbi2012").glob("image_*.png"))[:5]
    manifest(tmp_path, "image,label", [f"{file},{n % 2}" for n, file in enumerate(files)])
    data = load(make(size=512))
    assert (data.train.x.shape, data.test.x.shape) == ((4, 1, 512, 512), (1, 1, 512, 512))
    assert 50 < data.train.x.mean() < 200
