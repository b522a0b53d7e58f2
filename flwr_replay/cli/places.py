"""What commands share: options of their own, and the folders that they are given, one of which may be `last`."""

import json
import re
import shlex
import sys
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated

import typer
from click.exceptions import MissingParameter

from flwr_replay.cli.completing import of_options
from flwr_replay.errors import RunError

__all__ = ["LAST", "AsJson", "Options", "RunsDir", "absolute", "answer", "finished_place", "hint", "runs_folder", "say"]

LAST = "last"  # what was worked on last in runs/
ROOT = "runs"  # where commands put their runs unless told otherwise

Options = Annotated[list[str] | None, typer.Argument(metavar="[OPTION=VALUE]…", autocompletion=of_options)]
RunsDir = Annotated[str, typer.Option("--runs-dir", help="The folder for run directories.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON; its keys stay.")]  # of every command


def say(text: str = "loading …") -> None:
    """Tell the user what is done, beside the result."""
    print(text, file=sys.stderr, flush=True)


def answer(value: object, text: str, as_json: bool, indent: int | None = 2) -> None:
    """Print what a command has found: with --json its value, dataclasses and paths too, else its text."""
    print(json.dumps(value, indent=indent, ensure_ascii=False, default=_plain) if as_json else text, flush=True)


def _plain(value: object) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def hint(error: MissingParameter) -> str:
    """Say what is missing: by its help, else by the sentence that names it in that of its command or group."""
    assert error.param
    assert error.ctx
    helps = " ".join(context.command.help or "" for context in (error.ctx, error.ctx.parent) if context)
    name = re.findall(r"\w+", error.param.make_metavar(error.ctx))[0]
    naming = [text for text in re.split(r"(?<=\.)\s+", helps) if re.search(rf"\b{name}\b", text)]
    told = getattr(error.param, "help", "") or max(naming, key=lambda text: f"{name} is" in text)
    return f" {' '.join(told.split())} `{error.ctx.command_path} --help` says more."


def absolute(place: str) -> Path:
    """Return a path that no longer depends on the working directory; it need not exist."""
    return Path(place).expanduser().absolute()


def runs_folder(place: str) -> Path:
    """Return the folder of runs; a RunError if it does not exist."""
    folder = absolute(place)
    if not folder.exists():
        raise RunError(
            f"there is no folder {folder}: `flwr-replay run` makes runs/ here, or give another by --runs-dir"
        )
    return folder


def finished_place(place: str, comparisons: bool = False, unfinished: bool = False) -> Path:
    """Return what a run, a comparison, a study or an institution has left; `last` is the newest in runs/.

    Raises
    ------
    RunError
        If it does not exist, or `last` is a comparison where only a run has what is wanted (not `comparisons`), or a
        run has not finished (not `unfinished`).
    """
    from flwr_replay.runs.listing import newest_in
    from flwr_replay.terminal import command

    if place == LAST and not Path(LAST).exists():
        if not Path(ROOT).exists():
            raise RunError(f"{LAST} is the newest in {ROOT}/, and there is none here: give the directory of a run")
        folder = newest_in(absolute(ROOT), comparisons)
    elif not (folder := absolute(place)).exists():
        raise RunError(
            f"there is no {folder}: give the directory of a run, which `flwr-replay runs list` names, or {LAST} for "
            "the newest in runs/"
        )
    if not unfinished and (folder / "config.yaml").exists() and not (folder / "result.json").exists():
        raise RunError(
            f"{folder} has not finished: go on by `{command()} run --resume {shlex.quote(str(folder))}`, with a "
            "comparison by its command again, in a deployment by run.sh with resume"
        )
    return folder
