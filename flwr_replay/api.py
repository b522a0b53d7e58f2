"""Runs and comparisons from Python, as from the command line: `run(strategy="fedreplay", task="digits", rounds=3)`.

Options are those of docs/options.md. A name with a dot or a hyphen is written with underscores where Python needs it
(`local_epochs=2`), or given in a dictionary: `run({"partition.size": 60}, task="digits")`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from os.path import normpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr_replay.config.catalogue import GROUPS
from flwr_replay.config.quoting import quoted
from flwr_replay.errors import ConfigError
from flwr_replay.terminal import installing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from flwr_replay.finished.trained import TrainedModel
    from flwr_replay.report.progress import Display

__all__ = ["Comparison", "Run", "Where", "compare", "plot", "run", "start"]

ENGINES = ("inline", "ray")
SEVERAL = re.compile(r"[^/]*\|[^/]*|[\w.+-]*\.\.[\w.+-]*|auto")  # values, a range, or the five rates of lr=auto


@dataclass(frozen=True)
class Where:
    """What serves the institutions; `run` says what each of its values means."""

    engine: str = "inline"
    workers: int = 1
    ray_address: str = ""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ConfigError(f"--engine must be inline or ray; got {self.engine!r}")
        if self.workers < 1 or (self.workers > 1 and self.engine != "inline"):
            raise ConfigError(
                f"--workers must be at least 1, and belongs to --engine inline; got {self.workers} with {self.engine}: "
                "on Ray client-cpus and client-gpus say how many there are"
            )
        if self.engine == "ray" and not find_spec("ray"):
            raise ConfigError("Ray is not installed, and has no wheels for Windows from Python 3.13: leave it out")
        if self.ray_address and self.engine != "ray":
            raise ConfigError(f"--ray-address belongs to --engine ray; got {self.ray_address} with {self.engine}")

    @property
    def address(self) -> str:
        """The cluster's address; empty: no cluster."""
        return (self.ray_address or os.environ.get("RAY_ADDRESS", "")) if self.engine == "ray" else ""


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes
    ----------
    folder : Path
        The run directory.
    result : dict
        The content of `result.json`.
    """

    folder: Path
    result: dict[str, Any]

    @property
    def metrics(self) -> DataFrame:
        """Every metric of every evaluation: columns round, exchange, institution ("": over all), metric, value."""
        import pandas

        from flwr_replay.report.run_files import FORMS, METRICS, rows_of

        return pandas.DataFrame(rows_of(self.folder, METRICS), columns=[*FORMS[METRICS]])

    def model(self, institution: str = "", *, best: bool = False) -> TrainedModel:
        """Load the global model, of the last or the best round, or that of an institution.

        See `flwr_replay.finished.trained.load_model`.
        """
        from flwr_replay.finished.trained import load_model

        return load_model(self.folder, institution, best=best)

    def report(self) -> Path:
        """Write `report.html` again; return its path."""
        from flwr_replay.report.run_page import write_run_page

        return write_run_page(self.folder)

    def plot(self, metric: str = "") -> Figure:
        """Draw a metric by round, over all institutions and of each; empty: the task's main one."""
        return plot([self], metric)

    def __str__(self) -> str:
        from flwr_replay.report.summary import summary

        return summary(self.result, self.folder)


@dataclass(frozen=True)
class Comparison:
    """A finished comparison.

    Attributes
    ----------
    folder : Path
        Its folder; the run directories lie beside it.
    report : dict
        The content of `compare.json`.
    text : str
        The table with its notes.
    """

    folder: Path
    report: dict[str, Any]
    text: str

    @property
    def table(self) -> DataFrame:
        """A line for each method: mean, the paired difference with its interval, epsilon and delta, bytes, seconds."""
        import pandas

        from flwr_replay.report.texts import rows_of

        return pandas.DataFrame.from_dict(rows_of(self.report), orient="index")

    @property
    def runs(self) -> dict[tuple[str, int], Run]:
        """The finished runs by method and seed."""
        cells = [cell for cell in self.report["cells"] if "result" in cell]
        return {
            (cell["label"], cell["seed"]): Run(Path(normpath(self.folder / cell["folder"])), cell["result"])
            for cell in cells
        }

    def shown(self, form: str) -> str:
        """Write the comparison as text, md, csv, latex or json."""
        if form == "md":
            from flwr_replay.report.comparison import markdown
            from flwr_replay.report.texts import notes

            return "\n".join([*markdown(self.report), "", *(f"- {note}" for note in notes(self.report))])
        if form == "csv":
            from flwr_replay.files.table import csv_text
            from flwr_replay.report.texts import lines_of

            return csv_text(lines_of(self.report)).rstrip()  # without an end of the last line
        if form == "latex":
            from flwr_replay.report.texts import as_latex

            return as_latex(self.report)
        return json.dumps(self.report, indent=2, default=asdict) if form == "json" else self.text

    def __str__(self) -> str:
        return self.text


