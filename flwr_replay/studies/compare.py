"""Several methods on the same seeds: `flwr-replay compare fedavg,cwt,fedreplay task=mnist seeds=3`.

A cell is one method with one seed, in one run directory. The same seed gives every method the same split of the data
and the same initial weights, so differences are taken seed by seed. Three kinds of model have other initial weights:
FedReplay's primary, which the server trains, FML's private models, and ProxyFL's proxies.

<runs-dir>/compare-<task>-<partition>-<hash of the shared options>/
<method>-seed<k>/   a run directory
<methods>-<hash>/   a comparison of these runs: of methods with their options, seeds, metric and reference
  compare.json        every cell's result, versions, options
  compare.png         a point per seed, means with intervals
  curves.png          the metric by round
  epsilon.png         the metric by the epsilon spent, if any is stated
  report.html         all of it on a page

A cell with a result.json is finished and not repeated. One with a checkpoint is resumed. Any other starts from scratch.
Comparisons with equal shared options use the same runs, and each has a folder of its own: none replaces another's.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flwr_replay.config.binding import plain
from flwr_replay.config.compose import compose, refuse_typed, to_yaml
from flwr_replay.config.effect import idle
from flwr_replay.config.halves import load_strategy
from flwr_replay.config.run import RunConfig
from flwr_replay.engines.simulate import Simulation
from flwr_replay.errors import ConfigError, RunError, nearest
from flwr_replay.files.atomic import alone, make_folder, sweep, write_json
from flwr_replay.files.disk import there
from flwr_replay.learning.tasks import ERRORS, make_task
from flwr_replay.privacy.noise import noise_of
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.report import run_files
from flwr_replay.report.metrics import VALIDATION
from flwr_replay.runs.options import resolve
from flwr_replay.studies.cells import Cell, run_all
from flwr_replay.studies.methods import Method, methods_of, named, options_of, short_hash, swept
from flwr_replay.studies.rates import AUTO, refuse, trials, with_rates

__all__ = ["PlannedComparison", "compare_strategies", "planned", "run_comparisons"]

MAY_DIFFER = (  # what a preset sets for a method
    ("model", "name"),
    ("model", "norm"),
    ("privacy", "dp"),
    ("training", "optimizer"),
    ("training", "lr"),
    ("training", "momentum"),
    ("training", "batch_size"),
    ("replay", "name"),
)
TUNED = ("lr", "momentum", "weight_decay", "batch_size")  # of training; and what of a strategy is no whole number
NOT_THE_RESULT = ("strategy", "seed", "runs_dir", "run_name", "resume", "timeout", "wait", "clinics")


def compare_strategies(
    strategies: list[str], options: list[str], against: str, jobs: int, runs_dir: Path, metric: str = ""
) -> tuple[str, dict[str, Any]]:
    """Run methods on the same seeds, and compare them: return a table in plain text, and the content of `compare.json`.

    The parameters are those of `flwr_replay.api.compare`. Options are as `flwr-replay run` takes them; with `seeds=3`
    (0, 1, 2) or `seeds=0,5,7`; with `lr=auto`; and `fedreplay.cut=layer2` for every method of that strategy. So many
    cells as `jobs` run at the same time, each in its own process; with 1, one after another in this process.

    Raises
    ------
    ConfigError
        For every mistake that can be found before the first run.
    RunError
        If the folder cannot be written, or if another comparison is running in it.
    """
    told = ""
    if auto := AUTO & {*options}:
        against = against or (named(strategies[0])[0] if len(strategies) == 1 else "")
        strategies, options = swept(strategies, [option for option in options if option not in auto])
        cells = planned(strategies, options, against, runs_dir, metric).cells  # refused before any trial
        still = {cell.method.label for cell in cells if not compose(list(cell.overrides)).strategy.takes_steps}
        tried = planned(*trials(strategies, options, still), "", runs_dir, "", "lr=auto")
        refuse(compose(list(tried.cells[0].overrides)).split, tried.about["noise"])
        tried = replace(tried, cells=[replace(cell, metric=f"{VALIDATION}{cell.metric}") for cell in tried.cells])
        strategies, told = with_rates(strategies, run_comparisons([tried], jobs)[0][1])
    whole = planned(strategies, options, against, runs_dir, metric, tuned=("lr",) if auto else ())
    return run_comparisons([replace(whole, about=whole.about | {"rates": told})], jobs)[0]


@dataclass(frozen=True)
class PlannedComparison:
    """Methods and seeds, checked and ready to run; nothing has been written yet."""

    runs: Path  # the folder of the runs; other comparisons may use them, too
    folder: Path  # in it: of this comparison alone
    cells: Sequence[Cell]
    about: dict[str, Any]  # the report without the cells

    @property
    def labels(self) -> list[str]:
        """The methods, in the order of the table."""
        return list(dict.fromkeys(cell.method.label for cell in self.cells))


def planned(
    strategies: list[str],
    options: list[str],
    against: str,
    runs_dir: Path,
    metric: str = "",
    of_study: str = "",
    tuned: Sequence[str] = (),
) -> PlannedComparison:
    """Parse and check a comparison; the parameters are those of `compare_strategies`.

    `of_study` is its name in a study; `tuned` are options that were tuned for each method before.
    """
    first = len(strategies) == 1  # values of one method's options: the first is the reference
    strategies, options = swept(strategies, options)
    shared, own, seeds = options_of(options, [named(name)[1].partition(":")[0] for name in strategies])
    methods = methods_of(strategies, own)
    labels = [method.label for method in methods]
    against = against or labels[0 if first else -1]
    if against not in labels:
        raise ConfigError(f"--against must be one of the methods compared; got {against!r}: {nearest(against, labels)}")
    runs, configs, cells, more = _plan(methods, shared, seeds, runs_dir)
    if not of_study:  # its comparisons share options that some of them do not need
        refuse_typed(shared, [f"strategy={methods[0].strategy}", *shared], [*configs.values()])
    config = configs[against]
    tasks = {label: make_task(config.task) for label, config in configs.items()}
    metric = metric or tasks[against].metric
    reported = [load_strategy(method.strategy)[0].evaluated.metrics(tasks[method.label]) for method in methods]
    reported_by_all = [name for name in reported[0] if all(name in names for names in reported)]
    mixed = all(config.evaluate_before_mixing for config in configs.values())
    prefixes = ["external-"] * config.external + ["before-mixing-"] * mixed
    prefixes += [f"validation-{prefix}" for prefix in ("", *["before-mixing-"] * mixed)] * (config.split != "test")
    known = [f"{prefix}{name}" for prefix in ["", *prefixes] for name in reported_by_all]
    if metric not in known:
        raise ConfigError(f"--metric must be one that all methods report; got {metric!r}: {nearest(metric, known)}")
    folder = runs / _own_name(methods, seeds, metric, against)
    about = {
        "title": _title(list(configs.values())),
        "metric": metric,
        "higher-is-better": metric.rpartition("-")[2] not in ERRORS,
        "against": against,
        "seeds": list(seeds),
        **more,
        "untuned": _untuned(methods, configs, tuned),
        "options": shared,
        "folder": str(folder),
    }
    return PlannedComparison(runs, folder, [replace(cell, metric=metric, of_study=of_study) for cell in cells], about)


def run_comparisons(comparisons: Sequence[PlannedComparison], jobs: int) -> list[tuple[str, dict[str, Any]]]:
    """Run the cells of several comparisons as one list, each cell once; return each one's table and report."""
    if jobs < 1:
        raise ConfigError(f"--jobs must be at least 1; got {jobs}")
    cells: dict[Path, Cell] = {}
    with ExitStack() as locks:
        for folder in dict.fromkeys(comparison.runs for comparison in comparisons):
            make_folder(folder, "--runs-dir")
            locks.enter_context(alone(folder))
            sweep(folder)
        for cell in (cell for comparison in comparisons for cell in comparison.cells):
            first = cells.setdefault(cell.folder, cell)
            if first.overrides != cell.overrides and compose(list(first.overrides)) != compose(list(cell.overrides)):
                raise ConfigError(
                    f"every run needs its own folder; {first.of_study} and {cell.of_study} have different runs in "
                    f"{cell.folder.name}: give the options in which they differ as options of the methods"
                )
        outcomes: dict[Path, dict[str, Any]] = {}
        written: dict[int, tuple[str, dict[str, Any]]] = {}
        for folder, outcome in run_all(list(cells.values()), jobs):
            outcomes[folder] = outcome
            for number, comparison in enumerate(comparisons):  # write each one as soon as all its cells have ended
                if number not in written and all(cell.folder in outcomes for cell in comparison.cells):
                    written[number] = _written(comparison, outcomes)
    return [written[number] for number in range(len(comparisons))]


