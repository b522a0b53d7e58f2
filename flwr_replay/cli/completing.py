"""What a shell completes: options and their values, methods, studies, runs; without PyTorch, in half a second."""

import re
from collections.abc import Iterable
from importlib import util
from pathlib import Path
from pkgutil import iter_modules

from click import Context

from flwr_replay.config.catalogue import GROUPS, choices

__all__ = ["of_groups", "of_methods", "of_options", "of_runs", "of_studies"]

WORDS = re.compile(r"(?:^|(?<=[.:;] ))([\w-]+)(?=(: |$))")  # that may be the first of listed values


def of_options(ctx: Context, incomplete: str) -> list[str]:
    """Complete `name=value`; a bash that divides words at = gets the value alone.

    A name that is the only one comes with its values, so that no shell ends the word after the =.
    """
    typed = list(ctx.params.get("options") or ())
    if not incomplete and typed and "=" not in typed[-1]:  # Click leaves out a last =
        return _values(typed[-1])
    if typed[-1:] == ["="] and len(typed) > 1:
        return _starting(incomplete, _values(typed[-2]))
    key, equals, start = incomplete.partition("=")
    names = [key] if equals else _starting(key, _names())
    if len(names) > 1:
        return [f"{name}=" for name in names]
    return [f"{name}={value}" for name in names for value in _starting(start, _values(name))]


def of_methods(incomplete: str) -> list[str]:
    """Complete the last of several methods, with commas between."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _starting(last, choices("strategy"))]


def of_groups(incomplete: str) -> list[str]:
    """Complete what `options` explains: a group, a method's own options, one option."""
    from flwr_replay.forecast.described import described

    return _starting(incomplete, [*described(), *_names()])


def of_studies(incomplete: str) -> list[str]:
    """Complete a study's name."""
    spec = util.find_spec("flwr_replay.simulations")
    places = spec.submodule_search_locations if spec else None
    return _starting(incomplete, [module.name for module in iter_modules(places or [])])


def of_runs(incomplete: str) -> list[str]:
    """Complete the directories of runs and comparisons below runs/, or `last`; else the shell completes files."""
    folders = (file.parent for pattern in ("*", "*/*") for file in Path("runs").glob(f"{pattern}/config.yaml"))
    return _starting(incomplete, ["last", *map(str, folders)])


def _starting(start: str, words: Iterable[str]) -> list[str]:
    return sorted({word for word in words if word.startswith(start)})


def _names() -> list[str]:
    from flwr_replay.forecast.described import described

    options = [option.name for group in described().values() for option in group.options]
    return [*GROUPS, *options, *(name.rpartition(".")[2] for name in options)]


def _values(key: str) -> list[str]:
    from flwr_replay.forecast.described import described

    if key in GROUPS:
        return sorted(choices(key))
    name, known = key.replace("_", "-"), list[str]()
    for option in (option for group in described().values() for option in group.options):
        if name in (option.name, option.name.rpartition(".")[2]):
            first, *others = ("true | false" if option.type == "true, false" else option.text).split(" | ")
            begun = [word for word, then in WORDS.findall(first) if then or all(": " not in o for o in others)]
            listed = [*begun[-1:], *(re.split(r"[:, ]", other)[0] for other in others)] if others else []
            known += [*listed, *filter(None, option.default)]
    return known
