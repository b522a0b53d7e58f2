"""BraTS 2017 (Menze et al. 2014): the whole tumour on T2-FLAIR, as Qu et al. 2022, section 4.3.

    FOLDER/HGG/Brats17_CBICA_AAB_1/Brats17_CBICA_AAB_1_flair.nii.gz
    FOLDER/HGG/Brats17_CBICA_AAB_1/Brats17_CBICA_AAB_1_seg.nii.gz       0 none, 1, 2 and 4 regions of the tumour
    FOLDER/institutions.csv                                             optional: subject,institution

A subject's name contains its institution: 2013, CBICA, TCIA. BraTS 2018 may be used in place of 2017. It has the same
subjects under more specific names (Brats18_TCIA01_231_1 …), with nine institutions for high-grade gliomas. The paper's
authors learned of ten institutions by personal communication; with better knowledge than the names, write
`institutions.csv`. Other sequences and the low-grade gliomas (LGG) are left out.

A volume's axial slices are taken three at a time, without overlap. An example has the three slices as channels, and the
middle one's mask as label. Triples whose middle slice shows no brain are left out; those without tumour are kept. The
paper does not say how intensities were scaled. Here 0 stays 0, and the 99.5th percentile of a volume's brain is 255.

Slices are resized to 256 pixels, cropped to 224 and written to `FOLDER/slices/`. An institution with its own images has
a folder HGG with its own subjects.
"""

import importlib
import re
import zlib
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.convert.download import keyed_rows, whole
from flwr_replay.data.decoded import each
from flwr_replay.data.folder import LEFT_BEHIND
from flwr_replay.data.manifest import ManifestRow
from flwr_replay.data.readers import again, line_of
from flwr_replay.errors import ConfigError, DataError
from flwr_replay.terminal import installing

__all__ = ["brats_rows"]

SUBJECT = re.compile(r"Brats1[78]_([A-Za-z0-9]+)_\w+")
SLICES = 3  # consecutive, as the channels of one example
RESIZED, CROPPED = 256, 224  # pixels: a slice is resized to 256, and its central 224 are kept
TUMOUR = (1, 2, 4)
BRIGHTEST = 99.5  # percentile of the voxels that are not 0


def brats_rows(root: Path) -> list[ManifestRow]:
    """Write the slices of all subjects, and list them; a DataError names a wrong subject, volume or segmentation."""
    try:
        nibabel = importlib.import_module("nibabel")
    except ModuleNotFoundError:
        raise ConfigError(f"brats needs the package nibabel: {installing('brats')}") from None
    folders = sorted(
        path for path in (root / "HGG").glob("*") if path.is_dir() and not LEFT_BEHIND.fullmatch(path.name)
    )
    if not folders:
        raise DataError(f"brats needs subjects; got none in {root / 'HGG'}: give the folder that holds HGG/")
    sites = _sites([folder.name for folder in folders], root)
    with whole(root / "slices") as place:
        written = each(partial(_write, place, nibabel=nibabel), folders)
    return [
        ManifestRow(root / "slices" / f"{name}.png", f"slices/{name}-mask.png", str(folder), site, patient=folder.name)
        for folder, site, names in zip(folders, sites, written, strict=True)
        for name in names
    ]


def _sites(subjects: list[str], root: Path) -> list[str]:
    """Return every subject's institution."""
    table = root / "institutions.csv"
    named = keyed_rows(table, "subject", ["institution"]) if table.is_file() else {}
    sites = []
    for subject in subjects:
        matched = SUBJECT.fullmatch(subject)
        if matched is None:
            raise DataError(f"a subject is named Brats17_<institution>_<number>; got {root / 'HGG' / subject}")
        site = named.get(subject, {}).get("institution", "") if named else matched[1]
        if not site:
            raise DataError(f"{table} must name every subject's institution; {subject} has none: add it")
        sites.append(site)
    return sites


def _write(place: Path, folder: Path, nibabel: ModuleType) -> list[str]:
    """Write a subject's threes of slices, each with its mask, and return their names."""
    from PIL import Image

    paths = [folder / f"{folder.name}_{kind}.nii.gz" for kind in ("flair", "seg")]
    paths = [plain if (plain := path.with_suffix("")).is_file() else path for path in paths]
    flair, labels = (_volume(path, nibabel) for path in paths)
    if flair.shape != labels.shape:
        raise DataError(
            f"a volume and its segmentation must have one shape; {paths[1]} {labels.shape}, not {flair.shape}"
        )
    if not np.isin(labels, (0, *TUMOUR)).all():
        wrong = np.setdiff1d(labels, (0, *TUMOUR))[0]
        raise DataError(f"a segmentation holds 0, 1, 2 and 4 only; {paths[1]} holds {wrong}")
    if not (flair > 0).any():
        raise DataError(f"{paths[0]} must show a brain; all its voxels are 0")
    brightest = np.percentile(flair[flair > 0], BRIGHTEST)
    grey = np.clip(np.rint(flair * (255 / brightest)), 0, 255).astype(np.uint8)
    whole_tumour = np.isin(labels, TUMOUR).astype(np.uint8) * 255
    (place / folder.name).mkdir()
    names = []
    for first in range(0, grey.shape[2] - SLICES + 1, SLICES):
        middle = first + SLICES // 2
        if grey[:, :, middle].any():
            names.append(f"{folder.name}/{first}")
            slices = [_slice(grey[:, :, first + n], "BILINEAR") for n in range(SLICES)]
            Image.fromarray(np.stack(slices, axis=-1)).save(place / f"{names[-1]}.png")
            Image.fromarray(_slice(whole_tumour[:, :, middle], "NEAREST")).save(place / f"{names[-1]}-mask.png")
    return names


def _volume(path: Path, nibabel: ModuleType) -> NDArray[Any]:
    """Read a volume, shape (left-right, front-back, axial)."""
    broken = (nibabel.filebasedimages.ImageFileError, nibabel.spatialimages.HeaderDataError)
    try:
        volume: NDArray[Any] = np.asanyarray(nibabel.load(path).dataobj)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist: add it, or remove the subject's folder") from None
    except (*broken, OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path} must be a NIfTI volume; it cannot be read: {line_of(error)}: {again(error)}") from None
    if volume.ndim != 3:
        raise DataError(f"{path} must be a volume of three dimensions; got {volume.shape}")
    return volume


def _slice(pixels: NDArray[np.uint8], filter_name: str) -> NDArray[np.uint8]:
    """Resize an axial slice and keep its centre, with rows from front to back."""
    from PIL import Image

    margin = (RESIZED - CROPPED) // 2
    image = Image.fromarray(pixels.T.copy()).resize((RESIZED, RESIZED), Image.Resampling[filter_name])
    return np.asarray(image)[margin : margin + CROPPED, margin : margin + CROPPED]
