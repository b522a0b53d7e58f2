"""A run's metrics by round and epsilon, and what stands beside them so that nobody reads one without the other.

That is epsilon, what replay lacks, what guessing would have, and balanced accuracy and AUC where labels are so unequal
that accuracy alone misleads. Metrics of validation examples have names that begin with `validation-`.
"""

from bisect import bisect_right
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any

from flwr_replay.errors import DamagedError
from flwr_replay.files.lines import sound_lines
from flwr_replay.privacy.accounting import rounded_up
from flwr_replay.report.run_files import FORMS, METRICS, check_grown, rows_of

__all__ = [
    "ALIKE",
    "BESIDE",
    "OWN_MIX",
    "SHARED",
    "VALIDATION",
    "Stated",
    "beside",
    "by_epsilon",
    "by_round",
    "epsilon_suffix",
    "guessed",
    "guessing_lines",
    "judged",
    "judging",
    "label_counts",
    "largest",
    "metric_rows",
    "missing_suffix",
    "pooled_counts",
    "shared",
    "shown_epsilon",
    "spread",
    "without_beside",
]

VALIDATION = "validation-"
SHARED = ("global-", "proxy-")  # begin metrics of the model that institutions share, beside those of their own
ALIKE = (
    "Test examples are dealt as a sample of all (partition.test=iid): personal models look alike there, or worse than "
    "a global one, whatever they gain on their institution's own mix of labels; partition.test=mirror tests that."
)
OWN_MIX = (
    "Test examples are dealt as each institution's own mix of labels has them (partition.test=mirror, or natural): "
    "personal models are tested where they would be used."
)
BESIDE = ("balanced-accuracy", "auc")
MOST_NAMED = 8  # institutions
UNEQUAL = 2.0  # how many times as frequent as the rarest label the most frequent one is at least

Confusion = Mapping[str, Sequence[int]]  # by institution: examples by label and prediction, row by row


# --- by round and by epsilon ------------------------------------------------------------------------------------------


def judged(metric: str, names: Container[str]) -> str:
    """Return the name under which rounds were judged by a metric, given all names of a run.

    >>> judged("accuracy", {"accuracy", "validation-accuracy"}), judged("accuracy", {"accuracy"})
    ('validation-accuracy', 'accuracy')
    """
    return f"{VALIDATION}{metric}" if f"{VALIDATION}{metric}" in names else metric


def shared(metric: str, names: Container[str]) -> str:
    """Return the name of a metric of the model that institutions share beside their own; empty if there is none.

    >>> shared("accuracy", {"accuracy", "global-accuracy"}), shared("accuracy", {"accuracy", "balanced-accuracy"})
    ('global-accuracy', '')
    """
    return next((f"{of}{metric}" for of in SHARED if f"{of}{metric}" in names), "")


def judging(report: Mapping[str, Any]) -> str:
    """Return the name under which the rounds of a comparison's runs were judged by its metric."""
    names = {name for cell in report["cells"] if "result" in cell for name in cell["result"]["final"]["global"]}
    return judged(report["metric"], names)