def run(
    options: Mapping[str, Any] | None = None,
    /,
    *,
    engine: str = "inline",
    workers: int = 1,
    ray_address: str = "",
    runs_dir: str | Path = "runs",
    resume: str | Path = "",
    progress: bool = False,
    **named: Any,
) -> Run:
    """Run one method on one task.

    Parameters
    ----------
    options, **named
        As on the command line: strategy, task, rounds, …
    engine : str
        inline: in this process. ray: with Flower's Ray simulation, or on a Ray cluster.
    workers : int
        With inline: processes that serve the institutions. From 2 on, a script must call this function under
        ``if __name__ == "__main__":``.
    ray_address : str
        With ray: `auto` or host:port of a running cluster, on which the institutions are served; empty: that of
        `RAY_ADDRESS`, and without it Flower's Ray simulation on this machine.
    runs_dir : str or Path
        The folder for run directories.
    resume : str or Path
        Continue the run in this directory.
    progress : bool
        Show a bar or log lines.

    Raises
    ------
    FlwrReplayError
        As the command line reports it in one line; `ConfigError` for a wrong option.

    Examples
    --------
    >>> run(task="digits", rounds=0)
    Traceback (most recent call last):
    flwr_replay.errors.ConfigError: rounds must be at least 1; got 0
    """
    from flwr_replay.report.progress import Display, TerminalDisplay

    display = TerminalDisplay() if progress else Display()
    where = Where(engine, workers, ray_address)
    result, folder = start(_words(options, named), where, str(runs_dir), str(resume), display)
    return Run(folder, result)


def plot(runs: Sequence[Run], metric: str = "") -> Figure:
    """Draw a metric by round: of one run over all institutions and of each, of several a line for each run.

    Parameters
    ----------
    runs : sequence of Run
        At least one.
    metric : str
        Empty: the main one of the first run's task.

    Raises
    ------
    ConfigError
        If a run has no such metric.
    """
    from flwr_replay.report.charts import curves
    from flwr_replay.report.metrics import judged

    asked, lines = metric or runs[0].result["metric"], {}
    named = [judged(asked, {*run.metrics["metric"]}) for run in runs]  # of validation or of test examples
    alike = len({*named}) == 1
    for run, name in zip(runs, named, strict=True):
        rows = run.metrics[run.metrics["metric"] == name]
        if rows.empty:
            known = ", ".join(run.metrics["metric"].unique())
            raise ConfigError(f"metric must be one of {known}; got {asked!r}")
        for institution, line in rows.groupby("institution"):
            if len(runs) == 1:
                lines[institution or "all institutions"] = list(zip(line["round"], line["value"], strict=True))
            elif not institution:
                label = _label(run, runs) + f" ({name})" * (not alike)
                lines[label] = list(zip(line["round"], line["value"], strict=True))
    if (chart := curves(lines, "round")) is None:
        raise ConfigError(f"a metric is drawn where it is a finite number; {asked} never is: choose another metric")
    chart.figure.axes[0].set_ylabel(named[0] if alike else asked)
    return chart.figure


