"""Write docs/options.md from `conf/` and the dataclasses: `python docs/options.py > docs/options.md`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click
import typer

from flwr_replay.cli.main import app
from flwr_replay.config.catalogue import choices, conf_path
from flwr_replay.forecast.described import Described, Option, comments, described, key, read, shown

HEAD = """# Options

Every option of a run, its default and its meaning. This page is written by `python docs/options.py > docs/options.md`
from `conf/` and the dataclasses that check the values; a test compares the two. `flwr-replay options` says the same in
a terminal.

- An option is written `key=value`. A hyphen in a key is an underscore.
- The section may be left out where the name is unique: `cut=layer2` is `strategy.cut=layer2`. Options of `generator`
  and `prior` are written in full where another section has the same name.
- A group is chosen (`task=mnist`), all else is set (`rounds=5`). A preset changes some defaults for some tasks.
- What you set wins over the preset, and the preset over `conf/config.yaml`.
- A list is written `[a,b]`; text with spaces or commas goes into quotes: `"task.data-dir='/my data'"`.
- In a study file for `flwr run` the keys of `[tool.flwr.app.config]` hold the same options; all others go into
  `overrides`.

Further on: data sets in [data.md](data.md), replay in [replay.md](replay.md), ProxyFL and FML in
[proxyfl.md](proxyfl.md), differential privacy in [privacy.md](privacy.md).

**What a run leaves** is a directory under `runs/`: `config.yaml`, `metrics.jsonl`, `ledger.jsonl`, checkpoints,
`models/`, `result.json`, and `report.html`, one page of what happened; `flwr-replay report DIR` writes the page of
a run, a comparison or a study again. A run that was started with `flwr run` has it under `~/.flwr-replay/runs`. What
simulated institutions keep between rounds lies under `~/.flwr-replay/state`. `$FLWR_REPLAY_HOME` is another
place for both.

**Resuming.** `flwr-replay run --resume DIR` goes on where the run stopped and, on a CPU, ends with the same bits. Under
`dp=` the bits differ, since the noise is secret. `rounds=` with it makes the run longer, and none shorter
than it is.

## Commands

`flwr-replay compare` takes `seeds=` besides: `seeds=31` is 31 seeds, 0 to 30, and `seeds=31,` is seed 31 alone.
Commands exit with 0; with 1 if some runs of several failed;
with 2 after a mistake of the user's, which is said in one line.
"""


def escaped(text: str) -> str:
    """Keep Markdown from reading `|` as a column, `<class>` as HTML and `[a][b]` as a link."""
    return text.replace("|", "\\|").replace("<", "\\<").replace("][", "]\\[")


def table(options: Sequence[Option]) -> str:
    """Return a table of options: name, type, default, text."""
    lines = ["| option | type | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{one.name}` | {one.type} | {default(one.default)} | {escaped(one.text)} |" for one in options]
    return "\n".join(lines)


def default(values: Mapping[str, list[str]]) -> str:
    """Return a default: one value, or each with the choices that have it."""
    if len(values) == 1:
        return f"`{next(iter(values))}`" if next(iter(values)) else "empty"
    return "; ".join(f"{f'`{value}`' if value else 'empty'} ({', '.join(names)})" for value, names in values.items())


def section(name: str, one: Described) -> str:
    """Describe a group: its default, its choices, its options."""
    parts = [f"Default: `{name}={one.chosen}`."] if one.chosen else []
    if one.choices:
        parts.append("\n".join(f"- `{name}={choice}`: {escaped(text)}" for choice, text in one.choices.items()))
    return "\n\n".join([*parts, table(one.options)])


def preset(name: str) -> str:
    """Describe what a preset changes, task by task."""
    lines = []
    for path in sorted(conf_path("preset", name).glob("*.yaml")):
        values = read(path)
        chosen = []
        for one in values.pop("defaults", []):
            chosen += (
                [f"as {one}"]
                if isinstance(one, str)
                else [f"`{group_name.removeprefix('override /')}={choice}`" for group_name, choice in one.items()]
            )
        by_strategy = values.pop("by_strategy", {})
        for option, value in values.items():
            inner = {f"{option}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {option: value}
            chosen += [f"`{key(full)}={shown(v)}`" for full, v in inner.items()]
        task = "every other task" if path.stem == "default" else f"`task={path.stem}`"
        guessed = [f"`{key(option)}`" for option, text in comments(path).items() if text.startswith("not given in")]
        own = f" Our choice, since the paper gives none: {', '.join(guessed)}." if guessed else ""
        lines.append(f"- {task}: {', '.join(chosen) or 'nothing'}. {comments(path)['']}{own}")
        for method, options in by_strategy.items():
            told = ", ".join(f"`{key(full)}={shown(v)}`" for full, v in options.items())
            lines.append(f"    - `{method}`: {told}")
    return f"### `preset={name}`\n\n" + "\n".join(lines)


def commands() -> str:
    """Describe the flags of every command, as the parser knows them."""
    lines = ["| command | flag | meaning |", "|---|---|---|"]

    def walk(command: click.Command, path: str) -> None:
        if isinstance(command, click.Group):
            for name, inner in command.commands.items():
                walk(inner, f"{path} {name}")
            return
        flags = [one for one in command.params if isinstance(one, click.Option) and one.name != "help"]
        for flag in flags:
            lines.append(f"| `{path}` | `{flag.opts[0]}` | {escaped(flag.help or '')} |")
        if not flags:
            lines.append(f"| `{path}` | none | |")

    walk(typer.main.get_command(app), "flwr-replay")
    return "\n".join(lines)


def page() -> str:
    """Return the whole page."""
    parts, methods = [HEAD, commands()], []
    for name, one in described().items():
        if name.startswith("strategy="):
            own = table(one.options) if one.options else "No options of its own."
            methods += [f"### `{name}`", one.title, own]
        elif name != "strategy":
            parts += [f"## {one.title}", section(name, one)]
    parts += ["## Methods", "Default: `strategy=fedreplay`.", *methods]
    parts += ["## Presets", "Default: `preset=quick`."] + [preset(name) for name in choices("preset")]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    print(page(), end="")
