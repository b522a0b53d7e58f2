"""What a comparison says under its table: how to read it, how the methods differ, and what failed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from flwr_replay.data.class_counts import starving, summary, warnings
from flwr_replay.privacy.noise import shown_noise
from flwr_replay.report.comparison import FEWEST, cells_of, mean_of, of_data
from flwr_replay.report.summary import untrained_lines
from flwr_replay.terminal import fitted

__all__ = ["findings", "notes", "of_methods", "table", "verdicts"]

JUDGED_BY = "Rounds are judged by "
JUDGED = f" (?={JUDGED_BY})"  # where a method's own note ends, and what holds for all begins
DELTAS = ("delta=", "privacy.delta=")


def table(report: Mapping[str, Any]) -> str:
    """Write a comparison as plain text: a row for each method, then notes on the columns and on failures.

    Parameters
    ----------
    report : Mapping
        As `flwr_replay.studies.compare.compare_strategies` returns it.
    """
    return "\n".join([fitted(report["title"], *cells_of(report)), *notes(report)])


def notes(report: Mapping[str, Any]) -> list[str]:
    """Explain the columns, say how the methods differ, and list failures."""
    seeds = len(report["seeds"])
    over = ", [ ] a 95 % t interval" if seeds >= FEWEST else ""
    columns = (
        f"seeds {', '.join(map(str, report['seeds']))}, paired; ± is the standard deviation over seeds{over}; worst "
        "institution, bytes, examples (with repetitions) and seconds are means over seeds"
    )
    few = f"no intervals: {seeds} seed{'s' * (seeds > 1)} cannot show the variation by chance, {FEWEST} can"
    return [columns, *findings(report), *([few] if seeds < FEWEST else [])]


def findings(report: Mapping[str, Any]) -> list[str]:
    """Say how the methods differ, which differences are shown, and what failed."""
    lines = verdicts(report)
    lines += [f"methods differ in {line}" for line in report.get("differ", [])]  # older versions did not say so
    lines += _skews(report)
    lines += _metrics_notes(report)
    lines += _claims(report)
    lines += _agreements(report)
    for cell in report["cells"]:
        where = f"{cell['label']} seed {cell['seed']}"
        if "error" in cell:
            lines.append(f"{where} failed: {cell['error']}")
        result = cell.get("result", {})
        alone = [result["draws-one"]] if "draws-one" in result else []
        lines += [f"{where}: {line}" for line in [*untrained_lines(result), *alone]]
        absent = {f["institution"]: f["reason"] for f in result.get("failures", [])}
        lines += [f"{where}: {name} did not always take part: {reason}" for name, reason in absent.items()]
    versions = {tuple(sorted(cell["result"]["versions"].items())) for cell in report["cells"] if "result" in cell}
    if len(versions) > 1:
        differing = sorted({n for pairs in versions for n, _ in pairs if len({dict(p).get(n) for p in versions}) > 1})
        lines.append(f"the runs used different versions of {', '.join(differing)}: see compare.json")
    return lines


def of_methods(report: Mapping[str, Any]) -> list[str]:
    """Say what a method's metrics mean wherever it runs: `local is the institutions' own models`."""
    return [note for note in _metrics_notes(report) if not note.startswith(JUDGED_BY)]


def _metrics_notes(report: Mapping[str, Any]) -> list[str]:
    sentences = (re.split(JUDGED, cell.get("result", {}).get("metrics-note", "")) for cell in report["cells"])
    return [note for note in dict.fromkeys(chain.from_iterable(sentences)) if note]


def _skews(report: Mapping[str, Any]) -> list[str]:
    """Say how the training labels differ, for every way in which the methods' data are dealt."""
    skews_by_data: dict[str, dict[int, Mapping[str, Any]]] = {}
    for cell in report["cells"]:
        if "skew" in cell.get("result", {}):
            dealt = " ".join(filter(of_data, cell["options"]))
            skews_by_data.setdefault(dealt, {})[cell["seed"]] = cell["result"]["skew"]
    lines = []
    for dealt, skews in skews_by_data.items():
        ks, tv, dropped = (sum(skew[key] for skew in skews.values()) / len(skews) for key in ("ks", "tv", "dropped"))
        lines.append(
            f"training labels{dealt and f' with {dealt}'}: KS {ks:.3f}, TV {tv:.3f}"
            f"{f', {dropped:,.0f} examples left out' if dropped else ''}"
        )
        seed, worst = max(skews.items(), key=lambda skew_of_seed: starving(skew_of_seed[1]))
        lines += [f"seed {seed}: {line}" for line in (*summary(worst), *warnings(worst))]
    if skews_by_data:
        lines.append("KS and TV compare two institutions; 0: the same labels, 1: none in common; means over seeds")
    if len(skews_by_data) > 1:
        against = list(dict.fromkeys(row["against"] for row in report["strategies"].values()))
        lines.append(
            f"a difference is to the method on the same data: {', '.join(against)}"
            if len(against) > 1
            else f"a difference to {against[0]} pairs runs of one seed; where data differ, "
            "pairing takes out less chance than on the same data"
        )
    return lines


def _claims(report: Mapping[str, Any]) -> list[str]:
    """Return each privacy claim of runs with differential privacy, with the methods that it holds for, and on delta."""
    labels_by_claim: dict[str, list[str]] = {}
    chosen = True
    for label in dict.fromkeys(cell["label"] for cell in report["cells"]):
        results = [cell["result"] for cell in report["cells"] if cell["label"] == label and "result" in cell]
        if any(account for result in results for account in result.get("privacy", {}).values()):
            labels_by_claim.setdefault(results[0]["privacy-claim"], []).append(label)
            chosen &= any(option.startswith(DELTAS) for option in [*report["options"], *_options(report, label)])
    lines = [f"{', '.join(labels)}: {claim}" for claim, labels in labels_by_claim.items()]
    noise = {label: _noise(how) for label, how in report.get("noise", {}).items() if how}  # older versions wrote none
    lines += [f"{', '.join(same)}: {how}" for how, same in _grouped(noise).items()]
    if labels_by_claim:
        lines.append("epsilon is the largest of any institution and seed, delta too; they hold for each institution")
        lines.append("noise under DP is secret: a run that is repeated with its seed ends with other numbers")
    if not chosen:
        lines.append("delta is one over the number of examples, the least one can ask: choose delta= far smaller")
    return lines


def _noise(how: str | Sequence[Mapping[str, Any]]) -> str:
    return how if isinstance(how, str) else f"at the smallest institution, {shown_noise(how)}"  # str: older versions


def verdicts(report: Mapping[str, Any]) -> list[str]:
    """Say which differences are shown: those whose interval excludes 0."""
    by_verdict: dict[str, list[str]] = {"better": [], "worse": [], "not shown to differ": []}
    for label, row in report["strategies"].items():
        if row["difference"] and (interval := row["difference"]["interval"]):
            low, high = interval if report["higher-is-better"] else (-interval[1], -interval[0])
            by_verdict["better" if low > 0 else "worse" if high < 0 else "not shown to differ"].append(label)
    verdict = "; ".join(f"{what}: {', '.join(labels)}" for what, labels in by_verdict.items() if labels)
    differences = sum(map(len, by_verdict.values()))
    if not verdict:
        return []
    against = {row.get("against", report["against"]) for row in report["strategies"].values()}
    other = f" with {report['against']}" if len(against) == 1 else ""
    corrected = f", not corrected for {differences} comparisons" if differences > 1 else ""
    return [f"compared{other} by 95 % intervals ({len(report['seeds']) - 1} degrees of freedom{corrected}): {verdict}"]


def _options(report: Mapping[str, Any], label: str) -> list[str]:
    return next(list(cell["options"]) for cell in report["cells"] if cell["label"] == label)


def _grouped(text_by_label: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the methods of which the same is said, by what is said."""
    grouped: dict[str, list[str]] = {}
    for label, text in text_by_label.items():
        grouped.setdefault(text, []).append(label)
    return grouped


def _agreements(report: Mapping[str, Any]) -> list[str]:
    """Say how far the models of runs with `agreement=true` differ at the institutions, by method."""
    grouped: dict[str, list[str]] = {}
    for cell in report["cells"]:
        if agreement := cell.get("result", {}).get("agreement"):
            spread = mean_of([*agreement["standard-deviation"].values()])
            grouped.setdefault(cell["label"], []).append("–" if spread is None else f"{spread:.3f}")
    return [
        f"{label}: standard deviation of balanced accuracy over all models, mean over institutions, by seed: "
        f"{', '.join(shown)}"
        for label, shown in grouped.items()
    ]
