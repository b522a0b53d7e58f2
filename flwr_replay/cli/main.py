"""The command line: run | compare | study | runs | watch | report | predict | export | and more.

Heavy modules are imported only by the commands that need them, so that `--help` answers at once.
"""

import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from click import Command
from click.exceptions import Abort, ClickException, MissingParameter, NoArgsIsHelpError, NoSuchOption
from typer.main import get_command

from flwr_replay import __version__
from flwr_replay.cli.completing import of_methods, of_runs, of_studies
from flwr_replay.cli.data import app as data
from flwr_replay.cli.deploy import app as deploy
from flwr_replay.cli.deploy import rehearse
from flwr_replay.cli.new import app as new
from flwr_replay.cli.options import options
from flwr_replay.cli.places import LAST, AsJson, Options, RunsDir, absolute, answer, finished_place, hint, say
from flwr_replay.cli.privacy import app as privacy
from flwr_replay.cli.runs import app as runs
from flwr_replay.cli.runs import export, predict, watch
from flwr_replay.cli.weights import app as weights
from flwr_replay.config.catalogue import choices
from flwr_replay.config.own_code import users_code
from flwr_replay.errors import ConfigError, FlwrReplayError, nearest, one_line

__all__ = ["app", "main"]

NO_MEMORY = re.compile("can't allocate memory|out of memory")  # in PyTorch's error messages
NO_HOME = "Could not determine home directory."  # of `Path.expanduser`
OTHER_DIGITS = re.compile(r"(?=.*[^ -~])[-+]?[\d.]+")  # that `int` and `float` would read
FORMATS = ("text", "md", "csv", "latex", "json")  # of a comparison
TWICE = re.compile(r"(?<=\?) \(?Did you mean .*$")  # Typer suggests a command, and then Click does

app = typer.Typer(
    no_args_is_help=True,
    invoke_without_command=True,
    rich_markup_mode="markdown",  # which fills lines anew
    pretty_exceptions_enable=False,
)
app.add_typer(data, name="data")
app.add_typer(privacy, name="privacy")
app.add_typer(runs, name="runs")
app.add_typer(deploy, name="deploy")
app.add_typer(new, name="new")
app.add_typer(weights, name="weights")

Engine = Annotated[str, typer.Option("--engine", help="inline: in this process | ray: on Ray.")]


def _choices() -> str:
    """Name what can be chosen, for the help; conf/ is a folder of names, so that reading it takes no time."""
    groups = (f"{group}: {', '.join(choices(group))}." for group in ("strategy", "task", "partition", "model"))
    return "\n\n".join([*groups, "flwr-replay options explains all of them, and the other options."])


@app.callback()
def version(
    shown: Annotated[bool, typer.Option("--version", is_eager=True, help="Show the version and exit.")] = False,
) -> None:
    """Federated learning on Flower, for institutions whose data differ."""
    if shown:
        print(f"flwr-replay {__version__}")
        raise typer.Exit


