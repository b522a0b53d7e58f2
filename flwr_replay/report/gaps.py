"""The share of the gap between a plain method and Central that replay closes, and at which epsilon."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from flwr_replay.privacy.accounting import rounded_up

__all__ = ["gaps"]


def gaps(report: Mapping[str, Any]) -> list[str]:
    """Write a Markdown table of the methods with replay; no lines if there are none, or no Central.

    A gap is what a method lacks to training on pooled data; to any other method its share means nothing. The plain
    method is the one with the same options of its strategy, such as the optimizer's state, and no others.

    Parameters
    ----------
    report : Mapping
        A report of `flwr_replay.studies.compare.compare_strategies`.

    Returns
    -------
    list of str
        A row for each method with replay: the mean of the metric over seeds, the closed share of the gap,
        (metric - plain) / (central - plain) of these means, and the largest epsilon of any institution in any run.
    """
    if report["against"] != "central":
        return []
    metrics: dict[str, list[float]] = {}
    stated: dict[str, list[dict[str, Any]]] = {}
    replayed: dict[str, dict[str, Any]] = {}
    plain_of: dict[tuple[str, ...], str] = {}
    for cell in report["cells"]:
        if "result" in cell:
            metrics.setdefault(cell["label"], []).append(cell["result"]["final"]["global"][report["metric"]])
            stated.setdefault(cell["label"], []).extend(
                account for account in cell["result"]["privacy"].values() if account
            )
            if cell["result"].get("replay", "none") != "none":  # a run of an earlier version has none
                replayed[cell["label"]] = cell
            else:
                plain_of.setdefault((cell["strategy"], *cell.get("options", [])), cell["label"])
    reference, rows = metrics.get("central"), []
    for label, cell in replayed.items():
        own = (option for option in cell.get("options", []) if option.startswith("strategy."))
        plain, values = metrics.get(plain_of.get((cell["strategy"], *own), "")), metrics[label]
        if not plain or not reference:
            continue
        gap = fmean(reference) - fmean(plain)
        share = f"{(fmean(values) - fmean(plain)) / gap:.1%}" if gap else "no gap"
        rows.append(f"| {label} | {fmean(values):.4f} | {share} | {_epsilon(stated[label])} |")
    if not rows:
        return []
    head = f"| with replay | {report['metric']} | of the gap to central | largest ε |"
    return [head, "|---|---|---|---|", *rows]


def _epsilon(stated: list[dict[str, Any]]) -> str:
    if not stated:
        return "none"
    known = [account for account in stated if account["epsilon"] is not None]
    if len(known) < len(stated):
        return "not protected"
    worst = max(known, key=lambda each: each["epsilon"])
    whole = worst["dp"] == "end-to-end"
    what = "everything that depends on training examples" if whole else "these weights only"
    return f"{rounded_up(worst['epsilon'])} at δ = {rounded_up(worst['delta'], 2)}, {what}"
