"""Reader of bags: an example is a set of feature vectors, such as those of a slide's patches (Kalra et al. 2023, 4.3).

    <data-dir>/manifest.csv      columns bag,label[,site][,split]; bags relative to it
    <data-dir>/<bag>.npz         one array `features`, (n, task.channels), n from 1 to task.size squared

A bag becomes an image with task.channels channels and task.size x task.size places. Each place holds one vector, in the
order of the file. Unused places are all zero; `model=deepset` takes such places for empty. The split may
also be `external`: test examples of institutions outside the run, for `external=true`.
"""

import numpy as np
from numpy.typing import NDArray

from flwr_replay.config.sections import TaskConfig, require
from flwr_replay.data.decoded import DecodedImages
from flwr_replay.data.manifest import SPLITS, ManifestRow, manifest_rows, raws_of
from flwr_replay.data.readers import Raw, data_root, line_of
from flwr_replay.errors import DataError

__all__ = ["read_bags"]


def read_bags(task: TaskConfig, kept: DecodedImages | None = None) -> dict[str, Raw]:
    """Read a folder of bags, laid out as in the module's docstring; `kept` has those that were read before.

    Raises
    ------
    DataError
        For a wrong row, label or bag, which the error names.
    ConfigError
        Without `task.data_dir`.
    """
    require(bool(task.data_dir), f"task={task.name} reads a folder of bags: set task.data-dir=FOLDER")
    manifest, known = data_root(task) / "manifest.csv", (*SPLITS, "external")
    rows = manifest_rows(manifest, task.site_column, "bag", known)
    return raws_of(rows, task, str(manifest), _read_bag, np.float32, known, kept)


def _read_bag(row: ManifestRow, task: TaskConfig) -> NDArray[np.float32]:
    """Read one bag as (F, H, W)."""
    places = task.size**2
    try:
        with np.load(row.file, allow_pickle=False) as file:
            features_nF = file["features"]
    except FileNotFoundError:
        raise DataError(f"{row.file} does not exist ({row.where}): add it, or remove the row") from None
    except Exception as error:  # a damaged archive can raise any error
        raise DataError(
            f"a bag must be an .npz file with an array features; {row.file} is not ({line_of(error)})"
        ) from None
    if features_nF.ndim != 2 or features_nF.shape[1] != task.channels or features_nF.dtype.kind not in "fiu":
        raise DataError(
            f"features must be numbers of shape (n, task.channels) = (n, {task.channels}); got {features_nF.dtype} of "
            f"shape {features_nF.shape} in {row.file}: set task.channels, or convert the bag"
        )
    if not 1 <= len(features_nF) <= places:
        raise DataError(
            f"a bag holds 1 to task.size squared = {places} vectors; {row.file} has {len(features_nF)}: set task.size"
        )
    features_nF = features_nF.astype(np.float32)
    if not features_nF.any(axis=1).all():
        raise DataError(
            f"a vector of a bag must not be all zero, which means an empty place; {row.file} has one: leave it out"
        )
    x_FP = np.zeros((task.channels, places), np.float32)
    x_FP[:, : len(features_nF)] = features_nF.T
    return x_FP.reshape(task.channels, task.size, task.size)
