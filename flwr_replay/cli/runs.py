"""flwr-replay runs list | show | compare | plot | clean, watch, predict, export: what is done with runs."""

from __future__ import annotations

from textwrap import indent
from typing import TYPE_CHECKING, Annotated

import typer

from flwr_replay.cli.completing import of_runs
from flwr_replay.cli.places import LAST, AsJson, RunsDir, absolute, answer, finished_place, runs_folder, say

if TYPE_CHECKING:
    from flwr_replay.api import Run

__all__ = ["app", "export", "predict", "watch"]

PICTURES = (".png", ".pdf", ".svg")

app = typer.Typer(
    help="List, show, compare, plot and clean finished runs. RUN is a run directory, or `last`: the newest in runs/.",
    no_args_is_help=True,
)

Places = Annotated[list[str], typer.Argument(metavar="RUN…", autocompletion=of_runs)]
# Click 8.5 drops the help of Typer's arguments, so docstrings have it
Place = Annotated[str, typer.Argument(metavar="RUN", autocompletion=of_runs)]
Institution = Annotated[str, typer.Option("--institution", help="Whose model, where each institution has its own.")]
Best = Annotated[
    bool, typer.Option("--best", help="The round that was best by its validation examples, in place of the last.")
]


@app.command("list")
def list_runs(root: RunsDir = "runs", as_json: AsJson = False) -> None:
    """List all runs, also those of comparisons: state, metric, bytes on the disk."""
    from flwr_replay.errors import DamagedError, RunError
    from flwr_replay.report.progress import shown_bytes
    from flwr_replay.runs.listing import listed, runs_in
    from flwr_replay.terminal import wrapped

    place, rows, lines = runs_folder(root), list[dict[str, object]](), list[str]()
    for folder in runs_in(place):
        try:
            run = listed(folder)
            state = f"{run.metric or run.state}  {shown_bytes(run.bytes)}"
            about: dict[str, object] = {"state": run.state, "metric": run.metric, "bytes": run.bytes}
        except RunError as error:  # a damaged result hides no other run
            state = f"{'damaged: ' * isinstance(error, DamagedError)}{error}"
            about = {"state": state, "metric": "", "bytes": None}
        rows.append({"run": folder, **about})
        lines += [str(folder.relative_to(place)), indent(wrapped(state), "  ")]
    answer(rows, "\n".join(lines), as_json)


@app.command()
def show(places: Places, as_json: AsJson = False) -> None:
    """Print the summaries of finished runs again."""
    folders = [finished_place(place, unfinished=True) for place in places]
    from flwr_replay.report.summary import summary
    from flwr_replay.runs.listing import listed
    from flwr_replay.terminal import wrapped

    shown = [listed(folder) for folder in folders]
    texts = [wrapped(summary(r.result, r.folder)) if r.result else f"{r.folder}: {r.state}" for r in shown]
    values = [{"run": run.folder, "state": run.state, "result": run.result} for run in shown]
    answer(values, "\n".join(texts), as_json)


@app.command("compare")
def compare_runs(places: Places, as_json: AsJson = False) -> None:
    """Print the metrics of finished runs side by side. For differences with intervals, use flwr-replay compare."""
    from flwr_replay.report.metrics import VALIDATION
    from flwr_replay.runs.listing import same_bits
    from flwr_replay.terminal import fitted

    results = [(run.folder.name, run.result) for run in _finished(places)]
    all_names = dict.fromkeys(name for _, result in results for name in result["final"]["global"])
    names = [name for name in all_names if not name.startswith(VALIDATION)]
    rows = []
    for folder, result in results:
        final = result["final"]["global"]
        values = [f"{final[name]:.4f}" if name in final else "" for name in names]
        rows.append([folder, result["strategy"], result["task"], str(result["seed"]), *values])
    lines = [fitted("", ["run", "method", "task", "seed", *names], rows)]
    tasks = dict.fromkeys(result["task"] for _, result in results)
    if len(tasks) > 1:
        lines.append(f"different tasks ({', '.join(tasks)}): these metrics cannot be compared")
    elif len(places) > 1:
        lines.append(same_bits([finished_place(place) for place in places]))
    kept = ("strategy", "task", "seed", "final")
    told = [{"run": run, **{key: result[key] for key in kept}} for run, result in results]
    answer(told, "\n".join(lines), as_json)


