"""How much of a study is done, and how long the rest takes, by the runs that have finished."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from flwr_replay.report.run_files import read_result
from flwr_replay.studies.compare import PlannedComparison

__all__ = ["forecast"]


def forecast(comparisons: Sequence[PlannedComparison]) -> str:
    """Count the runs of each part, and forecast the hours of those to come.

    A run to come takes as long as the finished runs of the same method took on average. Attacks are not in it. Runs
    that several parts have are counted once, at the first.

    Parameters
    ----------
    comparisons : sequence of Comparison
        Each of a part.

    Returns
    -------
    str
        Plain text, a line for each part and one for all.
    """
    counted, lines = set(), []
    seconds: dict[str, list[float]] = {}
    waiting: list[str] = []
    for comparison in comparisons:
        cells = [cell for cell in comparison.cells if cell.folder not in counted]
        counted |= {cell.folder for cell in cells}
        done = [cell for cell in cells if cell.done]
        for cell in done:
            seconds.setdefault(cell.method.label, []).append(read_result(cell.folder)["wall-seconds"])
        waiting += [cell.method.label for cell in cells if not cell.done]
        shared = len(comparison.cells) - len(cells)
        also = f", {shared} more are of parts above" if shared else ""
        lines.append(
            f"{comparison.cells[0].part}: {len(cells)} run{'s' * (len(cells) != 1)}, {len(done)} finished{also}"
        )
    told = [fmean(seconds[label]) for label in waiting if label in seconds]
    unknown = len(waiting) - len(told)
    rest = f"all: {len(counted)} runs, {len(waiting)} to run"
    if told:
        rest += f"; {len(told)} of them take about {sum(told) / 3600:.1f} hours of one job"
    if unknown:
        rest += f"; {unknown} are of methods of which no run has finished, so that nothing is known of their time"
    return "\n".join([*lines, rest])