def metric_rows(folder: Path, rounds: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Read what can be read of a finished run's `metrics.jsonl`, and say what its curves lack: nothing, or a sentence.

    They lack something, too, if the lines end before `rounds`.
    """
    rows, fault = sound_lines(folder / METRICS, {**FORMS[METRICS], "exchange": int | None})
    last = max((row["round"] for row in rows), default=0)
    if not fault and last < rounds:
        fault = f"metrics.jsonl ends with round {last:g} of {rounds}"
    if not fault:
        try:
            check_grown(folder, METRICS)
        except DamagedError:
            fault = "metrics.jsonl is not as the run left it; what its lines say may be wrong"
    lack = f"{folder.name}: {fault}. The curves lack that; the other figures are from result.json." if fault else ""
    return rows, lack


def by_round(folder: Path, metric: str) -> list[tuple[float, float]]:
    """Read a run's pooled metric by round, of the examples by which rounds were judged."""
    return [(row["round"], row["value"]) for row in _pooled(folder, metric)]


def by_epsilon(folders: Sequence[Path], metric: str) -> list[list[tuple[float, float]]]:
    """Read the runs' pooled metric by the largest epsilon that any institution of any of them had stated by then."""
    rows = [row for folder in folders for row in rows_of(folder, "privacy.jsonl")]
    stated = sorted((row["round"], row["epsilon"]) for row in rows if row["epsilon"] is not None and "round" in row)
    most = dict(zip((at for at, _ in stated), accumulate((epsilon for _, epsilon in stated), max), strict=True))
    exchanges = list(most)  # empty for runs of older versions
    histories = [
        [(bisect_right(exchanges, row.get("exchange", row["round"])), row["value"]) for row in _pooled(folder, metric)]
        for folder in folders
    ]
    return [[(most[exchanges[i - 1]], value) for i, value in history if i] for history in histories]


def _pooled(folder: Path, metric: str) -> list[dict[str, Any]]:
    rows, _ = metric_rows(folder)
    judging = judged(metric, {row["metric"] for row in rows})
    return [row for row in rows if row["institution"] == "" and row["metric"] == judging]


# --- epsilon and replay beside them -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stated:
    """An epsilon with its delta, whether it is proven, and what it covers."""

    epsilon: float | None  # None: not known, or the noise is not secret
    proven: bool
    dp: str  # the mechanisms it covers, as in the option dp=: proxy, generator+prior, …
    delta: float
    alone: float = 0.0  # the epsilon of one's own messages, without masks; 0: there is no sum, or it is not known


def largest(stated: Iterable[Mapping[str, Any] | None]) -> Stated | None:
    """Return the largest epsilon and the largest delta that institutions state; together they hold for each of them.

    `stated` is as under `privacy` in `result.json`; None: this institution states none. What is returned is proven if
    all are; None if no institution states any. An epsilon that is not known needs no proof.
    """
    given = [account for account in stated if account]
    if not given:
        return None
    epsilons = [account["epsilon"] for account in given]
    proven = all(account["epsilon"] is None or account.get("proven") is True for account in given)
    most = None if None in epsilons else max(epsilons)
    delta, alone = max(account["delta"] for account in given), max(account.get("alone", 0.0) for account in given)
    return Stated(most, proven, given[0].get("dp", ""), delta, alone)


def shown_epsilon(accounts: Sequence[Stated | None]) -> str:
    """Write one epsilon with its delta, or several in order unless all are equal.

    None is a run without differential privacy. If all are None, the text is empty.

    >>> shown_epsilon([Stated(28.6, False, "proxy", 1e-5), None])
    'epsilon 28.6, none at delta 1e-05 (dp=proxy), no proof'
    """
    stated = [account for account in accounts if account]
    if not stated:
        return ""
    values = [
        rounded_up(inf if account.epsilon is None else account.epsilon) if account else "none" for account in accounts
    ]
    covered = " and ".join(dict.fromkeys(f"dp={account.dp}" for account in stated if account.dp))
    proof = "" if all(account.proven for account in stated) else ", no proof"
    shown = ", ".join(values if len(set(values)) > 1 else values[:1])
    alone = max(account.alone for account in stated)
    shown += f" of the sum, {rounded_up(alone)} alone," if alone else ""
    deltas = dict.fromkeys(rounded_up(account.delta, 2) for account in stated)
    return f"epsilon {shown} at delta {', '.join(deltas)}{f' ({covered})' if covered else ''}{proof}"


def epsilon_suffix(result: Mapping[str, Any]) -> str:
    """Return a run's `, epsilon 7.97 at delta 1e-05 (dp=proxy)`; empty without differential privacy."""
    account = largest(result.get("privacy", {}).values())
    return f", {shown_epsilon([account])}" if account else ""


def missing_suffix(result: Mapping[str, Any]) -> str:
    """Return the suffix of a run's metric that says what replay lacks; empty if it lacks nothing.

    >>> missing_suffix({"replay-lacks": {"b": "is not replayed", "c": "has received no replays"}})
    ', replay is incomplete: b is not replayed, c has received no replays'
    """
    lacks = [f"{name} {what}" for name, what in result.get("replay-lacks", {}).items()]
    return f", replay is incomplete: {', '.join(lacks)}" if lacks else ""


# --- guessing beside them ---------------------------------------------------------------------------------------------


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


def no_better_than_guessing(result: Mapping[str, Any], confusion: Confusion) -> bool:
    """Say whether a classifier names one label for all test examples, or is within chance of that for every label.

    Validation metrics judge the latter, where a run has some: personal models may know their own institution alone.
    Within chance are two standard deviations of guessing. Of other kinds of task, or without a confusion, it is not.

    >>> final = {"accuracy": 0.5, "balanced-accuracy": 0.5, "validation-balanced-accuracy": 0.83}
    >>> result = {"final": {"global": final}, "validation-examples": 40}
    >>> no_better_than_guessing(result, {"north": [30, 0, 30, 0]})
    True
    >>> no_better_than_guessing(result, {"north": [30, 0, 30, 0], "south": [0, 30, 0, 30]})
    False
    """
    final, counts = result["final"]["global"], pooled_counts(confusion)
    labels = [count for count in label_counts(counts) if count]
    if "balanced-accuracy" not in final or len(labels) < 2:
        return False
    size = round(len(counts) ** 0.5)
    if sum(any(counts[at::size]) for at in range(size)) == 1:
        return True
    guesses, prefix = {"balanced-accuracy": 1 / len(labels), "auc": 0.5}, VALIDATION
    if not (examples := result.get("validation-examples", 0)):
        guesses, prefix, examples = guesses | {"accuracy": guessed(counts)}, "", sum(labels)
    return all(
        final[f"{prefix}{name}"] <= share + 2 * (share * (1 - share) / examples) ** 0.5
        for name, share in guesses.items()
        if f"{prefix}{name}" in final
    )


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
    worse = []
    for name, counts in confusion.items():
        own = label_counts(counts)
        right = sum(counts[:: len(own) + 1])
        if right <= max(own) and right < sum(own):  # where all are right, none could be better
            worse.append(name)
    if worse:
        more = f" and {len(worse) - MOST_NAMED} more" if len(worse) > MOST_NAMED else ""
        named = f"{', '.join(worse[:MOST_NAMED])}{more}"
        if len(worse) == len(confusion) > 1:
            named = f"all {len(worse)} institutions that were tested"
        lines.append(f"no better than always naming its own most frequent label: {named}")
    return lines


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
