"""Retina: grades to labels, left eyes only, and Graham's preprocessing by its own formula."""

import numpy as np
import pytest
from clinical import eye, loaded, photograph, read, refused, truncate, write_csv
from PIL import Image

from flwr_replay.convert.retina import graham
from flwr_replay.errors import DataError

SIZE = ("task.size=16",)
BALANCED = ("task.balanced=true", "task.train_size=4", "task.test_size=2")


@pytest.fixture
def folder(tmp_path):
    """Ten patients with both eyes, grades 0 to 4; the images of right eyes and of grade 1 are not even there."""
    rows = []
    for n in range(10):
        rows += [(f"{n}_left", n % 5), (f"{n}_right", 4 - n % 5)]
        if n % 5 != 1:
            photograph(tmp_path / "train", f"{n}_left", n)
    write_csv(tmp_path / "trainLabels.csv", "image,level", rows)
    return tmp_path


def test_left_eyes_without_grade_1(folder):
    data = read("retina", folder, *SIZE)
    y = np.concatenate([data.train.y, data.test.y])
    assert sorted(y.tolist()) == [0] * 2 + [1] * 6
    assert data.train.x.shape == (len(data.train), 3, 16, 16)
    assert data.train.sites is None
    assert data.val is None
    # Every image has the label of its own grade.
    graded = {
        graham(np.asarray(Image.open(path)), 16).tobytes(): int(path.stem[0]) % 5 for path in folder.rglob("*.jpeg")
    }
    for split in (data.train, data.test):
        assert [int(graded[x.tobytes()] >= 2) for x in split.x] == split.y.tolist()


def test_balanced_sizes_and_the_published_test_set(folder):
    refused(
        "retina", folder, "train on 4, validate on 0 and test on 2", "got 4 in 2 classes", overrides=(*SIZE, *BALANCED)
    )
    for n in range(4):
        photograph(folder / "test", f"{n}_left", 20 + n)
    write_csv(
        folder / "retinopathy_solution.csv",
        "image,level,Usage",
        [(f"{n}_left", n % 2 * 2, "Private") for n in range(4)],
    )
    data = read("retina", folder, *SIZE, *BALANCED)
    assert np.bincount(data.train.y).tolist() == [2, 2]
    assert np.bincount(data.test.y).tolist() == [1, 1]


def test_only_chosen_images_are_read(folder):
    chosen = read("retina", folder, *SIZE, "task.train_size=1", "task.test_size=1")
    needed = {x.tobytes() for split in (chosen.train, chosen.test) for x in split.x}
    for path in (folder / "prepared").rglob("*.png"):
        if graham(np.asarray(Image.open(folder / "train" / f"{path.stem}_left.jpeg")), 16).tobytes() not in needed:
            path.unlink()
    again = loaded("retina", folder, *SIZE, "task.train_size=1", "task.test_size=1")
    np.testing.assert_array_equal(again.train.x, chosen.train.x)
    with pytest.raises(DataError, match=r"prepared/train/.\.png .* does not exist"):
        loaded("retina", folder, *SIZE)


def test_what_is_wrong_is_named(folder):
    image = folder / "train" / "3_left.jpeg"
    whole = truncate(image)
    refused("retina", folder, image, "cannot be read", overrides=SIZE)
    Image.new("RGB", (64, 48)).save(image)
    refused("retina", folder, image, "must show an eye", overrides=SIZE)
    image.write_bytes(whole)
    table = folder / "trainLabels.csv"
    for rows, words in (
        ([("3_left", 5)], ("level must be 0 to 4", "'5'", "3_left")),
        ([("3_left",)], ("level must be 0 to 4", "''", "3_left")),
        ([("3_left", 0), ("3_left", 1)], ("'3_left' again", "line 3")),
        ([("3", 0)], ("<patient>_left", "'3'")),
        ([("", 0)], ("'image'", "line 2")),
        ([("3_right", 0)], ("needs trainLabels.csv with left eyes",)),
    ):
        write_csv(table, "image,level", rows)
        refused("retina", folder, folder, *words, overrides=SIZE)
    write_csv(table, "image,grade", [("3_left", 0)])
    refused("retina", folder, table, "'level'", overrides=SIZE)


# --------------------------------------------------------------------------------------------------------- Graham


def test_every_eye_fills_the_square_whatever_its_radius():
    """A bright spot half a radius from the middle lands at the same place, and the corners are grey."""
    for height, width, radius in ((700, 900, 300), (1000, 1400, 450), (300, 300, 140)):
        pixels = np.where(eye(height, width, radius) > 0, 90, 0).astype(np.uint8)
        row, column = (height - 1) // 2, (width - 1) // 2 + radius // 2
        dot = max(radius // 50, 2)
        pixels[row - dot : row + dot, column - dot : column + dot] = 250
        x = graham(pixels, 256)
        assert x.shape == (3, 256, 256)
        centre = np.argwhere(x[0, :, 64:-40] > 220).mean(axis=0)
        # Half of 300 pixels, in a square of 540 pixels that became 256.
        assert abs(centre[0] - 127.5) <= 2
        assert abs(centre[1] + 64 - (127.5 + 150 * 256 / 540)) <= 2
        assert (x[:, :30, :30] == 128).all()
        assert x[0, 128, 128] == 128


def test_the_formula_pixel_by_pixel():
    """At a radius of 300 pixels nothing is rescaled, and at 540 pixels nothing is resized."""
    pixels = eye(640, 700, 300)
    x = graham(pixels, 540)
    steps = np.arange(-30, 31)
    weights = np.exp(-(steps**2) / (2 * 10.0**2))
    kernel = np.outer(weights, weights) / weights.sum() ** 2
    for row, column in ((320, 350), (200, 300), (400, 500), (320, 150)):
        window = pixels[row - 30 : row + 31, column - 30 : column + 31].astype(float)
        average = (kernel[:, :, None] * window).sum(axis=(0, 1))
        expected = np.clip(4 * (pixels[row, column] - average) + 128, 0, 255)
        np.testing.assert_allclose(x[:, row - 50, column - 80], expected, atol=0.51)
    assert (x[:, 269, 10:14] != 128).any()
    assert (x[:, 0, :200] == 128).all()


def test_an_eye_that_is_cut_off_above_and_below_is_grey_there():
    x = graham(eye(400, 700, 300), 540)
    assert (x[:, :69] == 128).all()
    assert (x[:, -69:] == 128).all()
    assert x[:, 75].std() > 1
