"""Text and tables that fit the terminal: a table that does not is several, which repeat the first column."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from importlib.util import find_spec
from shutil import get_terminal_size
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["command", "fitted", "installing", "wrapped"]

UV = "UV_RUN_RECURSION_DEPTH"  # `uv run` sets it for what it runs
UNBOUNDED = 10_000  # columns where there is no terminal, so that a file has the whole table


def command() -> str:
    """Return how this user starts flwr-replay: through uv, which tells its programs so, or by its name."""
    return "uv run flwr-replay" if os.environ.get(UV) else "flwr-replay"


def installing(extra: str) -> str:
    """Return how this user installs an extra."""
    if os.environ.get(UV):
        return f"uv run --extra {extra} flwr-replay … in place of uv run flwr-replay …"
    if not find_spec("pip"):  # an environment that uv made
        return f"uv sync --inexact --extra {extra}, in the checkout"
    return f"pip install 'flwr-replay[{extra}]'"


def fitted(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table as text, without colours.

    Parameters
    ----------
    title : str
        Stands above the first table.
    columns : sequence of str
        The headings. The first column is on the left, all others are aligned on the right.
    rows : sequence of sequences of str
        As many texts as there are headings.
    """
    from rich.console import Console
    from rich.table import Table

    terminal = _columns()
    console = Console(file=io.StringIO(), width=UNBOUNDED, color_system=None, force_terminal=False)

    def drawn(places: Sequence[int], title: str) -> Table:
        table = Table(title=title)
        for place in places:
            table.add_column(columns[place], justify="right" if place else "left", overflow="fold")
        for row in rows:
            table.add_row(*(row[place] for place in places))
        return table

    groups = [[0]]
    for place in range(1, len(columns)):
        wider = [*groups[-1], place]
        if len(wider) > 2 and console.measure(drawn(wider, "")).maximum > terminal:
            groups.append([0, place])
        else:
            groups[-1] = wider
    with console.capture() as capture:
        for places in groups:
            table = drawn(places, "" if places is not groups[0] else title)
            console.print(table, width=min(console.measure(table).maximum, terminal))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def wrapped(text: str, columns: int = 0) -> str:
    """Break lines between words where they are wider than so many columns; 0: than the terminal."""
    return "\n".join(
        fill(line, columns or _columns(), break_long_words=False, break_on_hyphens=False) for line in text.split("\n")
    )


def _columns() -> int:
    return get_terminal_size((UNBOUNDED, 0)).columns
