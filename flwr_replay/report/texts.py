"""A comparison in text: tables, for papers and spreadsheets, too, and how to read them, and what failed.

A `report` is what `flwr_replay.studies.compare.compare_strategies` returns. The LaTeX is for booktabs. It and the CSV
state epsilon, delta and whether they are proven beside every metric.
"""

import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

from flwr_replay.data.class_counts import starving, summary, warnings
from flwr_replay.privacy.noise import shown_noise
from flwr_replay.report.comparison import cells_of, mean_of, of_data, ranks
from flwr_replay.report.ranks import FEWEST
from flwr_replay.report.summary import untrained_lines
from flwr_replay.terminal import fitted

__all__ = [
    "as_latex",
    "findings",
    "lines_of",
    "notes",
    "of_methods",
    "rows_of",
    "table",
    "verdicts",
]

JUDGED_BY = ("Rounds are judged by ", "Test examples are dealt ")
JUDGED = f" (?={'|'.join(JUDGED_BY)})"  # where a method's own note ends, and what holds for all begins
SHOWN = ("mean", "sd", "worst-institution", "bytes-up", "bytes-down", "examples-seen", "seconds")
SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--"}
SPECIAL |= {sign: f"\\{sign}" for sign in "&%$#_{}"}


def table(report: Mapping[str, Any]) -> str:
    """Write a comparison as plain text: a row for each method, then notes on the columns and on failures."""
    return "\n".join([fitted(report["title"], *cells_of(report)), *notes(report)])


def notes(report: Mapping[str, Any]) -> list[str]:
    """Explain the columns, say how the methods differ, and list failures."""
    seeds = len(report["seeds"])
    over = ", [ ] a 95 % t interval" if seeds >= FEWEST else ""
    columns = (
        f"seeds {', '.join(map(str, report['seeds']))}, paired; ± is the standard deviation over seeds{over}; worst "
        "institution, bytes, examples (with repetitions) and seconds are means over seeds"
    )
    ranks_too = " and no ranks" * (len(report["strategies"]) > 2)
    few = f"no intervals{ranks_too}: {seeds} seed{'s' * (seeds > 1)} cannot show the variation by chance, {FEWEST} can"
    return [columns, *findings(report), *([few] if seeds < FEWEST else [])]


def findings(report: Mapping[str, Any]) -> list[str]:
    """Say how the methods differ, which differences are shown, and what failed."""
    lines = [*_guessing(report), *verdicts(report)]
    lines += [f"{ranked.told} (seeds of the same data)" for ranked in [ranks(report)] if ranked]
    lines += [report[name] for name in ("rates", "untuned") if report.get(name)]  # older versions did not say so
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
        lines += [f"{where} is left out: not every institution was tested"] if result.get("untested") else []
        absent = {f["institution"]: f["reason"] for f in result.get("failures", [])}
        lines += [f"{where}: {name} did not always take part: {reason}" for name, reason in absent.items()]
    versions = {tuple(sorted(cell["result"]["versions"].items())) for cell in report["cells"] if "result" in cell}
    if len(versions) > 1:
        differing = sorted({n for pairs in versions for n, _ in pairs if len({dict(p).get(n) for p in versions}) > 1})
        lines.append(f"the runs used different versions of {', '.join(differing)}: see compare.json")
    return lines


def _guessing(report: Mapping[str, Any]) -> list[str]:
    """Say which methods have learned nothing in most of their runs: a comparison with these tells nothing of them."""
    lines = []
    for label in report["strategies"]:
        cells = [cell for cell in report["cells"] if cell["label"] == label and "result" in cell]
        guesses = [cell["guesses"] for cell in cells if cell.get("guesses")]  # older versions did not say so
        if 2 * len(guesses) > len(cells):
            lines.append(
                f"{label} has learned nothing, in {len(guesses)} of {len(cells)} runs: it is no better than always "
                f"naming one label, with {guesses[0]}: try lr=auto (under dp= lr=0.001|0.01|0.1) and more rounds "
                "before you compare it"
            )
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


def _delta_of_all(result: Mapping[str, Any]) -> bool:
    """Say whether an institution's delta is one over its number of examples, as it is where none was chosen.

    >>> [_delta_of_all({"noise": {"a": [{"examples": 9}]}, "privacy": {"a": {"delta": d}}}) for d in (1 / 9, 1e-5)]
    [True, False]
    """
    noise = result.get("noise", {})  # older versions wrote none
    examples = {name: entry.get("examples", 0) for name, entries in noise.items() for entry in entries[:1]}
    return any(
        account and account["delta"] * examples.get(name, 0) > 0.999 for name, account in result["privacy"].items()
    )


