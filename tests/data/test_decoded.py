"""Images that are decoded once: found again, made anew after any change, never wrong, bounded, their owner's only."""

import json
import os
import stat
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from flwr_replay.config.compose import compose
from flwr_replay.convert import convert
from flwr_replay.data import decoded as module
from flwr_replay.data import load
from flwr_replay.data.decoded import DecodedImages
from flwr_replay.errors import DataError


@pytest.fixture
def folder(tmp_path):
    data = tmp_path / "data"
    for label in ("healthy", "ill"):
        (data / label).mkdir(parents=True)
        for n in range(12):
            pixels = np.random.default_rng(n + 100 * (label == "ill")).integers(0, 256, (8, 8), np.uint8)
            Image.fromarray(pixels).save(data / label / f"{n:02d}.png")
    return data


@pytest.fixture
def folder_task(folder, task):
    """A task on the folder."""
    known = {"channels": 1, "size": 8, "class_names": ("healthy", "ill")}
    return lambda **options: task("folder", data_dir=str(folder), **{**known, **options})


@pytest.fixture
def decoded_files(monkeypatch):
    """The files that were decoded."""
    decoded, picture = [], module.ImageSource.examples

    def watched(source, members):
        decoded.extend(source.files)
        return picture(source, members)

    monkeypatch.setattr(module.ImageSource, "examples", watched)
    return decoded


def cache(tmp_path, limit=1e9):
    return DecodedImages(tmp_path / "state" / "a" / "decoded", limit)


def entries(kept):
    return sorted(path.name for path in kept.folder.iterdir()) if kept.folder.exists() else []


def same(left, right):
    for split in ("train", "test", "val"):
        mine, its = getattr(left, split), getattr(right, split)
        assert (mine is None) == (its is None)
        if mine is not None:
            np.testing.assert_array_equal(mine.x, its.x)
            np.testing.assert_array_equal(mine.y, its.y)
            assert mine.x.dtype == its.x.dtype


@pytest.mark.parametrize("options", [{}, {"validation": True}, {"size": 6, "fit": "crop"}])
def test_the_second_time_nothing_is_decoded_and_the_bits_are_the_same(tmp_path, folder_task, decoded_files, options):
    task, kept = folder_task(**options), cache(tmp_path)
    plain, first = load(task), load(task, kept)
    decoded_files.clear()
    again = load(task, cache(tmp_path))
    assert decoded_files == []
    assert isinstance(again.train.x, np.memmap)
    assert not again.train.x.flags.writeable
    same(plain, first)
    same(plain, again)
    assert plain.train.digest == again.train.digest


def test_the_splits_of_a_map_are_slices_of_it_and_not_copies(tmp_path, folder_task):
    dataset = load(folder_task(validation=True), cache(tmp_path))
    assert all(
        held.x.base is not None and held.x.flags.c_contiguous for held in (dataset.train, dataset.test, dataset.val)
    )


def changed(file, way):
    times = file.stat()
    pixels = np.full((8, 8), 7, np.uint8)
    if way == "replaced":
        Image.fromarray(pixels).save(other := file.with_name("other.part"), "PNG")
        os.replace(other, file)
    else:
        Image.fromarray(pixels).save(file)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # the time of change cannot be set back


@pytest.mark.parametrize("way", ["written", "replaced"])
def test_a_changed_image_is_decoded_again_even_with_its_old_time(tmp_path, folder_task, folder, decoded_files, way):
    task, kept = folder_task(), cache(tmp_path)
    before = load(task, kept)
    changed(folder / "ill" / "03.png", way)
    after = load(task, kept)
    assert len(decoded_files) == 48
    same(after, load(task))
    assert not np.array_equal(
        np.concatenate([before.train.x, before.test.x]), np.concatenate([after.train.x, after.test.x])
    )
    assert len(entries(kept)) == 2  # in place of the old entry


def test_another_file_or_another_split_is_another_entry(tmp_path, folder_task, folder):
    task, kept = folder_task(), cache(tmp_path)
    load(task, kept)
    (folder / "ill" / "11.png").unlink()
    same(load(task, kept), load(task))
    rows = [
        f"{label}/{n:02d}.png,{label},{'test' if n < 3 else 'train'}" for label in ("healthy", "ill") for n in range(9)
    ]
    (folder / "manifest.csv").write_text("\n".join(["image,label,split", *rows]) + "\n")
    assert len(load(task, kept).test) == 6
    (folder / "manifest.csv").write_text("\n".join(["image,label,split", *rows[1:], rows[0]]) + "\n")  # another order
    same(load(task, kept), load(task))


def test_labels_are_read_anew(tmp_path, folder_task, folder, decoded_files):
    rows = [
        f"{label}/{n:02d}.png,{label},{'test' if n < 3 else 'train'}" for label in ("healthy", "ill") for n in range(9)
    ]
    (folder / "manifest.csv").write_text("\n".join(["image,label,split", *rows]) + "\n")
    task, kept = folder_task(), cache(tmp_path)
    before = load(task, kept)
    decoded_files.clear()
    (folder / "manifest.csv").write_text("\n".join(["image,label,split", *rows]).replace(",ill,", ",healthy,"))
    after = load(task, kept)
    assert decoded_files == []
    assert before.train.y.sum() == 6
    assert after.train.y.sum() == 0


def truncate(images, about):
    images.write_bytes(images.read_bytes()[:-5])


def flip_one_byte(images, about):
    times = images.stat()
    content = bytearray(images.read_bytes())
    content[10] ^= 255
    images.write_bytes(content)
    os.utime(images, ns=(times.st_atime_ns, times.st_mtime_ns))


