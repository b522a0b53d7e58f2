"""Labels: shown where they travel, inferred where only a gradient or a change of weights does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from flwr_replay.attacks.attacker import Attacker
from flwr_replay.attacks.catalogue import COUNTS, SHOWN
from flwr_replay.lab.changes import OfChange
from flwr_replay.lab.evidence import Evidence, Exhibit
from flwr_replay.lab.judge import Originals, rows_in_order
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
        yield SHOWN.name, lambda: _read(exhibit, evidence, originals)
    elif isinstance(trial, OfChange):
        yield COUNTS.name, lambda: _counted(trial, originals, attacker)


def _read(exhibit: Exhibit, evidence: Evidence, originals: Originals) -> dict[str, Any]:
    """Read labels; under local DP some are not those of the images."""
    sent_n = torch.from_numpy(np.concatenate([exhibit.array(answer) for answer in exhibit.answers]))
    if "latents" not in evidence.config.privacy.mechanisms:
        return _right(len(sent_n), len(sent_n))
    true_n = originals.y_N[rows_in_order(len(sent_n), 0, originals)]
    return _right(int((sent_n == true_n).sum()), len(sent_n))


def _counted(trial: OfChange, originals: Originals, attacker: Attacker) -> dict[str, Any]:
    """Infer how many examples of each class are behind an answer."""
    sides = (trial.labels_n(attacker), originals.y_N[trial.rows(originals)].long())
    counts_C, true_C = (torch.bincount(one, minlength=trial.evidence.config.task.classes) for one in sides)
    return _right(int(torch.minimum(counts_C, true_C).sum()), trial.mixed)


def _right(right: int, number: int) -> dict[str, Any]:
    return {"labels": {"right": right, "number": number}}
