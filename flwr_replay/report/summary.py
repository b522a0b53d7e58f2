"""A run's summary, which the command line and the ServerApp print at its end, and what is said of uploads before it."""

from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from flwr_replay.data import class_counts
from flwr_replay.files.disk import there
from flwr_replay.privacy.accounting import rounded_up
from flwr_replay.privacy.noise import shown_noise
from flwr_replay.report.metrics import (
    ALIKE,
    OWN_MIX,
    beside,
    epsilon_suffix,
    guessing_lines,
    judged,
    label_counts,
    missing_suffix,
    pooled_counts,
    shared,
    spread,
)
from flwr_replay.report.progress import shown_bytes
from flwr_replay.report.run_files import CONFIG, CONFUSION, MEMBERS, json_of, options_of, rows_of

__all__ = [
    "RECONSTRUCT",
    "best_lines",
    "classes_of",
    "confusion_of",
    "dice_lines",
    "judged_by",
    "recorded_lines",
    "sample_lines",
    "skew_lines",
    "summary",
    "tested_of",
    "trained_on",
    "untrained_lines",
    "upload_advice",
    "warnings",
]

RECONSTRUCT = "Anyone who holds them and the part of the model that computed them may try to reconstruct the images."
MOST_SHOWN = 16  # institutions, or failures, that get a line each
FEW = 20  # examples of an evaluation at an institution
EXPLODED = 100.0  # a loss that no useful classifier, regression of standardised labels or segmentation has


def summary(result: Mapping[str, Any], folder: Path) -> str:
    """Write a run's metrics, what was sent, the privacy claim with each epsilon, failures, and where its files are."""
    leading, unit = result["metric"], f" {result['unit']}" if result["unit"] else ""
    final, confusion = result["final"], confusion_of(folder)
    tested = {name: metrics for name, metrics in final["institutions"].items() if leading in metrics}
    account = {name: stated for name, stated in result["privacy"].items() if stated}
    if len(final["institutions"]) > MOST_SHOWN:  # the lowest and the highest are shown
        tested = dict(sorted(tested.items(), key=lambda pair: pair[1][leading]))
        account = dict(sorted(account.items(), key=lambda pair: inf if (e := pair[1]["epsilon"]) is None else e))
    judging, at = judged(leading, final["global"]), result["best"]["round"]
    best = f"best {result['best'][judging]:.4f} in round {at}"
    if judging != leading:
        best = f"test; validation {final['global'][judging]:.4f}, {best}"
    own, both = [], shared(leading, final["global"])
    common = f", {both} {final['global'][both]:.4f}{unit}" if both else ""
    for name, metrics in tested.items():
        figures = {figure: metrics[figure] for figure in [both] if figure in metrics} | beside(metrics, confusion)
        more = "".join(f", {figure} {value:.4f}" for figure, value in figures.items())
        own.append(f"  {name}: {metrics[leading]:.4f}{more}")
    lines = [
        f"{result['strategy']} on {result['task']}: {leading} {final['global'][leading]:.4f}{unit}{common} ({best})"
        f"{epsilon_suffix(result)}{missing_suffix(result)}",
        *_fewer(own),
        *(mix for mix in (ALIKE, OWN_MIX) if mix in result.get("metrics-note", "")),
        *untrained_lines(result),
        *guessing_lines(final["global"], confusion),
        *filter(None, [spread(result)]),
        *dice_lines(final["global"]),
        *best_lines(result),
        *skew_lines(result.get("skew")),
        f"sent: up {shown_bytes(result['bytes']['up'])}, down {shown_bytes(result['bytes']['down'])}",
    ]
    lines += sample_lines(result)
    lines.append(result["privacy-claim"])
    lines += _fewer([_released(name, stated, result) for name, stated in account.items()])
    lines += recorded_lines(result, folder)
    lines += [f"warning: {line}" for line in warnings(result, confusion, classes_of(folder), tested_of(folder))]
    lines += _fewer([f"{f['institution']} failed in exchange {f['round']}: {f['reason']}" for f in result["failures"]])
    return "\n".join([*lines, f"{result['wall-seconds']:.1f} s  {folder}"])


def _fewer(lines: list[str]) -> list[str]:
    """Return the first and the last of many lines, and how many lie between them."""
    left_out = len(lines) - MOST_SHOWN
    half = MOST_SHOWN // 2
    return [*lines[:half], f"  … {left_out:,} more are in result.json …", *lines[-half:]] if left_out > 0 else lines


