"""Tables and slices: what a row and a patch hold, what is imputed from whom, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flwr_replay.config.compose import compose
from flwr_replay.data import load, partition
from flwr_replay.data.partitions import scaled_contrast
from flwr_replay.data.tables import CATEGORIES, NUMBERS
from flwr_replay.errors import ConfigError, DataError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
HEADER = ",".join(f"X{i}" for i in range(1, 15))
ROW = "54,1,4,130,240,0,0,140,0,1,2,0,3,1"


def heart(folder, **hospitals):
    for name, rows in hospitals.items():
        (folder / f"processed.{name}.data").write_text("\n".join([HEADER, *rows]) + "\n")
    return compose(["task=heart_disease", "split=test", f"task.data-dir={folder}"]).task


def column(name):
    return [entry[0] for entry in NUMBERS.values()].index(name)


def test_diabetes_is_whole_and_standardised():
    dataset = load(compose(["task=diabetes", "split=test"]).task)
    assert (len(dataset.train), len(dataset.test)) == (354, 88)
    x = np.concatenate([dataset.train.x, dataset.test.x])[:, :, 0, 0]
    np.testing.assert_allclose(x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(x.std(0), 1, atol=1e-5)
    assert dataset.train.y.dtype == np.float32
    assert 25 <= dataset.train.y.min() <= dataset.train.y.max() <= 346


def test_a_patient_at_the_centre_is_zeros_and_one_category_of_each(tmp_path):
    dataset = load(heart(tmp_path, a=[ROW] * 10))
    x = dataset.train.x[0, :, 0, 0]
    binary = {column(name) for name in ("sex", "fbs", "exang")}
    ca = column("ca")
    assert all(x[i] == 0 for i in range(len(NUMBERS)) if i not in binary | {ca})
    assert x[ca] == -1
    codes = x[len(NUMBERS) :]
    ends = np.cumsum([len(values) for _, values in CATEGORIES.values()])
    assert [codes_of.sum() for codes_of in np.split(codes, ends[:-1])] == [1, 1, 1, 1]


def test_missing_values_are_the_training_medians_of_the_same_hospital(tmp_path):
    rows = [ROW.replace("240", str(200 + 10 * i)) for i in range(10)] + [ROW.replace("240", "?")] * 10
    other = [ROW.replace("240", "500")] * 10
    missing = [ROW.replace("240", "0")] * 10  # 0 is no cholesterol
    task = heart(tmp_path, a=rows, b=other, c=missing)
    dataset, chol = load(task), column("chol")
    for site, values in {"b": {500}, "c": {240}}.items():
        shown = dataset.train.x[dataset.train.sites == site][:, chol, 0, 0] * 55 + 240
        assert set(np.rint(shown)) == values
    own = np.rint(dataset.train.x[dataset.train.sites == "a"][:, chol, 0, 0] * 55 + 240)
    measured, repeated = np.unique(own, return_counts=True)
    imputed = measured[repeated.argmax()]
    known = [value for value in own if value != imputed] + [imputed] * int(imputed in 200 + 10 * np.arange(10))
    assert imputed == pytest.approx(np.median(known), abs=5)
    assert (dataset.test.x[dataset.test.sites == "a"][:, chol, 0, 0] * 55 + 240 <= 290).all()


def test_labels_are_binary_and_every_hospital_keeps_a_fifth_for_testing(tmp_path):
    rows = [f"{ROW[:-1]}{label}" for label in (0, 1, 2, 3, 4)] * 4
    dataset = load(heart(tmp_path, a=rows, b=rows[:10]))
    assert sorted(np.concatenate([dataset.train.y, dataset.test.y])) == [0] * 6 + [1] * 24
    assert [int((dataset.test.sites == site).sum()) for site in "ab"] == [4, 2]


@pytest.mark.parametrize(
    ("row", "reported"),
    [
        ("54,1,4", "must have 14 values; line 2 has 3"),
        (ROW.replace("130", "high"), r"must be finite numbers, or \? where they are missing; got 'high' in .* line 2"),
        (ROW.replace("130", "1_30"), r"must be finite numbers, .* got '1_30'"),
        (ROW.replace("130", "nan"), r"must be finite numbers, .* got 'nan'"),
        (ROW.replace("130", "1e999"), r"must be finite numbers, .* got '1e999'"),
        (ROW.replace("130", "9" * 5000), r"must be finite numbers, .* got '9{40}…'"),
        (f"{ROW[:-1]}7", "must be 0 to 4; line 2 has '7'"),
        (ROW.replace(",4,130", ",9,130"), r"cp in .* must be one of \(1, 2, 3, 4\); line 2"),
    ],
)
def test_a_faulty_row_is_named(tmp_path, row, reported):
    with pytest.raises(DataError, match=reported) as error:
        load(heart(tmp_path, a=[row] * 5))
    assert "processed.a.data" in str(error.value)


def test_a_table_that_is_none_is_reported_in_one_line(tmp_path):
    task = heart(tmp_path, a=[])
    for content in (bytes(range(256)), b"\xff\xfe", b'"' + b"9" * 200_000):
        (tmp_path / "processed.a.data").write_bytes(content)
        with pytest.raises(DataError, match="must be a table of numbers in UTF-8; it cannot be read") as error:
            load(task)
        assert "\n" not in str(error.value)


def test_without_files_or_rows_it_says_so(tmp_path):
    with pytest.raises(DataError, match="must hold patients; got none"):
        load(heart(tmp_path, a=[]))
    (tmp_path / "processed.a.data").unlink()
    with pytest.raises(DataError, match="needs processed"):
        load(heart(tmp_path))
    with pytest.raises(ConfigError, match="set task"):
        load(compose(["task=heart_disease"]).task)


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data, which a user's checkout does not have")
def test_the_four_real_hospitals():
    config = compose(["task=heart_disease", "split=test", f"task.data-dir={SHARED / 'heart-disease'}"])
    dataset = load(config.task)
    assert len(dataset.train) + len(dataset.test) == 303 + 294 + 123 + 200
    dealing = partition(dataset, config.partition, 4, 0)
    assert dealing.names == ("cleveland", "hungarian", "switzerland", "va")
    assert dealing.ks == pytest.approx(0.34, abs=0.02)
    assert np.isfinite(dataset.train.x).all()


# --- slices ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def slices(tmp_path):
    rng = np.random.default_rng(0)
    for number in range(10):
        image = np.full((64, 64), number, np.uint8)
        image[0, 0] = 200
        Image.fromarray(image).save(tmp_path / f"image_{number:02d}.png")
        mask = (rng.random((64, 64)) < 0.1 * number) * np.uint8(255)
        Image.fromarray(mask).save(tmp_path / f"label_{number:02d}.png")
    return tmp_path


def isbi(folder, *options):
    return compose(["task=isbi2012", f"task.data-dir={folder}", "task.size=32", *options]).task


def test_the_last_slices_test_and_a_gap_before_them_is_unused(slices):
    dataset = load(isbi(slices))
    of = {split: {int(v) for v in np.unique(getattr(dataset, split).x) if v < 200} for split in ("train", "test")}
    assert of == {"train": set(range(6)), "test": {8, 9}}
    assert (len(dataset.train), len(dataset.test)) == (6 * 4, 2 * 4)


def test_patches_are_the_slices_cut_and_labels_go_with_them(slices):
    dataset = load(isbi(slices))
    assert dataset.train.x.shape == (24, 1, 32, 32)
    assert dataset.train.y.shape == (24, 32, 32)
    assert [int(x.max()) for x in dataset.train.x[:4]] == [200, 0, 0, 0]  # the corner is in the first patch only
    whole = 1 - np.asarray(Image.open(slices / "label_03.png")) // 255
    assert (dataset.train.y[12] == whole[:32, :32]).all()
    assert (dataset.train.y[13] == whole[:32, 32:]).all()
    np.testing.assert_allclose(dataset.train.labels, dataset.train.y.reshape(24, -1).mean(1), rtol=1e-6)


def test_institutions_can_differ_in_the_share_of_cells_and_in_contrast(slices):
    config = compose(
        ["task=isbi2012", f"task.data-dir={slices}", "task.size=32", "partition=ks", "ks=0.9", "contrast=0.5"]
    )
    dataset = load(config.task)
    dealing = partition(dataset, config.partition, 3, 0)
    assert dealing.ks == pytest.approx(0.9, abs=0.03)
    spread = [int(dealing.examples(dataset, k).train.x.max()) for k in range(3)]
    assert spread == sorted(spread)
    assert (dealing.examples(dataset, 1).train.x == dataset.train.take(dealing.train[1]).x).all()
    assert scaled_contrast(np.array([0, 127, 128, 255], np.uint8), 0.5).tolist() == [64, 127, 128, 191]
    assert scaled_contrast(np.array([0, 100, 255], np.uint8), 1.5).tolist() == [0, 86, 255]


def test_faulty_slices_are_named(slices):
    with pytest.raises(ConfigError, match="must divide a slice"):
        load(isbi(slices, "task.size=48"))
    (slices / "label_02.png").unlink()
    with pytest.raises(DataError, match=r"label_02.png does not exist"):
        load(isbi(slices))
    Image.fromarray(np.full((64, 64), 7, np.uint8)).save(slices / "label_02.png")
    with pytest.raises(DataError, match=r"0 \(membrane\) and 255 \(cell\) only; .*label_02.png holds"):
        load(isbi(slices))
    (slices / "label_02.png").write_bytes((slices / "label_01.png").read_bytes()[:50])
    with pytest.raises(DataError, match=r"label_02.png must be an image; it cannot be read"):
        load(isbi(slices))