# --- the plan ---------------------------------------------------------------------------------------------------------


def _plan(
    methods: Sequence[Method], shared: Sequence[str], seeds: Sequence[int], runs_dir: Path
) -> tuple[Path, dict[str, RunConfig], list[Cell], dict[str, Any]]:
    """Resolve and check every cell; say how methods differ, and their noise. Nothing is written yet."""
    options = [f"strategy={methods[0].strategy}", *shared]
    _, common = resolve([], ".", "", options)  # the shared options, without any method's own
    alike = {key: value for key, value in asdict(common).items() if key not in NOT_THE_RESULT}
    name = f"compare-{common.task.name}-{common.partition.name}-{short_hash(alike)}"
    folder = runs_dir.expanduser().absolute() / name
    resolved = []
    for method in methods:
        with _naming(method, methods):
            resolved.append(resolve(method.options, str(folder), "", [f"strategy={method.strategy}", *shared]))
    seen: dict[str, str] = {}
    for method, (_, config) in zip(methods, resolved, strict=True):  # lr=0.1 and lr=0.10 are the same
        if (first := seen.setdefault(to_yaml(config), method.label)) != method.label:
            raise ConfigError(f"every method is compared once; {first} and {method.label} are the same: remove one")
    noise: dict[str, list[dict[str, Any]]] = {}
    cells = []
    for seed in seeds:  # seed by seed, so that an interrupted comparison has complete pairs
        for method, (overrides, config) in zip(methods, resolved, strict=True):
            place = folder / f"{method.slug}-seed{seed}"
            _refuse_other(place, replace(config, seed=seed))
            with _naming(method, methods):
                simulation = Simulation.of(replace(config, seed=seed))
            noise.setdefault(method.label, _noise(simulation))
            cells.append(Cell(method, seed, place, (*overrides, f"seed={seed}", f"run_name='{place.name}'")))
    alone = {method.label: config for method, (_, config) in zip(methods, resolved, strict=True)}
    return folder, alone, cells, {"noise": noise, "differ": _differing(methods, alone)}


