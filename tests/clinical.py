"""Tiny folders in the formats of clinical data sets, and how the tests read them."""

import csv
import shutil

import nibabel
import numpy as np
import pytest
from PIL import Image

from flwr_replay.config.compose import compose
from flwr_replay.convert import convert
from flwr_replay.data import load
from flwr_replay.errors import DataError

SHAPE = (32, 32, 14)  # left-right, front-back, axial; the first two slices show no brain, the last two fill no three


def read(task, folder, *overrides):
    """Convert a folder, even a second time, and read it."""
    for made in ("prepared", "slices"):
        shutil.rmtree(folder / made, ignore_errors=True)
    (folder / "manifest.csv").unlink(missing_ok=True)
    convert(task, folder)
    return loaded(task, folder, *overrides)


def loaded(task, folder, *overrides):
    return load(compose([f"task={task}", f"task.data_dir='{folder}'", "split=test", *overrides]).task)


def refused(task, folder, *words, overrides=()):
    """The error is one line with all these words."""
    with pytest.raises(DataError) as caught:
        read(task, folder, *overrides)
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert str(word) in line, line


def write_csv(path, header, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header.split(","), *rows])


def draw(path, level, size=(12, 10), mode="L"):
    """Save an image of one grey level; PNG keeps it exactly, JPEG nearly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, level if mode == "L" else (level,) * 3).save(path)


def truncate(path):
    """Keep the first part of a file that was whole."""
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    return whole


def levels(split):
    """The grey level of each of a split's images of one level."""
    flat = split.x.reshape(len(split), -1).astype(int)
    assert (np.ptp(flat, axis=1) == 0).all()
    return flat[:, 0].tolist()


def eye(height, width, radius, seed=0):
    """A disc of smooth noise in the middle of a black photograph."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(60, 200, (9, 9, 3), dtype=np.uint8))
    pixels = np.array(coarse.resize((width, height), Image.Resampling.BICUBIC))
    rows, columns = np.ogrid[:height, :width]
    pixels[(rows - (height - 1) / 2) ** 2 + (columns - (width - 1) / 2) ** 2 > radius**2] = 0
    return pixels


def photograph(folder, name, seed=0):
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(eye(48, 64, 20, seed)).save(folder / f"{name}.jpeg")


def subject(folder, name, level):
    """A brain of one grey level with a tumour of labels 1, 2 and 4 in its eighth slice, the middle of a three."""
    flair, labels = np.zeros(SHAPE, np.int16), np.zeros(SHAPE, np.int16)
    flair[4:28, 2:30, 2:] = level
    labels[10:16, 20:24, 7] = np.asarray([1, 2, 4])[np.arange(6) % 3, None]
    (folder / "HGG" / name).mkdir(parents=True)
    for kind, volume in (("flair", flair), ("seg", labels)):
        save(folder, name, kind, volume)


def path_of(folder, name, kind):
    return folder / "HGG" / name / f"{name}_{kind}.nii.gz"


def save(folder, name, kind, volume):
    nibabel.save(nibabel.Nifti1Image(volume, np.diag([-1, -1, 1, 1])), path_of(folder, name, kind))


def retina(folder, patients):
    """A folder of the Retina set's layout: as many healthy as diseased left eyes; a diseased one is brighter."""
    (folder / "train").mkdir(parents=True)
    for n in range(patients):
        pixels = np.minimum(eye(48, 64, 20, n) + (n % 2) * 40 * (eye(48, 64, 20, n) > 0), 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "train" / f"{n}_left.jpeg")
    write_csv(folder / "trainLabels.csv", "image,level", [(f"{n}_left", n % 2 * 3) for n in range(patients)])
    convert("retina", folder)
    return folder


def boneage(folder, training, tests):
    """A folder of the BoneAge set's layout: a boy's grey level is his age in months."""
    ages = np.random.default_rng(0).integers(10, 220, training + tests).tolist()
    name = "boneage-training-dataset"
    for n, age in enumerate(ages):
        draw(folder / (name if n < training else "boneage-test-dataset") / f"{1000 + n}.png", age, (24, 20))
    write_csv(folder / f"{name}.csv", "id,boneage,male", [(1000 + n, ages[n], "True") for n in range(training)])
    rows = [(1000 + n, "M", ages[n]) for n in range(training, training + tests)]
    write_csv(folder / "Bone age ground truth.csv", "Case ID,Sex,Ground truth bone age (months)", rows)
    convert("boneage", folder)
    return folder


def brats(folder, subjects):
    """A folder of the BraTS set's layout, with so many subjects of each of three institutions."""
    for n in range(subjects):
        for name in (f"Brats17_CBICA_A{chr(65 + n)}B_1", f"Brats17_TCIA_{100 + n}_1", f"Brats17_2013_{n}_1"):
            subject(folder, name, 100 + n)
    convert("brats", folder)
    return folder
