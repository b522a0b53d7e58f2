"""Readers of public clinical data sets, each from a folder as the original download unpacks it.

Sizes and splits count subjects (patients, lesions); all images of a subject lie in one split. An institution that holds
its own part of such a folder, rows and images, reads it with the same reader.
"""

from __future__ import annotations

from flwr_replay.data.clinical.boneage import read_boneage
from flwr_replay.data.clinical.brats import read_brats
from flwr_replay.data.clinical.isic import read_isic
from flwr_replay.data.clinical.retina import read_retina
from flwr_replay.data.clinical.tuberculosis import read_tuberculosis

__all__ = ["read_boneage", "read_brats", "read_isic", "read_retina", "read_tuberculosis"]
