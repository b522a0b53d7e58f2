"""Labels: shown where they travel, inferred where only a gradient or a change of weights does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flwr_replay.lab.auxiliary import Auxiliary
from flwr_replay.lab.changes import OfChange
from flwr_replay.lab.evidence import Evidence, Exhibit
from flwr_replay.lab.judge import Originals
from flwr_replay.lab.trials import Question, Trial

__all__ = ["label_attacks"]


def label_attacks(
    exhibit: Exhibit,
    evidence: Evidence,
    trial: Trial | None,
    originals: Originals,
    auxiliary: Auxiliary | None,
    seed: int,
) -> Iterator[Question]:
    """Yield attacks on labels, each to be called; the judge knows how many are right."""
    if evidence.config.task.kind != "classification":
        return
    if exhibit.declared.means == "labels":
        number = sum(len(exhibit.array(answer)) for answer in exhibit.answers)
        yield "they are sent as they are", lambda: _right(number, number)
    elif isinstance(trial, OfChange):
        yield "counts from the head's bias", lambda: _counted(trial, originals, auxiliary, seed)


def _counted(trial: OfChange, originals: Originals, auxiliary: Auxiliary | None, seed: int) -> dict[str, Any]:
    """Infer how many examples of each class are behind an answer."""
    counts_C = trial.counts_C(auxiliary, seed)
    true_C = torch.bincount(originals.y_N[trial.rows(originals)].long(), minlength=len(counts_C))
    return _right(int(torch.minimum(counts_C, true_C).sum()), trial.behind)


def _right(right: int, number: int) -> dict[str, Any]:
    return {"labels": {"right": right, "number": number}}