def replace_images(images, about):
    content = bytes(reversed(images.read_bytes()))
    images.unlink()
    images.write_bytes(content)


def remove_images(images, about):
    images.unlink()


def break_off(images, about):
    about.write_bytes(about.read_bytes()[:-20])


def reorder_training(images, about):
    about_them = json.loads(about.read_text())
    about_them["splits"]["train"].reverse()
    about.write_text(json.dumps(about_them))


@pytest.mark.parametrize(
    "damage", [truncate, flip_one_byte, replace_images, remove_images, break_off, reorder_training]
)
def test_any_damage_of_an_entry_is_noticed_and_the_images_are_decoded_again(
    tmp_path, folder_task, decoded_files, damage
):
    task, kept = folder_task(), cache(tmp_path)
    plain = load(task)
    load(task, kept)
    damage(next(kept.folder.glob("*.images")), next(kept.folder.glob("*.json")))
    decoded_files.clear()
    same(plain, load(task, kept))
    assert len(decoded_files) == 24
    decoded_files.clear()
    same(plain, load(task, kept))
    assert decoded_files == []


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_only_the_owner_may_read_it(tmp_path, folder_task):
    old = os.umask(0)
    try:
        kept = cache(tmp_path)
        load(folder_task(), kept)
    finally:
        os.umask(old)
    assert stat.S_IMODE(kept.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept.folder.iterdir()} == {0o600}


def test_all_entries_together_have_at_most_the_limit_and_the_oldest_goes(tmp_path, folder_task, decoded_files):
    size = 24 * 64
    kept = cache(tmp_path, 2 * size)
    forms = [folder_task(fit=fit) for fit in ("exact", "pad", "crop")]
    for task in forms:
        load(task, kept)
    assert len(list(kept.folder.glob("*.images"))) == 2
    decoded_files.clear()
    load(forms[2], kept)
    load(forms[1], kept)
    assert decoded_files == []
    load(forms[0], kept)
    assert len(decoded_files) == 24


def test_what_is_larger_than_the_limit_is_not_kept_and_the_log_says_so(tmp_path, folder_task, caplog):
    kept = cache(tmp_path, 24 * 64 - 1)
    dataset = load(folder_task(), kept)
    assert (entries(kept), type(dataset.train.x)) == ([], np.ndarray)
    assert "cache-gb=1.535e-06" in caplog.text


def test_without_a_cache_nothing_is_written_and_what_is_there_goes(tmp_path, folder_task, caplog):
    load(folder_task(), cache(tmp_path, 0))
    assert not (tmp_path / "state").exists()
    load(folder_task(), cache(tmp_path))
    dataset = load(folder_task(), cache(tmp_path, 0))
    assert (entries(cache(tmp_path)), type(dataset.train.x), caplog.text) == ([], np.ndarray, "")


def test_an_entry_that_another_process_removes_meanwhile_is_no_error(tmp_path, folder_task):
    """A link to nothing is listed, and cannot be looked at."""
    kept = cache(tmp_path, 0)
    kept.folder.mkdir(parents=True)
    (kept.folder / "gone.images").symlink_to(tmp_path / "nothing")
    assert type(load(folder_task(), kept).train.x) is np.ndarray


def test_an_image_that_cannot_be_decoded_leaves_nothing(tmp_path, folder_task, folder):
    (folder / "ill" / "05.png").write_bytes(b"no image")
    kept = cache(tmp_path)
    with pytest.raises(DataError, match=r"05\.png"):
        load(folder_task(), kept)
    assert entries(kept) == []


def test_another_version_of_what_decodes_makes_another_entry(tmp_path, folder_task, decoded_files, monkeypatch):
    load(folder_task(), cache(tmp_path))
    decoded_files.clear()
    monkeypatch.setattr(module, "version", lambda package: "99")
    load(folder_task(), cache(tmp_path))
    assert len(decoded_files) == 24


def test_names_and_normalisation_decode_nothing_again(tmp_path, folder_task, decoded_files):
    task = folder_task()
    load(task, cache(tmp_path))
    decoded_files.clear()
    load(replace(task, mean=(0.5,), std=(0.5,), class_names=("ill", "healthy"), name="other"), cache(tmp_path))
    assert decoded_files == []


def test_clinical_sets_are_decoded_once_too(tmp_path, decoded_files):
    place = tmp_path / "MontgomerySet" / "CXR_png"
    place.mkdir(parents=True)
    for n in range(20):
        pixels = np.random.default_rng(n).integers(0, 256, (20, 16), np.uint8)
        Image.fromarray(pixels).save(place / f"MCUCXR_{n:04d}_{n % 2}.png")
    convert("tuberculosis", tmp_path)
    wanted = compose(["task=tuberculosis", f"task.data_dir='{tmp_path}'", "task.size=8"]).task
    kept = cache(tmp_path)
    plain, first = load(wanted), load(wanted, kept)
    decoded_files.clear()
    again = load(wanted, kept)
    assert decoded_files == []
    same(plain, first)
    same(plain, again)
    changed(place / "MCUCXR_0003_1.png", "written")
    same(load(wanted, kept), load(wanted))
    manifest = tmp_path / "manifest.csv"
    text = manifest.read_text()
    for n in (0, 2, 4):  # who tests depends on the label
        text = text.replace(f"MCUCXR_{n:04d}_0.png,0", f"MCUCXR_{n:04d}_0.png,1")
    manifest.write_text(text)
    same(load(wanted, kept), load(wanted))
