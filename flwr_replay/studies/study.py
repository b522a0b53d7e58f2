"""A paper's table or figure as one command: `flwr-replay study partitions --data ../shared/data`.

A study is a list of comparisons, found by name in `flwr_replay.simulations`. An interrupted study continues with its
first unfinished cell. It writes to the folder of runs `study-<name>.md`, a picture for each group of them, both as
one page, and `study-<name>.csv` with all numbers.
"""

import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Self

from flwr_replay.attacks.scores import image_metrics
from flwr_replay.errors import ConfigError, DataError, nearest
from flwr_replay.files.atomic import make_folder, write_atomic
from flwr_replay.files.table import csv_text
from flwr_replay.report.charts import FORMS, Row, dots, write_figures
from flwr_replay.report.comparison import gaps, interval, markdown, markdown_table, mean_ranks_of, overview
from flwr_replay.report.forgetting import after_last_visits, last_visits
from flwr_replay.report.pages import write_study_page
from flwr_replay.report.plots import lines
from flwr_replay.report.run_files import read_result
from flwr_replay.report.templates import spared
from flwr_replay.report.texts import findings, lines_of, of_methods
from flwr_replay.studies.compare import PlannedComparison, planned, run_comparisons
from flwr_replay.studies.leakage import Asked, attacked, leakage
from flwr_replay.studies.methods import seeds_of, seeds_told, short_hash

__all__ = ["Compared", "Printed", "comparisons_of", "forecast", "plan_study", "run_study", "studies"]

MOST_TOLD = 60  # characters of the comparisons' names in a file's name
MINUTES = 0.2  # for all attacks on one run, about
COLUMNS = """\
- ± is the standard deviation over a comparison's seeds, which are paired; [ ] is a 95 % t interval, of five seeds or
  more: fewer cannot show the variation by chance
- worst institution is a mean over seeds
- [{stem}.csv]({stem}.csv) has all numbers, bytes, examples and seconds too"""


