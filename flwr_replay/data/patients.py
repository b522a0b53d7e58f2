"""Patients, each with all examples of theirs: a partition deals patients, so nobody's examples are at two institutions.

Letters: N examples, P patients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flwr_replay.data.datasets import Examples
from flwr_replay.data.skew import is_continuous

__all__ = ["Patients", "patients_of"]

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Patients:
    """What is dealt: patients, or examples where the data name no patients, or one example of each.

    Parameters
    ----------
    labels : ndarray, shape (P,)
        Each patient's label: its most frequent class, or the mean of continuous labels.
    members : sequence of P int64 arrays, or None
        Ascending indices of each patient's examples; None: patient p has example p alone.
    """

    labels: NDArray[Any]
    members: Sequence[Indices] | None

    def examples(self, parts: Sequence[Indices]) -> list[Indices]:
        """Return the examples of the patients that were dealt."""
        if self.members is None:
            return list(parts)
        none = np.empty(0, np.int64)
        return [np.concatenate([none, *(self.members[p] for p in part)]) for part in parts]


def patients_of(examples: Examples) -> Patients:
    """Return the patients in the order of their first examples."""
    labels = examples.labels
    if examples.patients is None or len(np.unique(examples.patients)) == len(examples):
        return Patients(labels, None)
    _, first, codes = np.unique(examples.patients, return_index=True, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(codes))[:-1])
    members = [members[p] for p in np.argsort(first)]
    return Patients(np.asarray([_label(labels[own]) for own in members], labels.dtype), members)


def _label(labels: NDArray[Any]) -> Any:
    return labels.mean() if is_continuous(labels) else np.bincount(labels).argmax()
