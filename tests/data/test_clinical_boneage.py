"""Bone age: boys' hands in months, the set's own test images or some of the training images."""

import numpy as np
import pytest
from clinical import draw, levels, read, refused, truncate, write_csv

SIZE = ("task.size=8",)
TRAINING, TRUTH = "boneage-training-dataset", "Bone age ground truth.csv"
TRUTH_COLUMNS = "Case ID,Sex,Ground truth bone age (months)"


@pytest.fixture
def folder(tmp_path):
    """Twelve children, every third a girl without an image; a boy's grey level is his age."""
    write_csv(tmp_path / f"{TRAINING}.csv", "id,boneage,male", [(1000 + n, 100 + n, n % 3 > 0) for n in range(12)])
    for n in range(12):
        if n % 3:
            draw(tmp_path / TRAINING / f"{1000 + n}.png", 100 + n)
    write_csv(tmp_path / TRUTH, TRUTH_COLUMNS, [(4360, "M", 180.5), (4361, "F", 90), (4362, "M", 31)])
    draw(tmp_path / "boneage-test-dataset" / "4360.png", 180)
    draw(tmp_path / "boneage-test-dataset" / "4362.png", 31)
    return tmp_path


def test_boys_only_with_their_own_ages(folder):
    data = read("boneage", folder, *SIZE)
    assert sorted(levels(data.train)) == [100 + n for n in range(12) if n % 3]
    np.testing.assert_array_equal(levels(data.train), data.train.y)
    assert data.test.y.tolist() == [180.5, 31]
    assert levels(data.test) == [180, 31]
    assert data.train.x.shape[1:] == (1, 8, 8)
    assert data.train.y.dtype == np.float32


def test_sizes_leave_the_rest_out_and_a_test_size_draws_from_the_training_images(folder):
    data = read("boneage", folder, *SIZE, "task.train_size=4", "task.val_size=2")
    assert (len(data.train), len(data.val), len(data.test)) == (4, 2, 2)
    (folder / TRUTH).unlink()
    refused("boneage", folder, "tests on the set's own test images", "lists none", "task.test-size", overrides=SIZE)
    data = read("boneage", folder, *SIZE, "task.test_size=3")
    assert (len(data.train), len(data.test)) == (5, 3)
    assert not set(levels(data.train)) & set(levels(data.test))


def test_kaggles_folder_within_a_folder(folder):
    flat = read("boneage", folder, *SIZE)
    for name in (TRAINING, "boneage-test-dataset"):
        (folder / name).rename(folder / "inner")
        (folder / name).mkdir()
        (folder / "inner").rename(folder / name / name)
    nested = read("boneage", folder, *SIZE)
    np.testing.assert_array_equal(nested.train.x, flat.train.x)
    np.testing.assert_array_equal(nested.test.x, flat.test.x)


def test_what_is_wrong_is_named(folder):
    image = folder / TRAINING / "1004.png"
    whole = truncate(image)
    refused("boneage", folder, image, "cannot be read", overrides=SIZE)
    image.unlink()
    refused("boneage", folder, image, "does not exist", overrides=SIZE)
    image.write_bytes(whole)
    table = folder / f"{TRAINING}.csv"
    for row, words in (
        ((1004, "ten", "True"), ("'boneage'", "'ten'", "1004")),
        ((1004, 500, "True"), ("0 to 300", "'500'")),
        ((1004, "nan", "True"), ("'nan'",)),
        ((1004, 104, "boy"), ("'male'", "'boy'", "1004")),
        ((1004, 104), ("'male'", "''", "1004")),
    ):
        write_csv(table, "id,boneage,male", [row])
        refused("boneage", folder, table, *words, overrides=SIZE)
    write_csv(table, "id,age,male", [(1004, 104, "True")])
    refused("boneage", folder, table, "'boneage'", overrides=SIZE)
    table.unlink()
    refused("boneage", folder, table, "does not exist", overrides=SIZE)
