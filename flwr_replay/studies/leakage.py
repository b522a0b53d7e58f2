"""What attacks find in the runs of a comparison: Qu et al.'s Table 3 in shape, with what their PSNR does not say."""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from os.path import normpath
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from flwr_replay.attacks.intervals import share
from flwr_replay.lab.attack import attack_run
from flwr_replay.lab.registry import Only
from flwr_replay.processes import end_with_parent

__all__ = ["Asked", "attacked", "leakage", "share_of_cores"]

THREADS = "OMP_NUM_THREADS"  # read by PyTorch and by NumPy's linear algebra
HEAD = "| method | {metric} | field | attack | PSNR, dB | identified | control | members, AUC | values per pixel |"


@dataclass(frozen=True)
class Asked:
    """A comparison whose finished runs are to be attacked."""

    report: Mapping[str, Any]  # as `flwr_replay.studies.compare.run_comparisons` returns it
    aux: str  # the attacker's own images, as `flwr-replay privacy attack` takes them
    field: str  # the only one that is attacked; empty: all

    @property
    def cells(self) -> list[dict[str, Any]]:
        """The finished runs."""
        return [cell for cell in self.report["cells"] if "result" in cell]

    def folder(self, cell: Mapping[str, Any]) -> Path:
        """Return a run's directory."""
        return Path(normpath(Path(self.report["folder"]) / cell["folder"]))


def attacked(asked: Sequence[Asked], minutes: float, jobs: int) -> list[list[dict[str, Any]]]:
    """Attack the first institution's messages in every finished run of some comparisons.

    So many runs as `jobs` are attacked at the same time, each in its own process; 1: one after another in this process.
    All attacks on one run take about so many minutes. Returns by comparison a line for each attack and run: its result,
    with the method's `label` and the run's `metric`.
    """
    todo = [(a.folder(cell), a.aux, a.field, minutes) for a in asked for cell in a.cells]
    if jobs == 1 or not todo:
        seen = iter([_attack(*job) for job in todo])
    else:
        # as one list, so that no process waits for the end of a comparison, and each imports PyTorch once
        with share_of_cores(jobs), ProcessPoolExecutor(jobs, get_context("spawn"), initializer=end_with_parent) as pool:
            seen = iter(list(pool.map(_attack, *zip(*todo, strict=True))))
    attacks: list[list[dict[str, Any]]] = []
    for comparison in asked:
        lines = [(cell, line) for cell in comparison.cells for line in next(seen)["attacks"]]
        metric = comparison.report["metric"]
        attacks.append(
            [
                {
                    **line,
                    **{key: cell[key] for key in ("label", "seed")},
                    "metric": cell["result"]["final"]["global"][metric],
                }
                for cell, line in lines
            ]
        )
    return attacks


def _attack(folder: Path, aux: str, field: str, minutes: float) -> dict[str, Any]:
    return attack_run(folder, only=Only("institution-1", field), aux=aux, data="", minutes=minutes, say=print)


@contextmanager
def share_of_cores(jobs: int) -> Iterator[None]:
    """Give the processes that are started in here as many threads as their share of the cores, unless the user says.

    Libraries read the number when they are imported. Two processes with all cores each take several times as long.
    """
    threads = os.environ.get(THREADS)
    os.environ.setdefault(THREADS, str(max(1, (os.cpu_count() or 1) // jobs)))
    try:
        yield
    finally:
        if threads is None:
            del os.environ[THREADS]


def leakage(attacks: list[dict[str, Any]], metric: str) -> list[str]:
    """Write a table of attacks, over the seeds: PSNR as mean and standard deviation, identified images as a share."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for line in attacks:
        if line.get("scores") or "membership" in line:
            groups.setdefault((line["label"], f"{line['stage']} {line['field']}", line["attack"]), []).append(line)
    lines = [HEAD.format(metric=metric), "|---|---|---|---|---|---|---|---|---|"]
    for (label, field, attack), results in groups.items():
        cells = [label, f"{fmean(result['metric'] for result in results):.4f}", field, attack]
        if "membership" in results[0]:
            cells += ["", "", "", f"{fmean(result['membership']['auc']['value'] for result in results):.2f}", ""]
        else:
            controls = [result["control"] for result in results if result.get("control")]
            cells += [
                _decibels([result["scores"]["psnr"] for result in results]),
                _found([result["scores"] for result in results]),
                _identified(controls) if controls else "",
                "",
                f"{results[0]['values-per-pixel']:.2f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    silent = {(line["label"], line["not-judged"]) for line in attacks if line.get("not-judged")}
    return [*lines, "", *(f"- {label}: {reason}" for label, reason in sorted(silent))]


def _decibels(values: list[Any]) -> str:
    numbers = [value for value in values if isinstance(value, float)]  # an exact image has infinitely many
    if len(numbers) < len(values):
        return "exact"
    return f"{fmean(numbers):.1f}" + (f" ± {stdev(numbers):.1f}" if numbers[1:] else "")


def _found(scores: list[dict[str, Any]]) -> str:
    if any("nearer" in score for score in scores):
        by_chance = "{nearer} of {number} nearer, by chance {by_chance:.1f} (p = {p:.3f})"
        return "; ".join(by_chance.format_map(score) for score in scores)
    return _identified(scores)


def _identified(scores: list[dict[str, Any]]) -> str:
    number = sum(score["number"] for score in scores)
    portion = share(round(sum(score["identified"]["value"] * score["number"] for score in scores)), number)
    return f"{portion.value:.1%} [{portion.low:.1%}, {portion.high:.1%}] of {number}"
