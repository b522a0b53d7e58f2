"""What guessing would have, and balanced accuracy and AUC where labels are so unequal that accuracy alone misleads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flwr_replay.report.judged import VALIDATION

__all__ = [
    "BESIDE",
    "beside",
    "guessed",
    "guessing_lines",
    "label_counts",
    "pooled_counts",
    "spread",
    "without_beside",
]

BESIDE = ("balanced-accuracy", "auc")
MOST_NAMED = 8  # institutions
UNEQUAL = 2.0  # how many times as frequent as the rarest label the most frequent one is at least

Confusion = Mapping[str, Sequence[int]]  # by institution: examples by label and prediction, row by row


def pooled_counts(confusion: Confusion) -> list[int]:
    """Sum confusion matrices over the institutions; empty if there are none."""
    return [sum(column) for column in zip(*confusion.values(), strict=True)]


def label_counts(counts: Sequence[int]) -> list[int]:
    """Return how many examples each label has, from a confusion matrix row by row."""
    size = round(len(counts) ** 0.5)
    return [sum(counts[at * size : (at + 1) * size]) for at in range(size)]


def beside(metrics: Mapping[str, float], confusion: Confusion) -> dict[str, float]:
    """Return what stands beside the accuracy: nothing if no label that occurs is twice as frequent as another.

    >>> metrics = {"accuracy": 0.9, "balanced-accuracy": 0.5, "loss": 0.3}
    >>> beside(metrics, {"north": [5, 0, 1, 0], "south": [4, 0, 0, 0]})
    {'balanced-accuracy': 0.5}
    >>> beside(metrics, {"north": [5, 0, 1, 3]})
    {}
    """
    held = [count for count in label_counts(pooled_counts(confusion)) if count]
    if not held or max(held) < UNEQUAL * min(held):
        return {}
    return {name: metrics[name] for name in BESIDE if name in metrics}


def without_beside(metrics: Mapping[str, float], confusion: Confusion) -> dict[str, float]:
    """Return the metrics without those that need not stand beside the accuracy."""
    plain = {name: name.removeprefix(VALIDATION) for name in metrics}
    kept = beside({plain[name]: value for name, value in metrics.items()}, confusion)
    return {name: value for name, value in metrics.items() if plain[name] in kept or plain[name] not in BESIDE}


def guessed(counts: Sequence[int]) -> float:
    """Return the accuracy of whoever always names the most frequent label, from a confusion matrix row by row."""
    labels = label_counts(counts)
    return max(labels) / max(1, sum(labels))


def guessing_lines(metrics: Mapping[str, float], confusion: Confusion) -> list[str]:
    """Say what always naming the most frequent label would have, and where the model is no better; else nothing.

    Where labels are unequal the metrics that count stand beside it.

    >>> guessing_lines({"accuracy": 0.8}, {"north": [3, 0, 1, 2], "south": [2, 1, 1, 2]})
    ['always naming the most frequent label would have accuracy 0.5000']
    >>> guessing_lines({"accuracy": 0.6}, {"north": [3, 0, 1, 2], "south": [1, 1, 2, 1]})[1]
    'no better than always naming its own most frequent label: south'
    >>> guessing_lines({"accuracy": 0.6}, {"north": [2, 1, 0, 0], "south": [1, 1, 2, 1]})[1]
    'no better than always naming its own most frequent label: all 2 institutions that were tested'
    """
    if "accuracy" not in metrics or not confusion:
        return []
    labels = label_counts(pooled_counts(confusion))
    share = guessed(pooled_counts(confusion))
    lines = [f"always naming the most frequent label would have accuracy {share:.4f}"]
    if unequal := beside(metrics, confusion):
        guessing = {"balanced-accuracy": 1 / sum(map(bool, labels)), "auc": 0.5}
        shown = " and ".join(f"{name} {value:.4f} (guessing: {guessing[name]:.4f})" for name, value in unequal.items())
        lines = [f"labels are unequal: {lines[0]}; this model has {shown}"]
    if worse := [name for name, counts in confusion.items() if _no_better(counts)]:
        more = f" and {len(worse) - MOST_NAMED} more" if len(worse) > MOST_NAMED else ""
        named = f"{', '.join(worse[:MOST_NAMED])}{more}"
        if len(worse) == len(confusion) > 1:
            named = f"all {len(worse)} institutions that were tested"
        lines.append(f"no better than always naming its own most frequent label: {named}")
    return lines


def _no_better(counts: Sequence[int]) -> bool:
    """Say whether no more predictions are right than one label has examples; where all are right, none could be."""
    labels = label_counts(counts)
    right = sum(counts[:: len(labels) + 1])
    return right <= max(labels) and right < sum(labels)


def spread(result: Mapping[str, Any]) -> str:
    """Say of a regression what always guessing the mean label would have; empty where that is not known.

    >>> spread({"label-scale": [120.0, 41.23], "unit": "months", "final": {"global": {"rmse": 30.0}}})
    'always guessing the mean of the training labels, 120 months, would have rmse about 41.23; this model has 30.00'
    """
    if "rmse" not in result["final"]["global"] or not result.get("label-scale"):
        return ""
    (mean, deviation), unit = result["label-scale"], result["unit"]
    guess = f"always guessing the mean of the training labels, {mean:.4g}{unit and ' '}{unit},"
    return f"{guess} would have rmse about {deviation:.2f}; this model has {result['final']['global']['rmse']:.2f}"