@app.command(epilog=_choices())
def run(
    options: Options = None,
    engine: Engine = "inline",
    workers: Annotated[int, typer.Option("--workers", help="With inline: processes that serve the institutions.")] = 1,
    ray_address: Annotated[
        str | None,
        typer.Option("--ray-address", help="With ray: auto or HOST:PORT of a running cluster; default: RAY_ADDRESS."),
    ] = None,
    runs_dir: RunsDir = "runs",
    resume: Annotated[str | None, typer.Option("--resume", help="Continue the run in this directory.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List what would be sent, and train nothing.")] = False,
    study: Annotated[
        str | None, typer.Option("--study", help="With --dry-run: a study's folder, whose options hold.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="With --dry-run: the policy whose verdict is wanted.")
    ] = None,
    clinics: Annotated[
        str | None, typer.Option("--clinics", help="With --study or --policy: whose data they are, by commas.")
    ] = None,
    out: Annotated[str, typer.Option("--out", help="The folder for officer.html and officer.json.")] = "officer",
    as_json: AsJson = False,
) -> None:
    """Run one method on one task. Without options: FedReplay on scikit-learn's digits.

    For example: strategy=cwt task=mnist task.data-dir=DIR partition=ks ks=0.6 model=resnet18 rounds=5.

    --dry-run with --study DIR, --policy FILE or both writes a page for the data-protection officer. Exit code 1: under
    the policy something is refused.
    """
    officer = study or policy
    resume = str(finished_place(resume, unfinished=True)) if resume == LAST else resume
    if (officer and not dry_run) or (clinics and not officer) or (officer and resume):
        raise ConfigError("--study, --policy and --clinics belong to --dry-run, without --resume; --clinics to either")
    from flwr_replay.api import Where, start

    where = Where(engine, workers, ray_address or "")
    say()
    if officer:
        from flwr_replay.cli.officer import page

        sys.exit(page(options or [], study or "", policy or "", clinics or "", out, as_json))
    if dry_run:
        _forecast(options or [], runs_dir, resume or "", as_json)
        return
    from flwr_replay.report.progress import TerminalDisplay
    from flwr_replay.terminal import wrapped

    result, folder = start(options or [], where, runs_dir, resume or "", TerminalDisplay())
    from flwr_replay.report.summary import summary  # late, as PyTorch is: a wrong option is said before

    answer(result, wrapped(summary(result, folder)), as_json)


def _forecast(options: list[str], runs_dir: str, resume: str, as_json: bool) -> None:
    from flwr_replay.runs.options import resolve

    _, config = resolve(options, runs_dir, resume)
    from flwr_replay.engines.simulate import Simulation
    from flwr_replay.forecast.forecast import forecast, forecast_page
    from flwr_replay.terminal import wrapped

    simulation = Simulation.of(config)
    value, text = (forecast(simulation), "") if as_json else (None, wrapped(forecast_page(simulation)))
    answer(value, text, as_json)


@app.command()
def compare(
    strategies: Annotated[str, typer.Argument(autocompletion=of_methods)],
    options: Options = None,
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            help="What the others are compared with; default: the last method, of one method's values the first.",
        ),
    ] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", help="accuracy, loss, …; default: the task's main metric.")
    ] = None,
    tune: Annotated[
        int | None,
        typer.Option("--tune", help="Tries by Optuna for each method, where an option is lr=0.001..0.1."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", help="Runs at the same time.")] = 1,
    runs_dir: RunsDir = "runs",
    form: Annotated[str, typer.Option("--format", help="text | md | csv | latex | json.")] = "text",
    as_json: AsJson = False,
) -> None:
    """Run several methods on the same seeds, and compare them. Finished runs are not repeated.

    STRATEGIES are names that flwr-replay strategies lists, with commas between. A method's own options follow a colon:
    fedavg,cwt,fedreplay:cut=layer2.

    All other options hold for every method. seeds=3 means the seeds 0, 1 and 2, seeds=5-7 means 5, 6 and 7, and
    seeds=3, with a comma the seed 3. fedreplay.cut=layer2 holds for FedReplay only. lr=0.1|0.3 makes two methods of
    each; so do partition=iid|ks and partition.alpha=0.1|0.5. Of one method this compares the values, seed by seed,
    with the first. lr=auto tries five rates with every method on the first seed, and keeps the best on validation
    examples. lr=0.001..0.1 --tune 20 lets Optuna look for it, in 20 tries with a seed that is not reported.

    Exit code 1: some runs failed. The table says why.
    """
    if form not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}; got {form!r}")
    say()
    from flwr_replay.api import compare_typed
    from flwr_replay.terminal import wrapped

    words = strategies.split(","), options or [], against or "", jobs, Path(runs_dir), metric or "", tune
    comparison = compare_typed(*words)
    print(replace(comparison, text=wrapped(comparison.text)).shown("json" if as_json else form))
    if any("error" in cell for cell in comparison.report["cells"]):
        sys.exit(1)