@app.command()
def plot(
    places: Places,
    metric: Annotated[str, typer.Option("--metric", help="accuracy, loss, …; default: the task's main metric.")] = "",
    out: Annotated[str, typer.Option("--out", help="The picture to write: .png, .pdf or .svg.")] = "runs.png",
    as_json: AsJson = False,
) -> None:
    """Draw a metric of finished runs by round: of one run by institution, of several a line for each."""
    import io

    from flwr_replay.api import plot as draw
    from flwr_replay.errors import ConfigError
    from flwr_replay.files.atomic import write_atomic

    file = absolute(out)
    if file.suffix not in PICTURES:
        raise ConfigError(f"--out must end in {', '.join(PICTURES)}; got {out!r}")
    picture = io.BytesIO()
    draw(_finished(places), metric).savefig(picture, format=file.suffix[1:], dpi=150)
    write_atomic(file, picture.getvalue())
    answer({"files": [file]}, str(file), as_json)


@app.command()
def clean(
    places: Places,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete what finished runs no longer need: checkpoints, uploads, recorded messages. Results and models stay.

    RUN may be a comparison's directory, and means all runs in it. Delete whole runs by rm -r.
    """
    from flwr_replay.report.progress import shown_bytes
    from flwr_replay.runs.listing import clean, spare

    folders = [finished_place(place, unfinished=True) for place in places]
    deletable = spare(folders)
    text = "\n".join(f"{place}  {shown_bytes(count)}" for place, count in deletable) or "nothing to delete"
    answer({"deleted": {str(place): count for place, count in deletable}}, text, as_json)
    if deletable and not yes:
        total = shown_bytes(sum(count for _, count in deletable))
        typer.confirm(f"Delete these, {total}? The runs cannot be made longer then", abort=True)
    clean(folders)


def watch(place: Place, as_json: AsJson = False) -> None:
    """Follow a run that another process works on, until it has finished.

    RUN is a run directory, or `last`: the newest in runs/. With --json each exchange is one line.
    """
    from flwr_replay.runs.listing import watch

    for ended in watch(finished_place(place, unfinished=True)):
        answer(ended._asdict(), str(ended), as_json, indent=None)


def predict(
    place: Place,
    images: Annotated[str, typer.Argument(metavar="IMAGES")],
    out: Annotated[str, typer.Option("--out", help="The CSV file to write; default: print.")] = "",
    institution: Institution = "",
    run: Annotated[str, typer.Option("--run", help="In a state directory, the run's id; default: the last.")] = "",
    best: Best = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out, and list, what cannot be read.")] = False,
    as_json: AsJson = False,
) -> None:
    """Predict the labels of images with the model of a finished run, as CSV with probabilities.

    RUN is a run directory, `last` for the newest in runs/, or an institution's state directory. IMAGES is a folder of
    images, a CSV file with a column image, or one image. With a column label the answer says which are right.
    """
    source = absolute(images)
    folder = finished_place(place)
    from flwr_replay.files.atomic import write_atomic
    from flwr_replay.finished.predict import images_in, predictions, right_in, rows_of
    from flwr_replay.finished.trained import load_model

    if place == LAST:
        say(f"the model of {folder}")
    model, rows = load_model(folder, institution, run, best=best), images_in(source)
    left_out: list[str] = []
    text = predictions(model, rows, source if source.is_dir() else source.parent, left_out if skip_bad else None)
    for line in left_out:
        say(f"left out: {line}")
    if left_out:
        say(f"{len(left_out):,} of {len(rows):,} images are left out")
    if out:
        write_atomic(absolute(out), text)
    shown = f"{len(rows) - len(left_out)} predictions{right_in(text)}: {out}" if out else text.removesuffix("\n")
    answer({"predictions": rows_of(text), "left-out": left_out, "out": out}, shown, as_json)


def export(
    place: Place,
    form: Annotated[str, typer.Option("--format", help="torch (torch.export) | onnx.")] = "torch",
    out: Annotated[str, typer.Option("--out", help="The file to write.")] = "model",
    institution: Institution = "",
    best: Best = False,
    as_json: AsJson = False,
) -> None:
    """Write the model of a finished run as one file for other programs, and a model card beside it.

    RUN is a run directory, or `last` for the newest in runs/.
    """
    folder = finished_place(place)
    from flwr_replay.finished.export import card
    from flwr_replay.finished.export import export as write
    from flwr_replay.finished.trained import load_model

    model = load_model(folder, institution, best=best)
    text = card(folder, model, institution, best)
    files = write(model, form, absolute(out), text)
    answer({"files": files}, "\n".join(map(str, files)), as_json)


def _finished(places: list[str]) -> list[Run]:
    """Open runs, and refuse one that has not finished."""
    folders = [finished_place(place) for place in places]
    from flwr_replay.api import Run
    from flwr_replay.runs.listing import listed

    return [Run(run.folder, run.result) for run in map(listed, folders) if run.result is not None]
