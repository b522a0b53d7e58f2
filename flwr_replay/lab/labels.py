"""Labels: shown where they travel, inferred where only a gradient or a change of weights does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from flwr_replay.attacks.attacker import Attacker
from flwr_replay.attacks.catalogue import COUNTS, SHOWN
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
    attacker: Attacker,
) -> Iterator[Question]:
    """Yield attacks on labels, each to be called; the judge knows how many are right."""
    if evidence.config.task.kind != "classification":
        return
    if exhibit.means == "labels":
        number = sum(len(exhibit.array(answer)) for answer in exhibit.answers)
        yield SHOWN.name, lambda: _right(number, number)
    elif isinstance(trial, OfChange):
        yield COUNTS.name, lambda: _counted(trial, originals, attacker)


def _counted(trial: OfChange, originals: Originals, attacker: Attacker) -> dict[str, Any]:
    """Infer how many examples of each class are behind an answer."""
    sides = (trial.labels_n(attacker), originals.y_N[trial.rows(originals)].long())
    counts_C, true_C = (torch.bincount(one, minlength=trial.evidence.config.task.classes) for one in sides)
    return _right(int(torch.minimum(counts_C, true_C).sum()), trial.mixed)


def _right(right: int, number: int) -> dict[str, Any]:
    return {"labels": {"right": right, "number": number}}