def _own_name(methods: Sequence[Method], seeds: Sequence[int], metric: str, against: str) -> str:
    """Name a comparison's own folder by its methods, and by a hash of all that makes it another comparison."""
    names = "-".join(dict.fromkeys(method.strategy for method in methods))
    described = [[method.label, method.strategy, *method.options] for method in methods]
    return f"{names[:60]}-{short_hash([described, list(seeds), metric, against])}"


def _differing(methods: Sequence[Method], configs: Mapping[str, RunConfig]) -> list[str]:
    """Say in which options, not written by the user, methods differ: `model.norm: batch (cwt), group (proxyfl)`."""
    written = {option.partition("=")[0] for method in methods for option in method.options}
    sections = {label: asdict(config) for label, config in configs.items()}
    lines = []
    for section, option in MAY_DIFFER:
        labels_of: dict[str, list[str]] = {}
        for label, values in sections.items():
            labels_of.setdefault(str(values[section].get(option, "none")), []).append(label)
        if len(labels_of) > 1 and f"{section}.{option}" not in written and section not in written:
            shown = "; ".join(f"{value} ({', '.join(labels)})" for value, labels in labels_of.items())
            lines.append(f"{section}.{option}: {shown}")
    return lines


def _untuned(methods: Sequence[Method], configs: Mapping[str, RunConfig], tuned: Sequence[str]) -> str:
    """Name the hyperparameters with an effect, not tuned, with one value for a method; empty for one method alone."""
    values: dict[tuple[str, str], set[float]] = {}  # by option and strategy
    for method in methods:
        config = configs[method.label]
        own = {f"strategy.{name}": value for name, value in asdict(config.strategy).items() if isinstance(value, float)}
        for full, value in ({f"training.{name}": getattr(config.training, name) for name in TUNED} | own).items():
            name = full.partition(".")[2]
            if value and name not in ("chunk_mb", *tuned) and not idle(full, full, [config]):
                values.setdefault((name, method.strategy), set()).add(value)
    strategies: dict[str, list[str]] = {}
    for (name, strategy), several in values.items():
        if len(several) == 1:
            strategies.setdefault(f"{name.replace('_', '-')} {min(several):g}", []).append(strategy)
    every = len({method.strategy for method in methods})
    shown = ", ".join(
        option + ("" if len(names) == every else f" ({', '.join(names)})") for option, names in strategies.items()
    )
    return f"not tuned, one value only: {shown}; another may change the order" if len(methods) > 1 and shown else ""


