"""ISIC 2019: melanoma or not, three hospitals, all images of a lesion together."""

import numpy as np
import pytest
from clinical import draw, read, refused, truncate, write_csv
from PIL import Image

SIZE = ("task.size=8",)
TRUTH, METADATA = "ISIC_2019_Training_GroundTruth.csv", "ISIC_2019_Training_Metadata.csv"
TRUTH_COLUMNS = "image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK"
METADATA_COLUMNS = "image,age_approx,anatom_site_general,lesion_id,sex"
HOSPITALS = ("BCN", "HAM", "MSK4")


def name(n):
    return f"ISIC_{n:07d}{'_downsampled' if n % 7 == 0 else ''}"


def diagnosed(n):
    """Every third image is of a melanoma, the others of a naevus."""
    return (name(n), *("1.0" if column == (n % 3 > 0) else "0.0" for column in range(9)))


def write(folder, numbers):
    write_csv(folder / TRUTH, TRUTH_COLUMNS, map(diagnosed, numbers))
    rows = [(name(n), 55.0, "", f"{HOSPITALS[n // 16]}_{n // 2:07d}" if n % 16 < 14 else "", "male") for n in numbers]
    write_csv(folder / METADATA, METADATA_COLUMNS, rows)
    for n in numbers:
        draw(folder / "ISIC_2019_Training_Input" / f"{name(n)}.jpg", 5 * n, mode="RGB")


@pytest.fixture
def folder(tmp_path):
    """48 images, 16 for each hospital: seven lesions of two images, and two images without a lesion's id."""
    write(tmp_path, range(48))
    return tmp_path


def numbers_of(split):
    """Which image each example is: its grey level is five times its number."""
    return [round(int(x[0, 4, 4]) / 5) for x in split.x]


def test_labels_hospitals_lesions_and_what_is_left_out(folder):
    data = read("isic", folder, *SIZE)
    by_split = {split: numbers_of(getattr(data, split)) for split in ("train", "test")}
    assert sorted(by_split["train"] + by_split["test"]) == [n for n in range(48) if n % 16 < 14]
    assert not {n // 2 for n in by_split["train"]} & {n // 2 for n in by_split["test"]}
    for split, numbers in by_split.items():
        examples = getattr(data, split)
        assert examples.y.tolist() == [int(n % 3 == 0) for n in numbers]
        assert examples.sites.tolist() == [HOSPITALS[n // 16] for n in numbers]
        assert set(examples.sites) == set(HOSPITALS)


def test_a_hospital_alone_has_the_examples_that_it_has_among_all(folder, tmp_path_factory):
    own = tmp_path_factory.mktemp("own")
    write(own, range(16, 32))
    whole, alone = read("isic", folder, *SIZE), read("isic", own, *SIZE)
    for split in ("train", "test"):
        among = getattr(whole, split)
        np.testing.assert_array_equal(getattr(alone, split).x, among.x[among.sites == "HAM"])


def test_sizes_are_lesions(folder):
    data = read("isic", folder, *SIZE, "task.train_size=9", "task.val_size=3", "task.test_size=3")
    assert (len(data.train), len(data.val), len(data.test)) == (18, 6, 6)


def test_the_middle_square_is_kept(folder):
    pixels = np.zeros((20, 40, 3), np.uint8)
    pixels[:, 10:30] = 200
    Image.fromarray(pixels).save(folder / "ISIC_2019_Training_Input" / f"{name(1)}.jpg", quality=100)
    write_csv(folder / TRUTH, TRUTH_COLUMNS, map(diagnosed, (1, 20)))
    data = read("isic", folder, *SIZE, "task.test_size=1")
    kept = next(x for split in (data.train, data.test) for x in split.x if x.mean() > 150)
    assert kept[:, 1:-1, 1:-1].min() >= 190


def test_what_is_wrong_is_named(folder):
    image = folder / "ISIC_2019_Training_Input" / f"{name(4)}.jpg"
    whole = truncate(image)
    refused("isic", folder, image, "cannot be read", overrides=SIZE)
    image.unlink()
    refused("isic", folder, image, "does not exist", overrides=SIZE)
    image.write_bytes(whole)
    for row in (
        (name(4), *["0.0"] * 9),
        (name(4), *["1.0"] * 2, *["0.0"] * 7),
        (name(4), "yes", *["0"] * 8),
        (name(4),),
    ):
        write_csv(folder / TRUTH, TRUTH_COLUMNS, [row])
        refused("isic", folder, folder / TRUTH, "exactly one diagnosis", name(4), overrides=SIZE)
    write_csv(folder / TRUTH, TRUTH_COLUMNS.replace("MEL", "MELANOMA"), [])
    refused("isic", folder, folder / TRUTH, "'MEL'", overrides=SIZE)
    write_csv(folder / TRUTH, TRUTH_COLUMNS, [diagnosed(4), diagnosed(99)])
    refused("isic", folder, folder / METADATA, name(99), "are both files complete?", overrides=SIZE)
    write_csv(folder / TRUTH, TRUTH_COLUMNS, [diagnosed(4)])
    write_csv(folder / METADATA, METADATA_COLUMNS, [(name(4), 55.0, "", "XYZ_0000001", "male")])
    refused("isic", folder, folder / METADATA, "'XYZ_0000001'", name(4), overrides=SIZE)
    write_csv(folder / METADATA, "image,sex", [(name(4), "male")])
    refused("isic", folder, folder / METADATA, "'lesion_id'", overrides=SIZE)
    (folder / METADATA).unlink()
    refused("isic", folder, folder / METADATA, "does not exist", overrides=SIZE)


def test_balanced_tests_keep_lesions_together(folder):
    data = read("isic", folder, *SIZE, "task.balanced=true")
    tested, trained = ({n // 2 for n in numbers_of(split)} for split in (data.test, data.train))
    assert tested
    assert not tested & trained
    assert set(data.test.sites.tolist()) == set(HOSPITALS)
