"""Images of any size and mode, and DICOM files."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image
from pydicom import dcmread
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage

from flwr_replay.data.picture import fitted, picture
from flwr_replay.errors import ConfigError, DataError

RAMP = np.arange(12, dtype=np.uint16).reshape(3, 4) * 100 + 1000  # 1000 .. 2100


def scaled_to_bytes(values):
    values = values.astype(np.float64)
    return np.rint((values - values.min()) * 255 / np.ptp(values)).astype(np.uint8)


def dicom(path: Path, pixels: np.ndarray, kind: str = "MONOCHROME2", **tags: object) -> Path:
    file = Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    file.file_meta.MediaStorageSOPClassUID = SecondaryCaptureImageStorage
    file.file_meta.MediaStorageSOPInstanceUID = "1.2.3"
    file.SOPClassUID, file.SOPInstanceUID = SecondaryCaptureImageStorage, "1.2.3"
    colours = pixels.ndim == 3 and pixels.shape[-1] == 3
    file.Rows, file.Columns = pixels.shape[:2] if colours else pixels.shape[-2:]
    file.SamplesPerPixel, file.PhotometricInterpretation = (3 if colours else 1), kind
    if colours:
        file.PlanarConfiguration = 0
    if pixels.ndim == 3 and not colours:
        file.NumberOfFrames = len(pixels)
    file.BitsAllocated = file.BitsStored = 8 * pixels.itemsize
    file.HighBit, file.PixelRepresentation = file.BitsStored - 1, 0
    file.PixelData = pixels.tobytes()
    for name, value in tags.items():
        setattr(file, name, value)
    file.save_as(path, enforce_file_format=True)
    return path


def tiff(path: Path, pixels: np.ndarray, order: str, tags: dict[int, int]) -> Path:
    """Write grey pixels uncompressed, in a byte order, with these tags beside the necessary ones."""
    data, (height, width) = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes(), pixels.shape
    bits = {256: width, 257: height, 258: 8 * pixels.itemsize, 259: 1, 273: 8, 277: 1, 278: height, 279: len(data)}
    entries = [struct.pack(f"{order}HHIH2x", tag, 3, 1, value) for tag, value in sorted((bits | tags).items())]
    head = {"<": b"II", ">": b"MM"}[order] + struct.pack(f"{order}HI", 42, 8 + len(data))
    path.write_bytes(head + data + struct.pack(f"{order}H", len(entries)) + b"".join(entries) + bytes(4))
    return path


def grey(path: Path) -> np.ndarray:
    return np.asarray(picture(path, "L"))


def test_sixteen_bits_are_scaled_from_the_images_own_least_to_greatest_value(tmp_path: Path) -> None:
    for name in ("a.png", "a.tiff"):
        Image.fromarray(RAMP).save(tmp_path / name)
        np.testing.assert_array_equal(grey(tmp_path / name), scaled_to_bytes(RAMP))
    Image.fromarray(np.full((3, 4), 700, np.uint16)).save(tmp_path / "flat.png")
    assert not grey(tmp_path / "flat.png").any()


def test_an_image_of_eight_bits_keeps_its_bytes(tmp_path: Path) -> None:
    pixels = (RAMP // 10).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    np.testing.assert_array_equal(grey(tmp_path / "a.png"), pixels)


def test_a_photograph_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = 6  # the camera stood on its right side
    pixels = (RAMP // 10).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=tags)
    np.testing.assert_array_equal(grey(tmp_path / "a.png"), np.rot90(pixels, -1))


TURNS = {
    1: lambda seen: seen,
    2: np.fliplr,
    3: lambda seen: np.rot90(seen, 2),
    4: np.flipud,
    5: np.transpose,
    6: lambda seen: np.rot90(seen, -1),
    7: lambda seen: np.rot90(seen, 2).T,
    8: np.rot90,
}


@pytest.mark.parametrize("white_is_zero", [False, True])
@pytest.mark.parametrize("dtype", ["<u1", ">u1", "<u2", "<f4", ">f4", "<i1", ">i1", ">u2", "<i2", ">i2", "<u4", "<i4"])
def test_a_tiff_file_is_upright_and_white_where_it_says_so_at_any_depth(
    tmp_path: Path, dtype: str, white_is_zero: bool
) -> None:
    """Pillow scrambles what it maps into memory, inverts 8 bits only, and takes some signs for others."""
    order, kind, size = dtype
    least, step = {"u": 0, "i": -100, "f": -3}[kind], 2**31 // 600 if dtype == "<u4" else 0.2
    pixels = ((RAMP - 1000.0) * step + least).astype(f"{kind}{size}")
    shown = pixels if kind + size == "u1" else scaled_to_bytes(pixels)
    for orientation, turned in TURNS.items():
        tags = {262: 1 - white_is_zero, 274: orientation, 339: "uif".index(kind) + 1}
        file = tiff(tmp_path / "a.tif", pixels, order, tags)
        if white_is_zero and dtype in ("<i1", ">i1", ">u2", "<i2", ">i2", "<u4", "<i4"):
            with pytest.raises(DataError, match="knows no such form"):
                picture(file, "L")
        else:
            np.testing.assert_array_equal(grey(file), turned(255 - shown if white_is_zero else shown))


@pytest.mark.parametrize("mode", ["L", "P", "RGB", "RGBA", "CMYK"])
def test_a_tiff_file_of_any_mode_is_turned(tmp_path: Path, mode: str) -> None:
    pixels = Image.fromarray((RAMP // 10).astype(np.uint8)).convert(mode)
    for orientation, turned in TURNS.items():
        tags = Image.Exif()
        tags[ExifTags.Base.Orientation] = orientation
        pixels.save(tmp_path / "a.tif", exif=tags)
        np.testing.assert_allclose(grey(tmp_path / "a.tif"), turned(np.asarray(pixels.convert("L"))), atol=1)


def test_more_than_eight_bits_follow_the_rules_of_eight(tmp_path: Path) -> None:
    tags = Image.Exif()
    tags[ExifTags.Base.Orientation] = 6
    Image.fromarray(RAMP).save(tmp_path / "a.png", exif=tags)
    np.testing.assert_array_equal(grey(tmp_path / "a.png"), np.rot90(scaled_to_bytes(RAMP), -1))
    for pixels in (RAMP, (RAMP // 10).astype(np.uint8)):
        Image.fromarray(pixels).save(tmp_path / "clear.png", transparency=int(pixels[1, 1]))
        with pytest.raises(DataError, match="must be opaque"):
            picture(tmp_path / "clear.png", "L")
        Image.fromarray(pixels).save(tmp_path / "opaque.png", transparency=1)
        assert grey(tmp_path / "opaque.png").any()


def test_a_dicom_file_goes_through_its_own_transformations(tmp_path: Path) -> None:
    np.testing.assert_array_equal(grey(dicom(tmp_path / "a.dcm", RAMP)), scaled_to_bytes(RAMP))
    np.testing.assert_array_equal(grey(dicom(tmp_path / "b.dcm", RAMP, "MONOCHROME1")), 255 - scaled_to_bytes(RAMP))
    window = {"RescaleSlope": 2, "RescaleIntercept": -1000, "WindowCenter": 2000, "WindowWidth": 401}
    image = grey(dicom(tmp_path / "c.dcm", RAMP, **window))
    hounsfield = RAMP.astype(float) * 2 - 1000
    shown = np.clip((hounsfield - 1999.5) / 400 + 0.5, 0, 1)  # DICOM PS3.3 C.11.2.1.2.1
    np.testing.assert_allclose(image, np.rint(255 * shown), atol=1)
    dicom(tmp_path / "d.dcm", RAMP).rename(tmp_path / "without-suffix")
    np.testing.assert_array_equal(grey(tmp_path / "without-suffix"), scaled_to_bytes(RAMP))


@pytest.mark.parametrize(
    ("padding", "dtype", "tags"),
    [
        (60000, np.uint16, {"PixelPaddingValue": 60000}),
        (0, np.uint16, {"PixelPaddingValue": 10, "PixelPaddingRangeLimit": 0}),
        (-2000, np.int16, {"PixelPaddingValue": -2000}),
        (-2000, np.int16, {"PixelPaddingValue": -2000, "RescaleSlope": 2, "RescaleIntercept": -1024}),
        (-2000, np.int16, {"PixelPaddingValue": -2000, "WindowCenter": 1550, "WindowWidth": 9000}),
        (-1995, np.int16, {"PixelPaddingValue": -2000, "PixelPaddingRangeLimit": -1990}),
        (-1995, np.int16, {"PixelPaddingValue": -1990, "PixelPaddingRangeLimit": -2000}),
        (-2000, np.int16, {"PixelPaddingValue": 63536}),  # the same 16 bits
        (63536, np.uint16, {"PixelPaddingValue": 63536, "BitsStored": 12, "HighBit": 11}),
    ],
)
@pytest.mark.parametrize("kind", ["MONOCHROME1", "MONOCHROME2"])
def test_padding_is_black_and_does_not_set_the_contrast(
    tmp_path: Path, padding: int, dtype: type, tags: dict[str, int], kind: str
) -> None:
    pixels = np.pad(RAMP.astype(dtype), 1, constant_values=padding)
    file = dicom(tmp_path / "a.dcm", pixels, kind, PixelRepresentation=int(dtype is np.int16))
    file_read = dcmread(file)
    for name, value in tags.items():
        if name.startswith("PixelPadding"):  # pydicom itself would refuse 63536 as a signed number
            file_read.add_new(name, "US" if value >= 0 else "SS", value)
        else:
            setattr(file_read, name, value)
    file_read.save_as(file)
    want = scaled_to_bytes(RAMP) if kind == "MONOCHROME2" else 255 - scaled_to_bytes(RAMP)
    np.testing.assert_array_equal(grey(file), np.pad(want, 1))


def test_an_image_of_padding_alone_is_black(tmp_path: Path) -> None:
    file = dicom(tmp_path / "a.dcm", np.full((3, 4), 7, np.uint16), "MONOCHROME1", PixelPaddingValue=7)
    assert not grey(file).any()


def test_a_window_keeps_its_direction_under_a_negative_slope(tmp_path: Path) -> None:
    tags = {"RescaleSlope": -1, "RescaleIntercept": 3000, "WindowCenter": 1450, "WindowWidth": 9000}
    np.testing.assert_array_equal(grey(dicom(tmp_path / "a.dcm", RAMP, **tags)), 255 - scaled_to_bytes(RAMP))


def test_a_dicom_file_in_colour(tmp_path: Path) -> None:
    colours = np.arange(36, dtype=np.uint8).reshape(3, 4, 3)
    file = dicom(tmp_path / "a.dcm", colours, "RGB")
    np.testing.assert_array_equal(np.asarray(picture(file, "RGB")), colours)


def test_what_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dicom(tmp_path / "a.dcm", RAMP).read_bytes()
    (tmp_path / "torn.dcm").write_bytes(whole[:-5])
    (tmp_path / "other.dcm").write_bytes(b"no image" * 40)
    dicom(tmp_path / "frames.dcm", np.stack([RAMP, RAMP]))
    for name in ("torn.dcm", "other.dcm", "frames.dcm"):
        with pytest.raises(DataError, match=name) as caught:
            picture(tmp_path / name, "L")
        assert "\n" not in str(caught.value)
    frames = [Image.fromarray(np.full((2, 2), value, np.uint8)) for value in (0, 9)]
    for name in ("pages.tiff", "moving.gif"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
        with pytest.raises(DataError, match="has 2: write one file for each"):
            picture(tmp_path / name, "L")
    with pytest.raises(DataError, match="does not exist"):
        picture(tmp_path / "missing.dcm", "L")
    Image.fromarray(np.full((2, 2), np.nan, np.float32)).save(tmp_path / "nan.tiff")
    with pytest.raises(DataError, match="finite"):
        picture(tmp_path / "nan.tiff", "L")
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(ConfigError, match=r"\[dicom\]|--extra dicom"):
        picture(tmp_path / "a.dcm", "L")


def test_a_damaged_dicom_file_is_one_line_or_read(tmp_path: Path) -> None:
    whole, rng = dicom(tmp_path / "a.dcm", RAMP).read_bytes(), np.random.default_rng(0)
    outcomes = []
    for n in range(200):
        data = bytearray(whole)
        for at in rng.integers(132, len(data), 3):
            data[at] = int(rng.integers(256))
        (tmp_path / "damaged.dcm").write_bytes(data[: len(data) - int(rng.integers(0, 40)) * (n % 2)])
        try:
            picture(tmp_path / "damaged.dcm", "L")
        except DataError as error:
            outcomes.append(str(error))
    assert len(outcomes) > 20
    assert all("damaged.dcm" in line and "\n" not in line for line in outcomes)


def test_fitting() -> None:
    wide = Image.fromarray(np.repeat(np.array([[0, 90, 180, 240]], np.uint8), 2, axis=0))  # 4 wide, 2 high
    padded, cropped, stretched = (np.asarray(fitted(wide, 4, fit)) for fit in ("pad", "crop", "stretch"))
    assert [array.shape for array in (padded, cropped, stretched)] == [(4, 4)] * 3
    assert not padded[[0, 3]].any()
    np.testing.assert_array_equal(padded[1:3], np.asarray(wide))
    np.testing.assert_array_equal(stretched, np.repeat(np.asarray(wide)[:1], 4, axis=0))
    assert 45 < cropped.min() < cropped.max() < 225  # the outer columns are cut off
    assert fitted(wide.crop((0, 0, 2, 2)), 2, "pad").size == (2, 2)


def test_shrinking_averages_over_all_pixels() -> None:
    """Without antialiasing a fine checkerboard would become all black, all white, or stripes."""
    board = Image.fromarray((np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8))
    for fit in ("pad", "crop", "stretch"):
        shrunk = np.asarray(fitted(board, 8, fit))
        assert abs(shrunk.astype(int) - 127).max() < 8