def _released(name: str, account: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Write an institution's account: epsilon and delta, rounded up, unless its noise is not secret; and its noise."""
    bound = None if account["epsilon"] is None else (rounded_up(account["epsilon"]), rounded_up(account["delta"], 2))
    known = "epsilon {} at delta {}, ".format(*bound) if bound else ""
    how = shown_noise(result.get("noise", {}).get(name, []))  # runs of older versions did not say
    return f"  {name}: {known}{account['mechanism']}{how and f'; {how}'}"


def untrained_lines(result: Mapping[str, Any]) -> list[str]:
    """Say which institutions never trained, and whose metrics are missing or bounds; nothing of other institutions.

    >>> untrained_lines({"nodes": 3, "untrained": ["b", "c"], "untested": ["b"]})
    ['2 of 3 institutions never trained, or no answer of theirs arrived: b, c', 'no metric is of b']
    """
    names = result.get("untrained", [])  # runs of older versions did not say
    how = "never trained, or no answer of theirs arrived"
    lines = [f"{len(names)} of {result['nodes']} institutions {how}: {_some(names)}"] if names else []
    if lacking := result.get("untested", []):
        lines.append(f"no metric is of {_some(lacking)}")
    if floored := result.get("floored", []):
        lines.append(
            f"accuracy is a lower bound where few were right, or wrong; no cells left (min-count): {_some(floored)}"
        )
    return lines


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_SHOWN:,} more" if len(names) > MOST_SHOWN else ""
    return f"{', '.join(names[:MOST_SHOWN])}{more}"


def judged_by(result: Mapping[str, Any]) -> str:
    """Return the split whose examples judge rounds: validation, or with split=test test; at the end all test."""
    return "test" if judged(result["metric"], result["final"]["global"]) == result["metric"] else "validation"


def dice_lines(metrics: Mapping[str, float]) -> list[str]:
    """Say what the mean over institutions is beside the pooled Dice; nothing for other tasks and older versions.

    >>> dice_lines({"dice": 0.8, "dice-mean": 0.7})
    ["dice-mean 0.7000 is the mean of the institutions' own; dice 0.8000 is of all their pixels together"]
    """
    if "dice-mean" not in metrics:
        return []
    mean = f"dice-mean {metrics['dice-mean']:.4f} is the mean of the institutions' own"
    return [f"{mean}; dice {metrics['dice']:.4f} is of all their pixels together"]


def best_lines(result: Mapping[str, Any]) -> list[str]:
    """Say that the best round's model is kept, or why not; nothing if it is the last, or of an older version."""
    kept, best = result.get("best-model", {"file": "", "none": ""}), result["best"]["round"]
    if best == result["rounds"] or not any(kept.values()):
        return []
    if kept["none"]:
        return [f"no model of the best round is kept: {kept['none']}"]
    return [
        f"the model of round {best} is kept, too (--best); it was chosen on the {judged_by(result)} examples, so its "
        f"{result['metric']} there is optimistic"
    ]


def sample_lines(result: Mapping[str, Any]) -> list[str]:
    """Say how much went up that is of single patients, or drawn by generators, and what bounds that."""
    lines = []
    up = result["bytes-by-kind"]["up"]
    if count := up.get("per-sample", 0) + up.get("per-sample-raw", 0):
        raw = up.get("raw-bytes-they-stand-for")
        place = f", in place of {shown_bytes(raw)} of raw data" if raw else ""
        noisy = all(
            account and account["epsilon"] is not None and account.get("dp") == "latents"
            for account in result["privacy"].values()
        )
        protection = "each with noise of its own" if noisy else "not differentially private"
        show = f". {RECONSTRUCT}" if up.get("per-sample") else ""
        lines.append(f"of single patients: {shown_bytes(count)} went up{place}; {protection}{show}")
    if count := up.get("synthetic", 0):
        # A run with synthetic images has an epsilon only if its generators are trained under DP.
        bounded = all(stated and stated["epsilon"] is not None for stated in result["privacy"].values())
        depend = "; their generators depend on all images of an institution, and no epsilon bounds what one shows"
        protection = ", drawn by generators trained under DP" if bounded else f"{depend} of a patient"
        lines.append(f"synthetic images: {shown_bytes(count)} went up{protection}")
    return lines


def confusion_of(folder: Path) -> dict[str, list[int]]:
    """Return each institution's test examples by label and prediction, row by row; nothing if none told."""
    return dict(json_of(folder, CONFUSION)["institutions"]) if there(folder / CONFUSION) else {}


def tested_of(folder: Path) -> dict[str, int]:
    """Return how many examples the last evaluation had at each institution; nothing in runs of older versions."""
    return dict(json_of(folder, CONFUSION).get("examples") or {}) if there(folder / CONFUSION) else {}


def trained_on(folder: Path) -> dict[str, int]:
    """Return how many training examples each institution has; nothing in runs of older versions."""
    return {row["institution"]: row["examples"] for row in rows_of(folder, MEMBERS)}


def classes_of(folder: Path) -> list[str]:
    """Return the names of the classes as far as the run's options have them; else none."""
    return list(options_of(folder)["task"]["class_names"]) if there(folder / CONFIG) else []


