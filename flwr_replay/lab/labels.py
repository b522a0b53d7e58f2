"""Labels: shown where they travel, inferred where only a gradient or a change of weights does."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from flwr_replay.attacks.attacker import Attacker
from flwr_replay.attacks.catalogue import AT_CUT, COUNTS, SHOWN
from flwr_replay.attacks.gradients import labels_at_cut
from flwr_replay.errors import RunError
from flwr_replay.lab.changes import OfChange
from flwr_replay.lab.evidence import NO_MODEL, Evidence, Exhibit
from flwr_replay.lab.judge import Originals
from flwr_replay.lab.registry import trial_of
from flwr_replay.lab.trials import OfActivations, Question, Trial
from flwr_replay.learning.tasks import make_task
from flwr_replay.models import split_before_head
from flwr_replay.wire.weights import load_arrays

__all__ = ["judged_labels", "label_attacks"]

SECRET = "which of the institution's examples are behind the answer is its secret, so labels are not judged"
ROW_BY_ROW = ("activations", "codes", "images")  # numbers with a row for each image


def label_attacks(
    exhibit: Exhibit,
    evidence: Evidence,
    trial: Trial | None,
    originals: Originals,
    attacker: Attacker,
) -> Iterator[Question]:
    """Yield attacks on labels, each to be called; the judge knows how many are right."""
    if evidence.config.task.kind != "classification" or exhibit.declared.kind == "synthetic":
        return  # labels that a generator has drawn are of nobody
    if exhibit.means == "labels":
        yield SHOWN.name, lambda: _read(exhibit, evidence, originals)
    elif exhibit.means == "gradients at a cut":
        yield AT_CUT.name, lambda: _at_cut(exhibit, evidence, originals)
    elif isinstance(trial, OfChange) and trial.whole:
        yield COUNTS.name, lambda: judged_labels(trial, originals, lambda: trial.labels_n(attacker))


def _read(exhibit: Exhibit, evidence: Evidence, originals: Originals) -> dict[str, Any]:
    """Read labels of the answer whose images the judge knows; under local DP some are not those of the images."""
    beside = [each for each in evidence.sent if (each.institution, each.stage) == (exhibit.institution, exhibit.stage)]
    trials = [trial_of(each, evidence) for each in beside if each.means in ROW_BY_ROW]
    if not trials or not (trial := trials[0]):
        raise RunError("they are sent as they are; which image each is of, the judge cannot see")
    if (rows_n := trial.rows(originals)) is None:
        raise RunError(SECRET)
    sent_n = torch.from_numpy(exhibit.array(trial.answer))[: len(rows_n)]
    own_n = rows_n >= 0
    return _right(sent_n[own_n], originals.y_N[rows_n[own_n]])


def judged_labels(trial: Trial, originals: Originals, found: Callable[[], Tensor]) -> dict[str, Any]:
    """Say how many labels are right, of the images that are attacked; of mixed images, as many of each class."""
    if (rows_n := trial.rows(originals)) is None:
        raise RunError(SECRET)
    found_n, rows_n = found(), rows_n[trial.places_n]
    if not isinstance(trial, OfChange):
        own_n = rows_n >= 0
        return _right(found_n[own_n], originals.y_N[rows_n[own_n]])
    sides = (found_n, originals.y_N[rows_n].long())
    counts_C, true_C = (torch.bincount(labels, minlength=trial.evidence.config.task.classes) for labels in sides)
    classes = trial.evidence.config.task.classes
    even_C = torch.bincount(torch.arange(trial.mixed) % classes, minlength=classes)
    right, guessed = (int(torch.minimum(counts, true_C).sum()) for counts in (counts_C, even_C))
    return {"labels": {"right": right, "number": trial.mixed, "equal-counts": guessed}}


def _at_cut(exhibit: Exhibit, evidence: Evidence, originals: Originals) -> dict[str, Any]:
    """Infer the labels of a visit's first batches from the gradients at the input of the head.

    The server knows the head with which the visit began. The activations of these batches tell the judge whose they
    are.
    """
    first = exhibit.answers[0]
    begun = [each for each in evidence.sent if each.institution == exhibit.institution and each.field == "activations"]
    entered = next((entry.answers[0] for entry in begun if entry.stage.startswith("enter")), None)
    if first.request is None or entered is None or entered.request is None:
        raise RunError(NO_MODEL)
    *_, head = split_before_head(evidence.model(), str(entered.request.scalars.get("cut", "")))
    load_arrays(head, {name: entered.request.arrays[name] for name in head.state_dict()})
    inputs, gradients = (torch.tensor(array) for array in (first.request.arrays["outputs"], exhibit.array(first)))
    task = evidence.config.task
    found_n = labels_at_cut(head, inputs, gradients, make_task(task).losses, task.classes)
    rows_n = OfActivations(begun[0], evidence).rows(originals)
    return _right(found_n, originals.y_N[rows_n])


def _right(found_n: Tensor, true_n: Tensor) -> dict[str, Any]:
    right, commonest = int((found_n == true_n).sum()), int(torch.bincount(true_n.long()).max())
    return {"labels": {"right": right, "number": len(true_n), "always-one": commonest}}
