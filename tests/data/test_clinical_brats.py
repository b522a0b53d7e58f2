"""BraTS 2017: slices by threes, the whole tumour, institutions by name, and no subject in two splits."""

import re
import sys

import numpy as np
import pytest
from clinical import SHAPE, loaded, path_of, read, refused, save, subject, truncate, write_csv
from PIL import Image

from flwr_replay.convert import brats, convert
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.terminal import installing

SIZE = ("task.size=28",)  # of slices that are resized to 32 pixels
NAMES = [
    *(f"Brats17_CBICA_A{letter}B_1" for letter in "ABCDE"),
    *(f"Brats17_TCIA_{n}_1" for n in range(105, 110)),
    *(f"Brats17_2013_{n}_1" for n in range(2, 7)),
]


@pytest.fixture(autouse=True)
def small_slices(monkeypatch, request):
    """Slices become 32 pixels, of which 28 are kept."""
    if "real" not in request.node.name:
        monkeypatch.setattr(brats, "RESIZED", 32)
        monkeypatch.setattr(brats, "CROPPED", 28)


@pytest.fixture
def folder(tmp_path):
    for n, name in enumerate(NAMES):
        subject(tmp_path, name, 100 + n)
    return tmp_path


def test_threes_of_slices_with_the_whole_tumour_of_the_middle_one(tmp_path):
    """A volume that is already of the size that slices are resized to, so that its own pixels are the result."""
    subject(tmp_path, NAMES[0], 400)
    subject(tmp_path, NAMES[1], 300)
    rng = np.random.default_rng(0)
    flair = rng.integers(1, 500, SHAPE, dtype=np.int16)
    flair[:, :, 4] = 0  # the middle of the second three
    labels = rng.choice(np.asarray([0, 1, 2, 4], np.int16), SHAPE)
    for name in NAMES[:2]:
        save(tmp_path, name, "flair", flair)
        save(tmp_path, name, "seg", labels)
    data = read("brats", tmp_path, *SIZE, "task.test_size=1")
    brightest = np.percentile(flair[flair > 0], 99.5)
    firsts = (0, 6, 9)
    for split in (data.train, data.test):
        assert split.x.shape == (3, 3, 28, 28)
        for x, y, first in zip(split.x, split.y, firsts, strict=True):
            for channel in range(3):
                expected = np.minimum(np.rint(flair[2:-2, 2:-2, first + channel].T * (255 / brightest)), 255)
                np.testing.assert_array_equal(x[channel], expected)
            np.testing.assert_array_equal(y, (labels[2:-2, 2:-2, first + 1].T > 0).astype(np.uint8))


def test_real_proportions_are_resized_and_cropped(tmp_path):
    brain = np.zeros((240, 240, 3), np.int16)
    brain[40:200, 20:210] = 1
    for name in NAMES[:2]:
        subject(tmp_path, name, 400)
        save(tmp_path, name, "flair", 400 * brain)
        save(tmp_path, name, "seg", 4 * brain)
    data = read("brats", tmp_path, "task.test_size=1")
    assert data.train.x.shape == (1, 3, 224, 224)
    picture = Image.fromarray((255 * brain[:, :, 0].T).astype(np.uint8))
    for image, method in ((data.train.x[0, 2], "BILINEAR"), (255 * data.train.y[0], "NEAREST")):
        whole = np.asarray(picture.resize((256, 256), Image.Resampling[method]))
        np.testing.assert_array_equal(image, whole[16:-16, 16:-16])


def test_institutions_and_subjects(folder):
    data = read("brats", folder, *SIZE)
    assert set(data.train.sites) == set(data.test.sites) == {"CBICA", "TCIA", "2013"}
    assert (len(data.train), len(data.test)) == (12 * 3, 3 * 3)
    assert data.train.y.sum() == 12 * 6 * 4
    sized = read("brats", folder, *SIZE, "task.train_size=6", "task.val_size=3", "task.test_size=6")
    assert (len(sized.train), len(sized.val), len(sized.test)) == (18, 9, 18)
    assert {str(site): int((sized.train.sites == site).sum()) for site in set(sized.train.sites)} == {
        "CBICA": 6,
        "TCIA": 6,
        "2013": 6,
    }


