"""One image of a file, whatever its size and mode: eight bits per channel, and as high and wide as the task's.

Every rule here looks at one image only. So differential privacy is as if the files had been made so.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.data.readers import line_of
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.terminal import installing

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["SUFFIXES", "fitted", "is_picture", "picture"]

DICOM = (".dcm", ".dicom")
SUFFIXES = frozenset(
    [".bmp", ".dib", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff"]
).union([".webp", *DICOM])
EIGHT_BIT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
DEEPER = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")  # grey, more than 8 bits
# What Pillow takes for numbers of the other sign: its mode, and TIFF's SampleFormat.
SIGNS = {("L", (2,)): np.int8, ("I", (1,)): np.uint32}
PHOTOMETRIC, SAMPLE_FORMAT, WHITE_IS_ZERO = 262, 339, 0  # TIFF's tags


def picture(path: Path, mode: str, where: str = "") -> Image.Image:
    """Read an opaque image as one with 8 bits per channel.

    A grey image with more bits is scaled from its own least and greatest value to 0..255: how many of 16 bits a scanner
    uses, the file does not say. A DICOM file's pixels go through its own modality and VOI transformations first; its
    padding has no part in the scale, and becomes black. MONOCHROME1 and TIFF's WhiteIsZero, where small is bright, are
    inverted. An image is turned as its EXIF or TIFF orientation says.

    `mode` is Pillow's name of the mode to return, L (grey) or RGB; `where` is the place that lists the file, for error
    lines.

    Raises
    ------
    DataError
        If it is missing, truncated, not an image, not opaque, or has several frames; the error names it.
    ConfigError
        For a DICOM file without the package pydicom.
    """
    from PIL import Image, UnidentifiedImageError

    named = f"{path} ({where})" if where else f"{path}"
    try:
        with open(path, "rb") as file:  # Pillow maps what it opens by name, and so scrambles a TIFF file on its side
            if path.suffix.lower() in DICOM or _marked(file):
                return _dicom(path, named).convert(mode)
            with Image.open(file) as image:
                return _shown(image, named).convert(mode)
    except FileNotFoundError:
        raise DataError(f"image {named} does not exist: add it") from None
    except UnidentifiedImageError:
        raise DataError(f"{named} must be an image; it cannot be read: Pillow knows no such form") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{named} must be an image; it cannot be read: {line_of(error)}") from None


def fitted(image: Image.Image, size: int, fit: str, mask: bool = False) -> Image.Image:
    """Return an image of size x size pixels; one that has this size stays as it is.

    Parameters
    ----------
    image : Image.Image
        With 8 bits per channel.
    size : int
        Height and width, pixels.
    fit : str
        pad: the longer side becomes `size`, the rest is black, half of it on either side | crop: the shorter side
        becomes `size`, and the middle is kept | stretch: both sides become `size`. Pillow's bilinear filter, which
        averages over all pixels when it shrinks | crop-cubic, stretch-cubic: the same, by Pillow's bicubic filter.
    mask : bool
        Take each pixel from the nearest one, whatever the filter.
    """
    from PIL import Image, ImageOps

    if image.size == (size, size):
        return image
    how, _, cubic = fit.partition("-")
    smooth = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
    filtered = Image.Resampling.NEAREST if mask else smooth
    if how == "pad":
        return ImageOps.pad(image, (size, size), filtered)
    if how == "crop":
        return ImageOps.fit(image, (size, size), filtered)
    return image.resize((size, size), filtered)


def is_picture(path: Path) -> bool:
    """Say whether a file is called as images are; without a suffix, or as a DICOM file, it may begin as one."""
    from PIL import Image

    if path.suffix.lower() in SUFFIXES or not path.is_file():
        return path.is_file()
    with suppress(OSError, Image.DecompressionBombError), open(path, "rb") as file:
        if _marked(file):
            return True
        if not path.suffix:
            Image.open(file)
            return True
    return False


def _marked(file: IO[bytes]) -> bool:
    """Say whether a file begins as DICOM files do; many have no suffix."""
    return file.read(132)[128:] == b"DICM"


def _shown(image: Image.Image, named: str) -> Image.Image:
    """Return an opaque image of one frame as it is meant to be seen: upright, black at 0, with 8 bits per channel."""
    from PIL import Image, ImageOps

    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # a photograph with a preview
        raise DataError(f"an image file has one frame; {named} has {frames}: write one file for each")
    if image.mode not in EIGHT_BIT + DEEPER:
        raise DataError(f"images must be grey or in colour; {named} has mode {image.mode}: convert it")
    upright, tags = ImageOps.exif_transpose(image), getattr(image, "tag_v2", {})  # TIFF's
    dtype = SIGNS.get((image.mode, tags.get(SAMPLE_FORMAT, (1,)))) if tags else None
    if image.mode in DEEPER or dtype:
        values_HW = np.asarray(upright).view(dtype) if dtype else np.asarray(upright)
        clear = bool(np.any(values_HW == upright.info.get("transparency")))
        grey = _bytes(values_HW.astype(np.float64), named)
        white_is_zero = tags and tags.get(PHOTOMETRIC, WHITE_IS_ZERO) == WHITE_IS_ZERO  # Pillow inverts 8 bits itself
        upright = Image.fromarray(255 - grey if white_is_zero else grey)
    else:
        clear = upright.has_transparency_data and upright.convert("RGBA").getchannel("A").getextrema()[0] != 255
    if clear:
        raise DataError(
            f"images must be opaque; {named} has transparent pixels, whose background is unknown: save it without an "
            "alpha channel"
        )
    return upright


def _dicom(path: Path, named: str) -> Image.Image:
    """Read a DICOM file of one frame."""
    from PIL import Image

    try:
        pydicom = importlib.import_module("pydicom")
        pixels = importlib.import_module("pydicom.pixels")
    except ModuleNotFoundError:
        raise ConfigError(f"a DICOM file needs the package pydicom; got {named}: {installing('dicom')}") from None
    try:
        picture = pydicom.dcmread(path)
        kind = picture.PhotometricInterpretation
        if kind not in ("MONOCHROME1", "MONOCHROME2"):
            array = pixels.pixel_array(path)  # in RGB
            if array.ndim != 3 or array.dtype != np.uint8:
                raise DataError(f"a DICOM file has one frame, grey or with 8 bits per colour; {named} has others")
            return Image.fromarray(array)
        array = picture.pixel_array
        if array.ndim != 2:
            raise DataError(f"a DICOM file has one frame; {named} has shape {array.shape}: write one file for each")
        padding, array = _padding(picture, array), pixels.apply_modality_lut(array, picture)
        if picture.get("RescaleSlope"):  # it is applied, and a window of pydicom's would be inverted by a negative one
            picture.RescaleSlope = abs(picture.RescaleSlope)
        grey = _bytes(np.asarray(pixels.apply_voi_lut(array, picture), np.float64), named, ~padding)
        return Image.fromarray(np.where(padding, 0, 255 - grey if kind == "MONOCHROME1" else grey).astype(np.uint8))
    except (DataError, FileNotFoundError):
        raise
    except Exception as error:  # a damaged file can raise any error
        raise DataError(f"{named} must be a DICOM image; it cannot be read: {line_of(error)}") from None


def _padding(picture: Any, stored_HW: NDArray[Any]) -> NDArray[np.bool_]:
    """Say which stored values are padding, such as the corners around a round scan (DICOM PS3.3 C.7.5.1.1.2)."""
    value = picture.get("PixelPaddingValue")
    if value is None:
        return np.zeros(stored_HW.shape, bool)
    limit, unused = picture.get("PixelPaddingRangeLimit"), 8 * stored_HW.itemsize - picture.BitsStored
    ends = np.asarray([value, value if limit is None else limit]).astype(stored_HW.dtype)  # many write -2000 as 63536
    low, high = np.sort(ends << unused >> unused)
    within: NDArray[np.bool_] = (low <= stored_HW) & (stored_HW <= high)
    return within


def _bytes(values_HW: NDArray[Any], named: str, counted: NDArray[np.bool_] | bool = True) -> NDArray[np.uint8]:
    """Scale from the least to the greatest of the values that count; one that is the same everywhere becomes black."""
    if not np.isfinite(values_HW).all():
        raise DataError(f"an image's values must be finite; {named} has others: convert it")
    among = values_HW[counted] if np.any(counted) else values_HW
    low, high = among.min(), among.max()
    scaled: NDArray[np.uint8] = np.rint((values_HW - low) * (255 / ((high - low) or 1))).clip(0, 255).astype(np.uint8)
    return scaled
