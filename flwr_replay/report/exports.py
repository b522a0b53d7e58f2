"""A comparison's table for papers and spreadsheets: LaTeX with booktabs, and CSV.

Both state epsilon, delta and whether they are proven beside every metric.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flwr_replay.files.table import csv_text
from flwr_replay.report.comparison import cells_of
from flwr_replay.report.notes import notes

__all__ = ["as_csv", "as_latex", "lines_of", "rows_of"]

SHOWN = ("mean", "sd", "worst-institution", "bytes-up", "bytes-down", "examples-seen", "seconds")
SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--"}
SPECIAL |= {sign: f"\\{sign}" for sign in "&%$#_{}"}


def rows_of(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a comparison's numbers by method; None where there is none.

    Returns
    -------
    dict
        By label: `against` (None of the reference itself), `mean`, `sd`, `worst-institution`, bytes, examples and
        seconds (means over seeds), `difference` with the ends of its interval, `low` and `high`, `epsilon`, `delta`
        and `proven`, and by mechanism `sigma`, `clip`, `sampling-rate` and `steps` at the smallest institution (None
        without differential privacy); `seeds` that finished, and their `values`.
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


def as_csv(report: Mapping[str, Any]) -> str:
    """Write the numbers as CSV, without an end of the last line."""
    return csv_text(lines_of(report)).rstrip()


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