def compare(
    strategies: Sequence[str],
    options: Mapping[str, Any] | None = None,
    /,
    *,
    against: str = "",
    metric: str = "",
    jobs: int = 1,
    runs_dir: str | Path = "runs",
    tune: int | None = None,
    **named: Any,
) -> Comparison:
    """Run several methods on the same seeds, and compare them; finished runs are not repeated.

    Parameters
    ----------
    strategies : sequence of str
        The methods, in one text by commas, too; own options follow a colon: `fedreplay:cut=layer2`.
    options, **named
        For all methods; `seeds=3` are the seeds 0, 1 and 2, and `lr="0.1|0.3"` makes two methods of each.
    against : str
        The method that the others are compared with; empty: the last, of one method's values the first.
    metric : str
        Empty: the task's main one.
    jobs : int
        Runs at the same time.
    runs_dir : str or Path
        The folder for the comparison's folder.
    tune : int or None
        Tries by Optuna for each method, where an option is `lr="0.001..0.1"`.

    Raises
    ------
    FlwrReplayError
        As the command line reports it.
    """
    words = _words(options, named, sweeps=True)
    strategies = strategies.split(",") if isinstance(strategies, str) else strategies
    if not strategies:
        raise ConfigError("strategies must name at least one method; got none")
    return compare_typed(list(strategies), words, against, jobs, Path(runs_dir), metric, tune)


def compare_typed(
    strategies: list[str], options: list[str], against: str, jobs: int, runs_dir: Path, metric: str, tune: int | None
) -> Comparison:
    """Compare methods with options as they are typed; the parameters are those of `compare`."""
    from flwr_replay.studies.methods import refuse_typos

    if tune is not None and not find_spec("optuna"):
        raise ConfigError(f"--tune needs Optuna: {installing('optuna')}")
    refuse_typos(strategies, options, tune is not None)
    if tune is None:
        from flwr_replay.studies.compare import compare_strategies

        text, report = compare_strategies(strategies, options, against, jobs, runs_dir, metric)
    else:
        from flwr_replay.studies.tuning import compare_tuned

        text, report = compare_tuned(strategies, options, against, jobs, runs_dir, metric, tune)
    return Comparison(Path(report["folder"]), report, text)


def start(
    options: Sequence[str], where: Where, runs_dir: str, resume: str, display: Display
) -> tuple[dict[str, Any], Path]:
    """Run a command line's options; return the content of `result.json` and the run directory."""
    from flwr_replay.runs.options import resolve

    shares = [option for option in options if option.replace("-", "_").startswith(("client_cpus=", "client_gpus="))]
    if shares and where.engine != "ray":
        raise ConfigError(
            f"client-cpus and client-gpus belong to --engine ray; got {', '.join(shares)}: leave them out"
        )
    overrides, config = resolve(options, runs_dir, resume)  # reports a wrong option before PyTorch loads
    from flwr_replay.engines.cluster.on_cluster import run_on_cluster
    from flwr_replay.engines.simulate import Simulation, run_ray, simulate, simulate_by
    from flwr_replay.learning.training import select_device
    from flwr_replay.report.progress import without_colours

    without_colours()
    planned = Simulation.of(config)
    if where.address:
        return run_on_cluster(where.address, planned, overrides, display)
    for plan in (planned.job.settings.replay_plan, planned.job.settings.synthesis):
        if plan:  # each institution asks the same of its own device, but only once it is called
            plan.check_device(select_device(config.device))
    if where.engine == "ray":
        return run_ray(planned, overrides)
    if where.workers > 1:
        return simulate_by(where.workers, planned, overrides, display)
    return simulate(planned, overrides, display)


def _label(run: Run, runs: Sequence[Run]) -> str:
    """Return the name of a run's directory; with its folder's, if another has the same name."""
    same = [other for other in runs if other.folder.name == run.folder.name]
    return run.folder.name if len(same) == 1 else f"{run.folder.parent.name}/{run.folder.name}"


def _words(options: Mapping[str, Any] | None, named: Mapping[str, Any], sweeps: bool = False) -> list[str]:
    """Write options as they are typed; with `sweeps`, texts such as `0.1|0.3` are left as they are."""
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"options must be a mapping, such as {{'rounds': 3}}; got {options!r}")
    all_options = {**(options or {}), **named}
    bare = {key for key, value in all_options.items() if sweeps and isinstance(value, str) and SEVERAL.fullmatch(value)}
    return [f"{key}={value if key in bare | {*GROUPS} else quoted(value)}" for key, value in all_options.items()]
