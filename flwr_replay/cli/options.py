"""flwr-replay options: every option of a run, its values, its default and what it means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from flwr_replay.cli.completing import of_groups
from flwr_replay.cli.places import AsJson, answer
from flwr_replay.errors import ConfigError, nearest

if TYPE_CHECKING:
    from flwr_replay.forecast.described import Described, Option

__all__ = ["options"]


def options(
    group: Annotated[str, typer.Argument(metavar="[GROUP]", autocompletion=of_groups)] = "",
    as_json: AsJson = False,
) -> None:
    """Explain the options of a run: their values, defaults and meaning. Without GROUP: what groups there are.

    GROUP is task, training, strategy=fedreplay, …; or one option: ks, partition.ks.
    """
    from flwr_replay.forecast.described import described

    known = described()
    if group and group not in known:
        if matches := _named(known, group):
            lines = [line for place, option in matches for line in _option(option, place)]
            answer([option for _, option in matches], "\n".join(lines), as_json)
            return
        names = [name for each in known.values() for o in each.options for name in (o.name, o.name.rpartition(".")[2])]
        raise ConfigError(f"no group and no option is called {group!r}: {nearest(group, [*known, *names])}")
    lines = list(_explained(group, known[group]) if group else _overview(known))
    if any("docs/" in line for line in lines):
        lines += ["", "docs/… is a page in flwr-replay's repository."]
    answer(known[group] if group else known, "\n".join(lines), as_json)


def _overview(known: Mapping[str, Described]) -> Iterator[str]:
    for name, group in known.items():
        if "=" not in name:
            yield f"{name:<10} {group.title}"
            if group.choices:
                yield from _filled(", ".join(group.choices), 4)
    yield from ("", "GROUP explains a group, strategy=fedreplay a method's own options.")


def _explained(name: str, group: Described) -> Iterator[str]:
    yield from _filled(group.title)
    for choice, text in (group.choices or {}).items():
        yield ""
        yield f"{name}={choice}{'  (default)' if choice == group.chosen else ''}"
        yield from _filled(text, 4)
    for option in group.options:
        yield from _option(option)
    if name == "strategy":
        yield from ("", "flwr-replay options strategy=fedreplay explains a method's own options.")
    elif not group.options:
        yield from ("", "No options of its own.")


def _named(known: Mapping[str, Described], name: str) -> list[tuple[str, Option]]:
    """Find one option by its long or its short name, with its group; some groups have options of the same name."""
    name = name.replace("_", "-")
    return [(g, o) for g, group in known.items() for o in group.options if name in (o.name, o.name.rpartition(".")[2])]


def _option(option: Option, group: str = "") -> Iterator[str]:
    yield ""
    yield f"{option.name}  ({option.type})" + (f"  of {group}" if "=" in group else "")
    yield from _filled(f"{option.text} ({option.only})" if option.only else option.text, 4)
    several = len(option.default) > 1
    values = [
        (value or "empty") + (f" ({', '.join(having)})" if several else "") for value, having in option.default.items()
    ]
    yield from _filled(f"default: {'; '.join(values)}", 4)


def _filled(text: str, indent: int = 0) -> list[str]:
    from shutil import get_terminal_size
    from textwrap import wrap

    width, space = min(get_terminal_size().columns, 100), " " * indent
    return wrap(text, width, initial_indent=space, subsequent_indent=space, break_on_hyphens=False)
