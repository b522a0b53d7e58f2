"""Downloads as people have them: other suffixes, one folder deeper, left-behind files, tables out of a spreadsheet."""

import shutil

import numpy as np
import pytest
from clinical import boneage, draw, loaded, photograph, subject, truncate, write_csv
from PIL import Image

from flwr_replay.cli.main import main
from flwr_replay.convert import convert
from flwr_replay.errors import DataError, RunError

HANDS, TRUTH = "boneage-training-dataset", "Bone age ground truth.csv"


@pytest.fixture
def hands(tmp_path):
    """Ten hands and two for testing, not yet converted."""
    boneage(tmp_path, 10, 2)
    (tmp_path / "manifest.csv").unlink()
    return tmp_path


@pytest.fixture
def eyes(tmp_path):
    for n in range(4):
        photograph(tmp_path / "train", f"{n}_left", n)
    write_csv(tmp_path / "trainLabels.csv", "image,level", [(f"{n}_left", n % 2 * 2) for n in range(4)])
    return tmp_path


@pytest.fixture
def brains(tmp_path):
    for n in range(4):
        subject(tmp_path, f"Brats17_TCIA_{100 + n}_1", 200)
    return tmp_path


def files_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_other_suffixes_and_folders_within_folders(hands):
    plain = convert("boneage", hands).read_text()
    (hands / "manifest.csv").unlink()
    for n in range(3):
        path = hands / HANDS / f"{1000 + n}.png"
        path.rename(path.with_suffix(".PNG"))
    (hands / HANDS / "more").mkdir()
    for n in range(3, 6):
        (hands / HANDS / f"{1000 + n}.png").rename(hands / HANDS / "more" / f"{1000 + n}.png")
    (hands / HANDS / "._1007.png").write_bytes(b"\0\5\x16\7")
    (hands / HANDS / ".DS_Store").write_bytes(b"Bud1")
    (hands / "__MACOSX").mkdir()
    manifest = convert("boneage", hands).read_text()
    assert manifest.replace(".PNG", ".png").replace("more/", "") == plain
    assert len(loaded("boneage", hands, "task.size=8").train) == 10


def test_an_image_that_is_there_twice(hands):
    """The one where it is expected counts; of two elsewhere nobody knows which."""
    (hands / HANDS / "small").mkdir()
    shutil.copy(hands / HANDS / "1003.png", hands / HANDS / "small" / "1003.png")
    assert "small" not in convert("boneage", hands).read_text()
    (hands / "manifest.csv").unlink()
    (hands / HANDS / "1003.png").rename(hands / HANDS / "1003.PNG")
    with pytest.raises(DataError, match=r"1003\.png must be one file; got .* and .*: remove one"):
        convert("boneage", hands)
    assert not (hands / "manifest.csv").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace(",", "\t"), "must have a column 'id', between commas"),
        (lambda text: text.replace("boneage", "Boneage"), "must have a column 'boneage'"),
        (lambda text: f"{text}1003,100,True\n", "every 'id' must be listed once"),
        (lambda text: text.replace("1003,", ","), "every row must have a value for 'id'"),
        (lambda text: text.replace("1003,", "1003.0,"), r"1003\.0\.png .* does not exist"),
        (lambda text: f"{text}9,100,True\n", r"9\.png .*boneage-training-dataset\.csv.* does not exist"),
        (lambda text: text.replace("True", "Yes", 1), "'male' must be True or False"),
        (lambda text: f"{text}9,100,True,1\n", "every row must have 3 cells"),
    ],
)
def test_tables_that_somebody_spoilt_are_a_line_for_each_fault_and_exit_code_2(
    hands, change, message, capsys, monkeypatch
):
    table = hands / f"{HANDS}.csv"
    table.write_text(change(table.read_text()))
    before = files_in(hands)
    monkeypatch.setattr("sys.argv", ["flwr-replay", "data", "convert", "boneage", str(hands)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert all(line.startswith("error: ") for line in error.splitlines())
    with pytest.raises(DataError, match=message):
        convert("boneage", hands)
    assert files_in(hands) == before


def test_a_table_as_excel_saves_it(hands):
    table = hands / f"{HANDS}.csv"
    table.write_bytes(b"\xef\xbb\xbf" + table.read_bytes().replace(b"\n", b"\r\n"))
    assert convert("boneage", hands).is_file()


def test_a_spreadsheet_is_to_be_saved_as_csv(hands):
    (hands / TRUTH).rename((hands / TRUTH).with_suffix(".xlsx"))
    with pytest.raises(DataError, match="must be saved as CSV, too"):
        convert("boneage", hands)


@pytest.mark.parametrize(
    "spoil", [truncate, lambda path: path.unlink(), lambda path: Image.new("RGB", (64, 48)).save(path)]
)
def test_nothing_is_left_of_a_conversion_that_fails(eyes, spoil):
    spoil(eyes / "train" / "2_left.jpeg")
    before = files_in(eyes)
    with pytest.raises(DataError, match="2_left"):
        convert("retina", eyes)
    assert files_in(eyes) == before


def test_what_was_prepared_before_is_not_overwritten(eyes):
    convert("retina", eyes)
    (eyes / "manifest.csv").unlink()
    own = eyes / "prepared" / "train" / "2.png"
    own.write_bytes(b"mine")
    with pytest.raises(DataError, match=r"prepared is there already: remove it"):
        convert("retina", eyes)
    assert own.read_bytes() == b"mine"
    assert not (eyes / "manifest.csv").exists()


def test_a_folder_that_cannot_be_written(eyes, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    before = files_in(eyes)
    with pytest.raises(RunError, match="prepared must be written; No space left on device"):
        convert("retina", eyes)
    assert files_in(eyes) == before


def test_volumes_that_are_unpacked_and_folders_that_are_none(brains):
    import nibabel

    convert("brats", brains)
    packed = loaded("brats", brains)
    shutil.rmtree(brains / "slices")
    (brains / "manifest.csv").unlink()
    for path in sorted((brains / "HGG").rglob("*.nii.gz")):
        nibabel.save(nibabel.load(path), path.with_suffix(""))
        path.unlink()
    for name in (".ipynb_checkpoints", "__MACOSX"):
        (brains / "HGG" / name).mkdir()
    convert("brats", brains)
    plain = loaded("brats", brains)
    for split in ("train", "test"):
        np.testing.assert_array_equal(getattr(plain, split).x, getattr(packed, split).x)
        np.testing.assert_array_equal(getattr(plain, split).y, getattr(packed, split).y)


def test_readings_and_images_that_a_mac_left_behind(tmp_path):
    place = tmp_path / "MontgomerySet"
    (place / "ClinicalReadings").mkdir(parents=True)
    for n in range(4):
        draw(place / "CXR_png" / f"MCUCXR_{n:04d}_{n % 2}.png", 9 * n)
        (place / "ClinicalReadings" / f"MCUCXR_{n:04d}_{n % 2}.txt").write_text("normal")
        (place / "CXR_png" / f"._MCUCXR_{n:04d}_{n % 2}.png").write_bytes(b"\0\5\x16\7")
        (place / "ClinicalReadings" / f"._MCUCXR_{n:04d}_{n % 2}.txt").write_bytes(b"\0\5\x16\7")
    assert len(convert("tuberculosis", tmp_path).read_text().splitlines()) == 5