def test_no_subject_is_in_two_splits(folder):
    """Each subject has a darker patch whose width says which it is."""
    for n, name in enumerate(NAMES):
        flair = np.zeros(SHAPE, np.int16)
        flair[4:28, 2:30, 2:] = 200
        flair[5 : 6 + n, 10:20, 2:] = 50
        save(folder, name, "flair", flair)
    data = read("brats", folder, *SIZE)
    owners = [{int((x[1] == 64).sum()) // 10 - 1 for x in split.x} for split in (data.train, data.test)]
    assert sorted(owners[0] | owners[1]) == list(range(15))
    assert not owners[0] & owners[1]


def test_finer_institutions_by_2018s_names_or_by_a_table(folder, tmp_path_factory):
    finer = tmp_path_factory.mktemp("finer")
    for n in range(6):
        subject(finer, f"Brats18_TCIA0{1 + n // 3}_{100 + n}_1", 100)
    assert set(read("brats", finer, *SIZE).train.sites) == {"TCIA01", "TCIA02"}
    table = folder / "institutions.csv"
    write_csv(table, "subject,institution", [(name, "north" if n < 8 else "south") for n, name in enumerate(NAMES)])
    assert set(read("brats", folder, *SIZE).train.sites) == {"north", "south"}
    write_csv(table, "subject,institution", [(name, "north") for name in NAMES[1:]])
    refused("brats", folder, table, NAMES[0], overrides=SIZE)
    write_csv(table, "subject,hospital", [])
    refused("brats", folder, table, "'institution'", overrides=SIZE)


def test_what_is_wrong_is_named(folder):
    flair, labels = path_of(folder, NAMES[3], "flair"), path_of(folder, NAMES[3], "seg")
    save(folder, NAMES[3], "flair", np.random.default_rng(0).integers(1, 500, SHAPE, dtype=np.int16))
    for path in (flair, labels):
        whole = truncate(path)
        refused("brats", folder, path, "cannot be read", overrides=SIZE)
        path.write_bytes(b"no volume")
        refused("brats", folder, path, "cannot be read", overrides=SIZE)
        path.unlink()
        refused("brats", folder, path, "does not exist", overrides=SIZE)
        path.write_bytes(whole)
    save(folder, NAMES[3], "seg", np.full(SHAPE, 3, np.int16))
    refused("brats", folder, labels, "0, 1, 2 and 4 only", "holds 3", overrides=SIZE)
    save(folder, NAMES[3], "seg", np.zeros((8, 8, 8), np.int16))
    refused("brats", folder, labels, "(8, 8, 8)", "(32, 32, 14)", overrides=SIZE)
    save(folder, NAMES[3], "seg", np.zeros((8, 8), np.int16))
    refused("brats", folder, labels, "three dimensions", "(8, 8)", overrides=SIZE)
    save(folder, NAMES[3], "seg", np.zeros(SHAPE, np.int16))
    save(folder, NAMES[3], "flair", np.zeros(SHAPE, np.int16))
    refused("brats", folder, flair, "all its voxels are 0", overrides=SIZE)
    (folder / "HGG" / NAMES[3]).rename(folder / "HGG" / "patient-3")
    refused("brats", folder, folder / "HGG" / "patient-3", "Brats17_<institution>_<number>", overrides=SIZE)


def test_without_nibabel_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(ConfigError, match=re.escape(installing("brats"))):
        convert("brats", folder)
    assert not (folder / "manifest.csv").exists()


def test_another_size_is_fitted_and_masks_stay_masks(folder):
    refused("brats", folder, "28 x 28 pixels", "task.size", overrides=("task.size=14", "task.fit=exact"))
    data = read("brats", folder, "task.size=14")
    assert data.train.x.shape[1:] == (3, 14, 14)
    assert set(np.unique(data.train.y)) == {0, 1}


def test_a_mask_that_is_missing_is_named(folder):
    read("brats", folder, *SIZE)
    mask = folder / "slices" / NAMES[0] / "6-mask.png"
    mask.unlink()
    with pytest.raises(DataError, match=r"6-mask.png .* does not exist"):
        loaded("brats", folder, *SIZE)