def _claims(report: Mapping[str, Any]) -> list[str]:
    """Return each privacy claim of runs with differential privacy, with the methods that it holds for, and on delta."""
    labels_by_claim: dict[str, list[str]] = {}
    chosen = True
    for label in dict.fromkeys(cell["label"] for cell in report["cells"]):
        cells = [cell for cell in report["cells"] if cell["label"] == label]
        results = [cell["result"] for cell in cells if "result" in cell]
        if any(account for result in results for account in result.get("privacy", {}).values()):
            labels_by_claim.setdefault(results[0]["privacy-claim"], []).append(label)
            chosen &= not any(map(_delta_of_all, results))
    lines = [f"{', '.join(labels)}: {claim}" for claim, labels in labels_by_claim.items()]
    labels_by_noise: dict[str, list[str]] = {}
    for label, how in report.get("noise", {}).items():  # older versions wrote none, or text
        if how:
            shown = how if isinstance(how, str) else f"at the smallest institution, {shown_noise(how)}"
            labels_by_noise.setdefault(shown, []).append(label)
    lines += [f"{', '.join(labels)}: {noise}" for noise, labels in labels_by_noise.items()]
    if labels_by_claim:
        lines.append("epsilon is the largest of any institution and seed, delta too; they hold for each institution")
        lines.append("noise under DP is secret: a run that is repeated with its seed ends with other numbers")
    if not chosen:
        lines.append("delta is one over the number of examples, the least one can ask: choose delta= far smaller")
    return lines


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


def rows_of(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a comparison's numbers by method; None where there is none.

    By label: `against` (None of the reference itself), `mean`, `sd`, `worst-institution`, bytes, examples and seconds
    (means over seeds), `difference` with the ends of its interval, `low` and `high`, `epsilon`, `delta` and `proven`,
    and by mechanism `sigma`, `clip`, `sampling-rate` and `steps` at the smallest institution (None without differential
    privacy); `seeds` that finished, and their `values`.
    """
    exported = {}
    for label, row in report["strategies"].items():
        difference = row["difference"] or {"mean": None, "interval": None}
        low, high = difference["interval"] or (None, None)
        stated = row["epsilon"]
        exported[label] = {
            "against": row["against"] if row["against"] != label else None,
            **{name: row[name] for name in SHOWN},
            "difference": difference["mean"],
            "low": low,
            "high": high,
            "epsilon": stated and (float("inf") if stated.epsilon is None else stated.epsilon),
            "delta": stated and stated.delta,
            "proven": stated and stated.proven,
            **_noise(report.get("noise", {}).get(label)),
            "seeds": len(row["values"]),
            "values": dict(row["values"]),
        }
    return exported


def _noise(noise: Any) -> dict[str, str | None]:
    """Return sigma and what belongs to it, mechanisms separated by semicolons; of older versions there is none."""
    mechanisms = noise if isinstance(noise, list) else []
    keys = ("sigma", "clip", "sampling-rate", "steps")
    return {
        key: ";".join(f"{mechanism[key]:.10g}" for mechanism in mechanisms if key in mechanism) or None for key in keys
    }


def lines_of(report: Mapping[str, Any]) -> list[tuple[object, ...]]:
    """Return the headings, then a line for each method; a cell is None where there is no number.

    `metric` names what `mean`, `sd`, `difference` and `values` are of; `values` are `seed:value`, by semicolons.
    """
    rows = rows_of(report)
    lines: list[tuple[object, ...]] = [("method", "metric", *next(iter(rows.values())))]
    for label, row in rows.items():
        values = ";".join(f"{seed}:{value}" for seed, value in row["values"].items())
        lines.append((label, report["metric"], *{**row, "values": values}.values()))
    return lines


def as_latex(report: Mapping[str, Any]) -> str:
    """Write the table for LaTeX with the package booktabs, and a caption; the notes follow as comments."""
    columns, rows = cells_of(report)
    sigmas = [_noise(report.get("noise", {}).get(label))["sigma"] or "" for label in report["strategies"]]
    if any(sigmas):
        columns, rows = [*columns, "sigma"], [[*row, sigma] for row, sigma in zip(rows, sigmas, strict=True)]
    body = [" & ".join(map(_escaped, row)) + r" \\" for row in (columns, *rows)]
    lines = [r"\begin{table}", r"\centering", rf"\caption{{{_escaped(report['title'])}}}"]
    lines += [r"\begin{tabular}{l" + "r" * (len(columns) - 1) + "}", r"\toprule", body[0], r"\midrule", *body[1:]]
    lines += [r"\bottomrule", r"\end{tabular}", r"\end{table}"]
    return "\n".join([*lines, *(f"% {note}" for note in notes(report))])


def _escaped(text: str) -> str:
    """Return a cell for LaTeX, with a sign of its own where a number is negative or positive."""
    escaped = "".join(SPECIAL.get(sign, sign) for sign in text)
    return re.sub(r"(?<![\w.])[-+](?=\d)", lambda sign: f"${sign[0]}$", escaped)
