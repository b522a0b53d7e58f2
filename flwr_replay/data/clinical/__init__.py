"""Readers of public clinical data sets, each from the folder of the unpacked original download.

Sizes and splits count subjects (patients, lesions). All images of a subject are in one split. An institution that has
only its own rows and images of such a folder uses the same reader.
"""

from __future__ import annotations

from flwr_replay.data.clinical.boneage import read_boneage
from flwr_replay.data.clinical.brats import read_brats
from flwr_replay.data.clinical.isic import read_isic
from flwr_replay.data.clinical.retina import read_retina
from flwr_replay.data.clinical.tuberculosis import read_tuberculosis

__all__ = ["read_boneage", "read_brats", "read_isic", "read_retina", "read_tuberculosis"]
