"""Data sets, their partitions among institutions, and how much the institutions differ."""

from flwr_replay.data.class_counts import ClassCounts
from flwr_replay.data.datasets import Dataset, Examples, examples_of, load
from flwr_replay.data.dealing import Dealt
from flwr_replay.data.partitions import Partition, institution_name, institution_names, partition, site_names
from flwr_replay.data.show import show
from flwr_replay.data.skew import ks_matrix, label_histogram, tv_matrix

__all__ = [
    "ClassCounts",
    "Dataset",
    "Dealt",
    "Examples",
    "Partition",
    "examples_of",
    "institution_name",
    "institution_names",
    "ks_matrix",
    "label_histogram",
    "load",
    "partition",
    "show",
    "site_names",
    "tv_matrix",
]