@contextmanager
def _naming(method: Method, methods: Sequence[Method]) -> Iterator[None]:
    """Say of which of several methods a refusal is."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{method.label}: {error}") if len(methods) > 1 else error from None


def _noise(simulation: Simulation) -> list[dict[str, Any]]:
    """Return the noise with which the smallest institution trains; nothing without differential privacy."""
    plan, counts = PrivacyPlan.of(simulation.job.config), [len(own) for own in simulation.partition.train]
    return [] if plan is None else noise_of(plan, sum(counts) if plan.pooled else min(counts))


def _refuse_other(folder: Path, config: RunConfig) -> None:
    """Refuse a cell that was begun with other options; options that only one version has are not compared."""
    if not there(folder / "config.yaml"):
        return
    ours = plain(config)
    theirs = run_files.options_of(folder)
    for key in theirs.keys() & ours.keys() - {"runs_dir", "run_name", "resume", "timeout", "wait", "clinics"}:
        pairs = (theirs[key], ours[key]) if isinstance(ours[key], dict) else ({"": theirs[key]}, {"": ours[key]})
        if differing := [k for k in pairs[0].keys() & pairs[1].keys() if pairs[0][k] != pairs[1][k]]:
            option = ".".join(filter(None, (key, differing[0])))
            raise RunError(f"{folder} was begun with another value of {option}: move it, or choose another --runs-dir")


def _title(configs: Sequence[RunConfig]) -> str:
    """Say on what all methods were compared; what they differ in is only counted."""

    def alike(values: Iterable[str], many: str) -> str:
        distinct = list(dict.fromkeys(values))
        return distinct[0] if len(distinct) == 1 else f"different {many}"

    tasks = alike((config.task.name for config in configs), "tasks")
    nodes = alike((f"{config.nodes} institutions" for config in configs), "numbers of institutions")
    models = alike((config.model.build or config.model.name for config in configs), "models")
    rounds = alike((f"{config.rounds} round{'s' * (config.rounds > 1)}" for config in configs), "numbers of rounds")
    return f"{tasks}, {nodes}, {alike(map(_dealt, configs), 'partitions')}: {models}, {rounds}"


def _dealt(config: RunConfig) -> str:
    shown = {"ks": f"KS {config.partition.ks:g}", "majority": f"majority {config.partition.p:g}"}
    shown["dirichlet"] = f"Dirichlet {config.partition.alpha:g}"
    return shown.get(config.partition.name, config.partition.name)


def _guesses(cell: Cell, outcome: Mapping[str, Any]) -> str:
    """Say with which training a finished run is no better than guessing; empty if it is better, or has failed."""
    from flwr_replay.report.metrics import no_better_than_guessing
    from flwr_replay.report.summary import confusion_of

    if "error" in outcome or not no_better_than_guessing(outcome["result"], confusion_of(cell.folder)):
        return ""
    training = run_files.options_of(cell.folder)["training"]
    steps = outcome["result"]["examples-seen"] / training["batch_size"]
    return f"lr={training['lr']:g}, {steps:,.0f} batches of {training['batch_size']} in all"


# --- the report -------------------------------------------------------------------------------------------------------


def _written(comparison: PlannedComparison, outcomes: Mapping[Path, dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Collect the cells with their statistics; write table, data and pictures."""
    from flwr_replay.report.comparison import summarise
    from flwr_replay.report.pages import PICTURES, write_compare_page
    from flwr_replay.report.run_page import PAGE
    from flwr_replay.report.templates import spared
    from flwr_replay.report.texts import table

    report, labels, folder = dict(comparison.about), comparison.labels, make_folder(comparison.folder, "--runs-dir")
    report["cells"] = [
        {
            "label": cell.method.label,
            "strategy": cell.method.strategy,
            "options": list(cell.method.options),
            "seed": cell.seed,
            "folder": f"../{cell.folder.name}",  # from the comparison's own
            "guesses": _guesses(cell, outcomes[cell.folder]),
            **outcomes[cell.folder],
        }
        for cell in comparison.cells
    ]
    metric = report["metric"]
    report["strategies"] = summarise(report["cells"], labels, report["against"], metric, report["higher-is-better"])
    write_json(folder / "compare.json", json.loads(json.dumps(report, default=asdict)), indent=2)
    with spared(page := folder / PAGE):
        write_compare_page(folder, report)
    pictures = [picture.name for name in PICTURES if (picture := folder / f"{name}.png").exists()]
    written = f"{folder}: {', '.join(['compare.json', *pictures])}\n{page}"
    return f"{table(report)}\n{written}", report