@dataclass(frozen=True, kw_only=True)
class Printed:
    """Numbers that a paper prints of a section, in the unit of ours."""

    source: str  # Qu et al. 2022, Table 2
    values: Mapping[str, str]  # by method, with the paper's digits: 7.60 ± 0.03
    of: str = "metric"  # or an attack: its PSNR, in dB; or "forgetting": by data and visit, "a after b"

    def beside(self, report: Mapping[str, Any], attacks: Sequence[Mapping[str, Any]]) -> dict[str, Row]:
        """Return what the section's runs found, by seed, each with the paper's mean as its mark.

        `report` is the section's comparison, `attacks` are what `flwr_replay.studies.leakage.attacked` returns of it.
        """
        measured: dict[str, dict[str, float]] = {}
        if self.of == "metric":
            known = [
                (label, seed, value)
                for label, row in report["strategies"].items()
                for seed, value in row["values"].items()
            ]
        elif self.of == "forgetting":
            known = [
                (f"{data} after {visit}", cell["seed"], value)
                for cell in report["cells"]
                for (data, visit), value in after_last_visits(cell.get("result", {}).get("forgetting")).items()
            ]
        else:
            lines = [line for line in attacks if line["attack"] == self.of and line.get("scores")]
            known = [(line["label"], line["seed"], line["scores"]["psnr"]) for line in lines]
        for name, seed, value in known:
            if isinstance(value, float):  # not of an institution that was away, nor of an exact image
                measured.setdefault(name, {})[str(seed)] = value
        return {
            name: Row(measured[name], fmean(own := [*measured[name].values()]), interval(own), _mean(printed))
            for name, printed in self.values.items()
            if name in measured
        }

    def table(self, rows: Mapping[str, Row]) -> list[str]:
        """Write the paper's numbers, ours and their differences as a Markdown table; `rows` are of `beside`."""
        lines = []
        for name, printed in self.values.items():
            ours = ["–", "–"]
            if row := rows.get(name):
                values = [*row.values.values()]
                spread = f" ± {stdev(values):.4f}" if values[1:] else ""
                ours = [f"{row.mean:.4f}{spread}", f"{row.mean - _mean(printed):+.4f}"]
            lines.append([name, printed, *ours])
        return markdown_table(["of", "paper", "ours", "difference"], lines)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A comparison of a study."""

    name: str
    about: str  # a sentence for the report
    methods: Sequence[str]  # as `flwr-replay compare` takes them
    options: Sequence[str]
    against: str = "fedreplay"
    metric: str = ""  # empty: the task's main one
    data: str = ""  # a folder or file under --data; ".": --data itself
    quick: Sequence[str] = ()  # options of --quick, in place of the same ones
    group: str = ""  # comparisons of one group share an overview
    attack: str = ""  # the attacker's own images, of a comparison whose messages are recorded and attacked; empty: none
    field: str = ""  # the only one that is attacked; empty: all
    paper: Printed | None = None  # what the paper prints of it

    @classmethod
    def led(cls, name: str, about: str, methods: Sequence[str], options: Sequence[str], **further: Any) -> Self:
        """Return a comparison whose first method is the one that the others are compared with."""
        first = methods[0].split(" := ")[0]
        return cls(name=name, about=about, methods=methods, options=options, against=first, **further)


def studies() -> list[str]:
    """List the names of all studies."""
    package = importlib.import_module("flwr_replay.simulations")
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__))


def comparisons_of(name: str) -> list[Compared]:
    """Return a study's comparisons; a name that is no study's is refused."""
    if name not in studies():
        raise ConfigError(f"unknown study {name!r}: {nearest(name, studies())}")
    comparisons: list[Compared] = importlib.import_module(f"flwr_replay.simulations.{name}").COMPARISONS
    return comparisons


def plan_study(
    name: str, data: str, runs_dir: Path, only: Sequence[str] = (), quick: bool = False, seeds: str = ""
) -> tuple[list[Compared], list[PlannedComparison]]:
    """Check a study's comparisons, or some of them, with their data; nothing runs, and nothing is written.

    Returns the comparisons that were asked for, as they will run, and as they are planned.

    Parameters
    ----------
    name, data : str
        One of `studies()`, and the folder with the comparisons' data sets.
    runs_dir : Path
        The folder for the comparisons' folders and `study-<name>.md`.
    only : sequence of str
        Names of comparisons; empty: all. Their report has a name of its own, so that it does not replace the whole one.
    quick : bool
        The first seed and two rounds of each comparison, and small networks and images where it says so: whether all
        runs. Its figures say nothing.
    seeds : str
        As `seeds=` of `compare`, for every comparison; empty: each comparison's own.

    Raises
    ------
    ConfigError
        For an unknown study or comparison, or any other mistake that can be found before the first run.
    DataError
        If a comparison's data are missing.
    """
    comparisons = comparisons_of(name)
    known = [comparison.name for comparison in comparisons]
    for wanted in only:
        if wanted not in known:
            raise ConfigError(f"study {name} has no comparison {wanted!r}: {nearest(wanted, known)}; --list names all")
    chosen = [comparison for comparison in comparisons if not only or comparison.name in only]
    if seeds:
        seeds_of(seeds)  # refused with --quick too, which has a seed of its own
    fixed = [f"seeds={seeds}"] if seeds else []
    chosen = [_shortened(c) if quick else c for c in (_with(comparison, fixed) for comparison in chosen)]
    places = {comparison.name: _data_option(comparison, data) for comparison in chosen}
    if any(comparison.attack for comparison in chosen):
        image_metrics()  # refused before anything runs
    return chosen, [
        planned(list(p.methods), [*p.options, *places[p.name]], p.against, runs_dir, p.metric, p.name) for p in chosen
    ]


def run_study(
    name: str,
    data: str,
    jobs: int,
    runs_dir: Path,
    only: Sequence[str] = (),
    quick: bool = False,
    minutes: float = MINUTES,
    seeds: str = "",
) -> tuple[Path, bool]:
    """Run a study's comparisons, or some of them; finished cells are not repeated.

    The parameters are those of `plan_study`, which raises for what is wrong with them. So many runs as `jobs` take
    place at the same time; `minutes` are for all attacks on one run, about, where a comparison's messages are attacked.
    Returns the report's file, in Markdown, and whether every run finished.

    Raises
    ------
    ConfigError
        For minutes that are not positive.
    """
    if not minutes > 0:
        raise ConfigError(f"--minutes must be positive; got {minutes:g}")
    chosen, plans = plan_study(name, data, runs_dir, only, quick, seeds)
    document = importlib.import_module(f"flwr_replay.simulations.{name}").__doc__ or ""
    folder = make_folder(runs_dir.expanduser().absolute(), "--runs-dir")
    outcomes = run_comparisons(plans, jobs)  # as one list, so that no job waits for the end of a comparison
    reports = {comparison.name: report for comparison, (_, report) in zip(chosen, outcomes, strict=True)}
    name = f"{name}-quick" if quick else name
    minutes = minutes / 60 if quick else minutes
    asked = {s.name: Asked(reports[s.name], s.attack, s.field) for s in chosen if s.attack}
    attacks = attacked(list(asked.values()), minutes, jobs)
    leaks = {stem: leakage(lines, reports[stem]["metric"]) for stem, lines in zip(asked, attacks, strict=True)}
    lines_of_attacks = dict(zip(asked, attacks, strict=True))
    papers = {
        s.name: (s.paper, s.paper.beside(reports[s.name], lines_of_attacks.get(s.name, []))) for s in chosen if s.paper
    }
    some = f" --only {','.join(only)}" if only else ""
    some += f" --seeds {seeds}" if seeds else ""
    some += f" --minutes {minutes:g}" if minutes != MINUTES and not quick else ""
    command = f"flwr-replay study {name.replace('-quick', ' --quick')} --data DIR{some}"
    named = "-".join(only) if len("-".join(only)) <= MOST_TOLD else short_hash(list(only))
    seeds_named = f"seeds-{seeds.replace(',', '-')}" if seeds else ""
    stem = "-".join(filter(None, ["study", name, named, seeds_named[:MOST_TOLD]]))
    file = folder / f"{stem}.md"
    write_atomic(file, _report(stem, name, document, command, chosen, reports, leaks, papers))
    write_atomic(file.with_suffix(".csv"), _numbers(reports))
    for group, members in _groups(chosen, reports).items():
        with spared(picture := folder / _picture(stem, group)):
            if chart := lines(members):
                write_figures(folder, {picture.stem: chart}, ("png", *FORMS), group)
    for which, (paper, rows) in papers.items():
        with spared(picture := folder / _beside(stem, which)):
            if rows:
                write_figures(folder, {picture.stem: dots(rows)}, ("png", *FORMS), f"dashed: {paper.source}")
    with spared(file.with_suffix(".html")):
        write_study_page(file)
    failed = [cell for report in reports.values() for cell in report["cells"] if "error" in cell]
    return file, not failed


def forecast(plans: Sequence[PlannedComparison]) -> tuple[dict[str, dict[str, int]], str]:
    """Count the runs of each comparison, and forecast the hours of those to come.

    A run to come takes as long as the finished runs of the same method took on average. Attacks are not in it. Runs
    that several comparisons have are counted once, at the first.
    Returned are each comparison's numbers, and the text: a line for each comparison and one for all.
    """
    counted, told, numbers = set(), [], dict[str, dict[str, int]]()
    seconds: dict[str, list[float]] = {}
    waiting: list[str] = []
    for plan in plans:
        cells = [cell for cell in plan.cells if cell.folder not in counted]
        counted |= {cell.folder for cell in cells}
        done = [cell for cell in cells if cell.done]
        for cell in done:
            seconds.setdefault(cell.method.label, []).append(read_result(cell.folder)["wall-seconds"])
        waiting += [cell.method.label for cell in cells if not cell.done]
        shared = len(plan.cells) - len(cells)
        also = f", {shared} more are of comparisons above" if shared else ""
        name = plan.cells[0].of_study
        numbers[name] = {"runs": len(cells), "finished": len(done), "shared": shared}
        told.append(f"{name}: {len(cells)} run{'s' * (len(cells) != 1)}, {len(done)} finished{also}")
    means = [fmean(seconds[label]) for label in waiting if label in seconds]
    unknown = len(waiting) - len(means)
    rest = f"all: {len(counted)} runs, {len(waiting)} to run"
    if means:
        rest += f"; {len(means)} of them take about {sum(means) / 3600:.1f} hours of one job"
    if unknown:
        rest += f"; {unknown} are of methods of which no run has finished, so that nothing is known of their time"
    return numbers, "\n".join([*told, rest])


def _shortened(comparison: Compared) -> Compared:
    """Return a comparison with its first seed, two rounds and its own quick options."""
    seeds = next((option.removeprefix("seeds=") for option in comparison.options if option.startswith("seeds=")), "")
    first = seeds_of(seeds)[0] if seeds else 0
    methods = [re.sub(r":rounds=\d+", "", method) for method in comparison.methods]
    fixed = [*comparison.quick, "rounds=2", "evaluate_every=1", f"seeds={first},"]
    return _with(replace(comparison, methods=methods), fixed)


def _with(comparison: Compared, fixed: Sequence[str]) -> Compared:
    """Return a comparison with these options too; of several with one name the last counts."""
    last = {option.partition("=")[0]: option for option in (*comparison.options, *fixed)}
    return replace(comparison, options=[*last.values()])


def _data_option(comparison: Compared, data: str) -> list[str]:
    if not comparison.data:
        return []
    place = Path(data).expanduser().absolute() / comparison.data if data else None
    if place is None or not place.exists():
        rule = f"{comparison.name} needs {comparison.data} under --data; got {data!r}: give the folder that holds it"
        own = f"--data must be the folder of the set, as docs/data.md shows it; got {data!r}: give one that exists"
        raise DataError(own if comparison.data == "." else rule)
    return [f"task.data-dir={place}"]


def _report(
    stem: str,
    name: str,
    document: str,
    command: str,
    comparisons: Sequence[Compared],
    reports: dict[str, dict[str, Any]],
    leaks: dict[str, list[str]],
    papers: Mapping[str, tuple[Printed, Mapping[str, Row]]],
) -> str:
    """Write the tables as Markdown: an overview of each group, then comparison by comparison.

    What all comparisons would say in the same words stands once, before the tables. One whose means stand in an
    overview has no table of its own.
    """
    notes = {comparison.name: findings(reports[comparison.name]) for comparison in comparisons}
    alike = notes[comparisons[0].name] if len(comparisons) > 1 else []
    alike = [note for note in alike if all(note in own for own in notes.values())]
    alike += [note for note in dict.fromkeys(chain(*map(of_methods, reports.values()))) if note not in alike]
    text = [f"# Study: {name}", "", document.strip(), "", f"Written by `{command}`.", ""]
    if name.endswith("-quick"):
        text += ["Two rounds and one seed show only that all of it runs. The figures mean nothing.", ""]
    text += [COLUMNS.format(stem=stem)]
    text += ["- a difference to a paper is our mean minus its; its seeds, and so its splits, are others"] * any(papers)
    text += [*(f"- {note}" for note in alike), ""]
    for group, members in _groups(comparisons, reports).items():
        text += [f"## {group}", "", *overview(members), "", f"![{group}]({_picture(stem, group)})", ""]
        text += [f"Over {len(members)} comparisons {ranked.told}.", ""] if (ranked := mean_ranks_of(members)) else []
    for comparison in comparisons:
        report = reports[comparison.name]
        seeds = seeds_told(report["seeds"])
        text += [f"### {comparison.name}", "", f"{comparison.about} {report['title']}, {seeds}.", ""]
        text += [] if comparison.group else [*markdown(report, costs=False), ""]
        if comparison.name in papers:
            paper, rows = papers[comparison.name]
            text += [f"Beside {paper.source}:", "", *paper.table(rows), ""]
            shown = f"![{comparison.name}; dashed: {paper.source}]({_beside(stem, comparison.name)})"
            text += [shown, ""] if rows else []
        text += [f"- {note}" for note in notes[comparison.name] if note not in alike]
        text += [*_forgotten(report), "", *gaps(report), ""]
        text += [*leaks.get(comparison.name, []), ""]
    return "\n".join(text)


def _numbers(reports: Mapping[str, dict[str, Any]]) -> str:
    """Write the numbers of all comparisons as CSV, a line for each comparison and method."""
    heads = ("comparison", *lines_of(next(iter(reports.values())))[0])
    return csv_text([heads, *((name, *line) for name, report in reports.items() for line in lines_of(report)[1:])])


def _groups(
    comparisons: Sequence[Compared], reports: dict[str, dict[str, Any]]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the reports by group and comparison."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for comparison in comparisons:
        if comparison.group:
            groups.setdefault(comparison.group, {})[comparison.name] = reports[comparison.name]
    return groups


def _picture(stem: str, group: str) -> str:
    return f"{stem}-{group.split(',')[0].lower().replace(' ', '-')}.png"


def _beside(stem: str, comparison: str) -> str:
    return f"{stem}-{comparison}-paper.png"


def _forgotten(report: dict[str, Any]) -> list[str]:
    """Write how much runs with `forgetting=true` lost on institutions that an exchange did not train on."""
    matrices = [(cell, cell["result"].get("forgetting")) for cell in report["cells"] if "result" in cell]
    text = []
    for cell, matrix in matrices:
        if matrix:
            text.append(
                f"- {cell['label']} seed {cell['seed']}: mean drop {matrix['mean-drop']:+.3f}, largest "
                f"{matrix['largest-drop']:+.3f} (`forgetting.png`)"
            )
            text += ["", *last_visits(matrix), ""]
    return text


def _mean(printed: str) -> float:
    return float(printed.partition(" ")[0])