@app.command()
def study(
    name: Annotated[str, typer.Argument(autocompletion=of_studies)],
    data: Annotated[
        str | None,
        typer.Option("--data", help="The folder with the studies' data sets; retina, boneage, brats: of that set."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option("--only", metavar="SECTION,…", help="Sections of the study, separated by commas; default: all."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed and two rounds of each comparison: does all of it run?")
    ] = False,
    seeds: Annotated[
        str | None, typer.Option("--seeds", help="As of compare: 3, 0-4, or 0,5,7; default: each comparison's own.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all comparisons on the data, count runs and hours, run nothing.")
    ] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="List the study's comparisons, also as --json, and run nothing.")
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", help="Runs at the same time.")] = 1,
    minutes: Annotated[float, typer.Option("--minutes", help="For the attacks on each run, about (leakage).")] = 0.2,
    runs_dir: RunsDir = "runs",
    as_json: AsJson = False,
) -> None:
    """Run one of the studies in simulations/: a paper's table as several comparisons.

    NAME is a study's, such as skew or partitions; --list names its comparisons. Finished runs are not repeated;
    attacks are where --minutes is larger than before. Exit code 1: some runs failed.

    retina, boneage and brats are Qu et al.'s figures and tables on your own copy of these sets: docs/clinical.md.
    """
    if name not in (known := of_studies("")):
        raise ConfigError(f"unknown study {name!r}: {nearest(name, known)}")
    say()
    from flwr_replay.studies.study import comparisons_of, forecast, plan_study, run_study

    if listed:
        about = {comparison.name: comparison.about for comparison in comparisons_of(name)}
        answer(about, "\n".join(f"{comparison}: {text}" for comparison, text in about.items()), as_json)
        return
    comparisons = [comparison for comparison in (only or "").split(",") if comparison]
    if dry_run:
        counted, text = forecast(plan_study(name, data or "", Path(runs_dir), comparisons, quick, seeds or "")[1])
        answer(counted, text, as_json)
        return
    file, whole = run_study(name, data or "", jobs, Path(runs_dir), comparisons, quick, minutes, seeds or "")
    answer({"files": [file, file.with_suffix(".csv")], "whole": whole}, file.read_text(encoding="utf-8"), as_json)
    if not whole:
        sys.exit(1)


@app.command()
def report(
    place: Annotated[str, typer.Argument(metavar="RUN|COMPARISON|STUDY", autocompletion=of_runs)],
    figures: Annotated[
        str, typer.Option("--figures", help="A folder for every figure as SVG and PDF, its numbers as CSV.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Write the page of a RUN, a COMPARISON (their directories), a STUDY (its study-….md) or of RUN's attacks again.

    Runs, comparisons, studies and attacks write it at their end.
    """
    finished = finished_place(place, comparisons=True)
    from flwr_replay.files.atomic import make_folder, read_json
    from flwr_replay.report.pages import write_page

    drawn = make_folder(absolute(figures), "--figures") if figures else None
    if (attacks := finished / "attacks.json").exists():
        from flwr_replay.lab.attack import RESULTS
        from flwr_replay.lab.page import write_page as write_attacks

        page = write_attacks(finished, read_json(attacks, RESULTS), drawn)
    else:
        page = write_page(finished, drawn)
    files = [*([absolute(figures)] if figures else []), page]
    answer({"files": files}, "\n".join(map(str, files)), as_json)


@app.command()
def strategies(
    name: Annotated[str, typer.Argument(metavar="[NAME]", autocompletion=of_methods)] = "",
    as_json: AsJson = False,
) -> None:
    """List the methods: what each does, and what it sends. NAME shows one's source, algorithm and deviations, too."""
    from flwr_replay.config.sources import describe_strategies, document_of
    from flwr_replay.terminal import wrapped

    if name:
        answer({name: document_of(name)}, wrapped(document_of(name)), as_json)
        return
    described = describe_strategies()
    texts = (wrapped(f"{name}\n  {idea}\n  Travels: {travels}\n") for name, (idea, travels) in described.items())
    answer(described, "\n".join(texts), as_json)


@app.command()
def doctor(
    clinic: Annotated[
        str | None, typer.Option("--clinic", help="A clinic's folder of `deploy init`: will it work?")
    ] = None,
    deployment: Annotated[
        str | None, typer.Option("--deployment", help="The coordinator's folder of `deploy init`: what is wrong?")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: versions, ports, write access, Ray, GPU. With --clinic: its data, policy, key, server.

    With --deployment: certificates, keys, SuperLink, SuperNodes, runs, disk. Exit code 1: something is wrong.
    """
    if clinic and deployment:
        raise ConfigError("--clinic and --deployment are two questions; got both: ask them one after another")
    if deployment:
        from flwr_replay.deploy.coordinator import examine_coordinator

        healthy, text = examine_coordinator(absolute(deployment))
    elif clinic:
        from flwr_replay.deploy.clinic import examine_clinic

        healthy, text = examine_clinic(absolute(clinic))
    else:
        from flwr_replay.cli.doctor import examine

        healthy, text = examine()
    answer({"healthy": healthy, "lines": text.splitlines()}, text, as_json)
    sys.exit(0 if healthy else 1)


for command in (options, predict, export, watch, rehearse):
    app.command()(command)


@cache
def _command() -> Command:
    """Return all commands; Typer itself builds them anew in every call, which takes longer than many of them."""
    return get_command(app)


def _instead(option: str) -> str:
    """Say which commands have an option that this one has not; else how options of a run are written."""
    commands = getattr(_command(), "commands", {})
    having = [name for name, command in commands.items() if any(option in each.opts for each in command.params)]
    if having:
        return f"it is one of flwr-replay {', '.join(having)}"
    return f"options of a run have no hyphens in front: {option.lstrip('-')}=…"


def main() -> None:
    """Run the command line; a user's mistake is reported in one line, with exit code 2."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # clean up, as after Ctrl-C
    try:
        _refuse_unclear(sys.argv[1:])
        with users_code(FlwrReplayError):
            code = _command()(standalone_mode=False)
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except Abort as error:  # a RuntimeError
        if isinstance(error.__cause__, KeyboardInterrupt):  # Ctrl-C in a command, not at a question
            sys.exit(130)
        print("nothing was changed", file=sys.stderr)
        sys.exit(1)
    except (FlwrReplayError, OSError, ClickException) as error:
        text = error.format_message() if isinstance(error, ClickException) else str(error)
        text += hint(error) if isinstance(error, MissingParameter) else ""
        if isinstance(error, NoSuchOption) and error.ctx and any(p.name == "options" for p in error.ctx.command.params):
            text = f"{text.rstrip('.')}; {_instead(error.option_name)}"
        for fault in error.args if isinstance(error, FlwrReplayError) else (text,):
            print(f"error: {TWICE.sub('', one_line(fault))}", file=sys.stderr)
        sys.exit(2)
    except (MemoryError, RuntimeError) as error:
        if str(error) == NO_HOME:
            print("error: a path must begin with ~ or ~USER only where there is such a user's home", file=sys.stderr)
            sys.exit(2)
        if not isinstance(error, MemoryError) and not NO_MEMORY.search(str(error)):
            raise
        text = one_line(error) or "allocation failed"
        print(
            f"error: this machine has too little memory ({text[:200]}): choose smaller models, images or batches",
            file=sys.stderr,
        )
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _refuse_unclear(words: Sequence[str]) -> None:
    """Refuse an empty value, such as from an unset shell variable, and numbers in other scripts' digits."""
    for before, word in pairwise(["", *words]):
        option, equals, value = word.partition("=") if word.startswith("--") else (before, "=", word)
        name = option if option.startswith("--") else "an argument"
        if equals and not value.replace(",", " ").strip():
            raise ConfigError(f"{name} must not be empty; got {value!r}: give a value or leave it out")
        if OTHER_DIGITS.fullmatch(value):
            raise ConfigError(f"{name} must be written with the digits 0 to 9; got {value!r}: of a file, begin with ./")