def recorded_lines(result: Mapping[str, Any], folder: Path) -> list[str]:
    """Say how many messages were recorded, how to delete them, and how many did not fit; none for most runs."""
    recorded = result.get("recorded", {"messages": 0, "left-out": 0})  # runs of older versions have none
    lines = []
    if count := recorded["messages"]:
        lines.append(
            f"recorded: {count:,} messages, {shown_bytes(recorded['bytes'])}, as they travelled. They hold "
            f"patients' data; to delete them: rm -r {folder / 'messages'}"
        )
    if count := recorded["left-out"]:
        lines.append(f"not recorded: {count:,} messages that did not fit into record-mb")
    return lines


def skew_lines(skew: Mapping[str, Any] | None) -> list[str]:
    """Say how the training labels differ, and which classes starve; nothing for a deployment."""
    if skew is None:
        return []
    known = f"mean pairwise KS {skew['ks']:.3f}, TV {skew['tv']:.3f}; {skew['dropped']:,} examples left out"
    own = class_counts.extremes(skew)
    counts = own if len(own) <= MOST_SHOWN else class_counts.summary(skew)
    return [f"training labels: {known}", *counts, *class_counts.warnings(skew)]


def warnings(
    result: Mapping[str, Any],
    confusion: Mapping[str, Sequence[int]],
    classes: Sequence[str],
    tested: Mapping[str, int],
) -> list[str]:
    """Say what makes a run worthless although its metric may look well.

    What is not known is empty: `confusion_of`, `classes_of` and `tested_of` a run.
    """
    lines = [f"{alone}."] if (alone := result.get("draws-one")) else []
    if confusion:
        counts = pooled_counts(confusion)
        size = round(len(counts) ** 0.5)
        guessed = [at for at in range(size) if sum(counts[at::size])]
        if len(guessed) == 1 < sum(map(bool, label_counts(counts))):
            always = f"class {classes[guessed[0]] if len(classes) == size else guessed[0]} for every example"
            if "dice" in result["final"]["global"]:  # counts of pixels
                always = f"{('background', 'foreground')[guessed[0]]} for every pixel"
            lines.append(
                f"The model predicts {always} that it was tested on. It has learned nothing: "
                "try more rounds, another lr or model, and where there is a cut an earlier one."
            )
    loss = result["final"]["global"].get("loss", result["final"]["global"].get("validation-loss", 0.0))
    if not loss < EXPLODED:
        lines.append(f"The loss in tests is {loss:.3g}. Training diverged, or almost: try a smaller lr.")
    if few := {name: n for name, n in tested.items() if n < FEW}:
        shown = ", ".join(f"{name} {n}" for name, n in [*few.items()][:MOST_SHOWN])
        more = f" and {len(few) - MOST_SHOWN} more institutions" if len(few) > MOST_SHOWN else ""
        lines.append(f"Few test examples: {shown}{more}. Figures of so few say little.")
    if (judges := result.get("validation-examples", FEW)) < FEW:
        few_or_none = f"Few validation examples judged the rounds, {judges} in all. Which round was best says little."
        lines.append(few_or_none if judges else "No institution has validation examples: no round was judged.")
    return lines


def upload_advice(uploads: str, sizes: Mapping[str, int], cut: str, rows: int, raw_bytes: int, but: str) -> str:
    """Compare all institutions' uploads, so many rows, with their raw training data; empty if they are smaller.

    `sizes` are for every cut of the model, in order: bytes of one row, its label included. `but` is what a deeper cut
    than this run's costs.

    >>> print(upload_advice("uploads", {"conv1": 1024, "fc": 32}, "conv1", 1000, 64_000, "freezes more"))
    uploads will be 1.02 MB, 16 times the raw data (64 kB): cut=fc sends 32 kB, but freezes more
    >>> upload_advice("uploads", {"conv1": 1024}, "conv1", 1000, 64_000, "")
    'uploads will be 1.02 MB, 16 times the raw data (64 kB); no deeper cut of this model sends less than the raw data'
    >>> upload_advice("uploads", {"conv1": 10}, "conv1", 1000, 64_000, "")
    ''
    """
    total = rows * sizes[cut]
    if not 0 < raw_bytes < total:
        return ""
    times = float(f"{total / raw_bytes:.2g}")
    line = f"{uploads} will be {shown_bytes(total)}, {times:g} times the raw data ({shown_bytes(raw_bytes)})"
    deeper = list(sizes)[list(sizes).index(cut) + 1 :]
    smaller = next((name for name in deeper if rows * sizes[name] <= raw_bytes), "")
    if not smaller:
        return f"{line}; no deeper cut of this model sends less than the raw data"
    return f"{line}: cut={smaller} sends {shown_bytes(rows * sizes[smaller])}, but {but}"
