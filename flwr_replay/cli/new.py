"""flwr-replay new: a strategy, a Flower app, a study, a partition or an attack of your own, as files that run."""

import keyword
import re
from importlib import util
from pathlib import Path
from typing import Annotated

import typer

from flwr_replay.cli.places import AsJson, absolute, answer
from flwr_replay.config.catalogue import choices
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.files.atomic import new_folder

__all__ = ["app"]

TEMPLATES = Path(__file__).parent.parent / "templates"
NAME = re.compile(r"[a-z][a-z0-9]{0,39}")  # it becomes a folder, a module, a class and a word of a shell
# What the templates call themselves.
CALLED = {"strategy": "mymethod", "app": "myapp", "study": "mystudy", "partition": "mypartition", "attack": "myattack"}
KINDS = {
    "strategy": "Write a package with a strategy: both halves, payload, options and a test. Installed, it is "
    "strategy=NAME.",
    "app": "Write a Flower app with your own model, data and training, and a strategy from here.",
    "study": "Write a study: the options that all agree on, with your own model and data.",
    "partition": "Write a partition: a function that deals the examples, and its test. It is partition=NAME:deal.",
    "attack": "Write an attack on recorded messages, and its test. It is privacy attack RUN --attack NAME:attack.",
}
NEXT = "README.md in it says how to install and try it"

app = typer.Typer(
    help="Write a strategy, a Flower app, a study, a partition or an attack of your own, which runs as written. NAME: "
    "small letters, digits.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME")]
Into = Annotated[str, typer.Option("--into", help="The folder in which the new one is made.")]


def _command(kind: str) -> None:
    @app.command(kind, help=KINDS[kind])
    def write(name: Name, into: Into = ".", as_json: AsJson = False) -> None:
        place = _write(kind, name, into)
        answer({"folder": place}, f"{place}\n{NEXT}", as_json)


for kind in KINDS:
    _command(kind)


def _write(kind: str, name: str, into: str) -> Path:
    """Copy a template under another name, and return its folder, which appears whole or not at all."""
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(f"the name must be of small letters and digits, a letter first; got {name!r}")
    if kind == "strategy" and name in choices("strategy"):
        raise ConfigError(f"there is a strategy {name} already: choose another name")
    if kind != "app" and util.find_spec(name):
        raise ConfigError(f"a Python package or module is called {name} already: choose another name")
    folder = absolute(into)
    place = folder / name
    if not folder.is_dir():
        raise RunError(f"--into must be a folder that exists; got {folder}")
    if place.exists():
        raise RunError(f"the folder must be new; {place} exists: choose another name, or --into")
    words = {CALLED[kind]: name, "MyMethod": name.capitalize()}
    with new_folder(place) as new:
        for source in sorted((TEMPLATES / kind).rglob("*")):
            if source.is_file() and "__pycache__" not in source.parts:
                inside, text = str(source.relative_to(TEMPLATES / kind)), source.read_text(encoding="utf-8")
                for old, new_word in words.items():
                    inside, text = inside.replace(old, new_word), text.replace(old, new_word)
                (new / inside).parent.mkdir(parents=True, exist_ok=True)
                (new / inside).write_text(text, encoding="utf-8")
    return place
