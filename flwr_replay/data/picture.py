"""One image of a file, whatever its size and mode: eight bits per channel, and as high and wide as the task's.

Every rule here looks at one image only. So differential privacy is as if the files had been made so.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.errors import ConfigError, DataError
from flwr_replay.terminal import installing

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["DICOM", "fitted", "picture"]

DICOM = (".dcm", ".dicom")
EIGHT_BIT = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr")
DEEPER = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")  # grey, more than 8 bits


def picture(path: Path, mode: str, where: str = "") -> Image.Image:
    """Read an opaque image as one with 8 bits per channel.

    A grey image with more bits is scaled from its own least and greatest value to 0..255: how many of 16 bits a scanner
    uses, the file does not say. A DICOM file's pixels go through its own modality and VOI transformations first;
    MONOCHROME1, where small is bright, is inverted. A photograph is turned as its EXIF orientation says.

    Parameters
    ----------
    path : Path
        The file.
    mode : str
        Pillow's name of the mode to return: L (grey) or RGB.
    where : str
        The place that lists the file, for error lines.

    Raises
    ------
    DataError
        If it is missing, truncated, not an image, not opaque, or has several frames; the error names it.
    ConfigError
        For a DICOM file without the package pydicom.
    """
    from PIL import Image, ImageOps

    named = f"{path} ({where})" if where else f"{path}"
    try:
        if path.suffix.lower() in DICOM or _marked(path):
            return _dicom(path, named).convert(mode)
        with Image.open(path) as image:
            frames = getattr(image, "n_frames", 1)
            if frames > 1 and image.format != "MPO":  # a photograph with a preview
                raise DataError(f"an image file has one frame; {named} has {frames}: write one file for each")
            if image.mode in DEEPER:
                return Image.fromarray(_bytes(np.asarray(image, np.float64), named)).convert(mode)
            if image.mode not in EIGHT_BIT:
                raise DataError(f"images must be grey or in colour; {named} has mode {image.mode}: convert it")
            if image.has_transparency_data and image.convert("RGBA").getchannel("A").getextrema()[0] != 255:
                raise DataError(
                    f"images must be opaque; {named} has transparent pixels, whose background is unknown: save it "
                    "without an alpha channel"
                )
            return ImageOps.exif_transpose(image).convert(mode)
    except FileNotFoundError:
        raise DataError(f"image {named} does not exist: add it") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{named} must be an image; it cannot be read: {reason}") from None


def fitted(image: Image.Image, size: int, fit: str) -> Image.Image:
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
        averages over all pixels when it shrinks.
    """
    from PIL import Image, ImageOps

    if image.size == (size, size):
        return image
    filtered = Image.Resampling.BILINEAR
    if fit == "pad":
        return ImageOps.pad(image, (size, size), filtered)
    if fit == "crop":
        return ImageOps.fit(image, (size, size), filtered)
    return image.resize((size, size), filtered)


def _marked(path: Path) -> bool:
    """Say whether a file begins as DICOM files do; many have no suffix."""
    with open(path, "rb") as file:
        return file.read(132)[128:] == b"DICM"


def _dicom(path: Path, named: str) -> Image.Image:
    """Read a DICOM file of one frame."""
    from PIL import Image

    try:
        pydicom = importlib.import_module("pydicom")
        pixels = importlib.import_module("pydicom.pixels")
    except ModuleNotFoundError:
        raise ConfigError(f"a DICOM file needs the package pydicom; got {named}: {installing('dicom')}") from None
    try:
        found = pydicom.dcmread(path)
        kind = found.PhotometricInterpretation
        if kind not in ("MONOCHROME1", "MONOCHROME2"):
            array = pixels.pixel_array(path)  # in RGB
            if array.ndim != 3 or array.dtype != np.uint8:
                raise DataError(f"a DICOM file has one frame, grey or with 8 bits per colour; {named} has others")
            return Image.fromarray(array)
        array = found.pixel_array
        if array.ndim != 2:
            raise DataError(f"a DICOM file has one frame; {named} has shape {array.shape}: write one file for each")
        array = pixels.apply_voi_lut(pixels.apply_modality_lut(array, found), found)
        grey = _bytes(np.asarray(array, np.float64), named)
        return Image.fromarray(255 - grey if kind == "MONOCHROME1" else grey)
    except (DataError, FileNotFoundError):
        raise
    except Exception as error:  # a damaged file can raise any error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{named} must be a DICOM image; it cannot be read: {reason}") from None


def _bytes(values_HW: NDArray[Any], named: str) -> NDArray[np.uint8]:
    """Scale from the least to the greatest value; one that is the same everywhere becomes black."""
    if not np.isfinite(values_HW).all():
        raise DataError(f"an image's values must be finite; {named} has others: convert it")
    low, high = values_HW.min(), values_HW.max()
    scaled: NDArray[np.uint8] = np.rint((values_HW - low) * (255 / ((high - low) or 1))).astype(np.uint8)
    return scaled
