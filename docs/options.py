"""Write docs/options.md from `conf/` and the dataclasses: `python docs/options.py > docs/options.md`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from flwr_replay.config.catalogue import choices, conf_path
from flwr_replay.forecast.described import Described, Option, comments, described, key, read, shown

SEVERAL = 3  # methods that have an option in the same words: it is told once
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

**A run leaves** a directory under `runs/`, after `flwr run` under `~/.flwr-replay/runs`: its options, metrics, ledger,
models, result and `report.html`. What simulated institutions keep lies under `~/.flwr-replay/state`.
`$FLWR_REPLAY_HOME` is another place for both.

**Resuming.** `flwr-replay run --resume DIR` goes on where the run stopped. On a CPU it ends with the same bits, except
under `dp=`, whose noise is secret. `rounds=` with it makes the run longer.

`flwr-replay COMMAND --help` lists a command's flags. `compare` takes `seeds=` besides: `seeds=31` is 31 seeds, 0 to 30;
`seeds=31,` is seed 31 alone. Commands exit with 0; with 1 if some of several runs failed; with 2 after a mistake,
which is said in one line.
"""


def escaped(text: str) -> str:
    """Keep Markdown from reading `|` as a column, `<class>` as HTML and `[a][b]` as a link."""
    return text.replace("|", "\\|").replace("<", "\\<").replace("][", "]\\[")


def table(options: Sequence[Option]) -> str:
    """Return a table of options: name, default, text."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    lines += [f"| `{one.name}` | {default(one.default)} | {escaped(one.text)} |" for one in options]
    return "\n".join(lines)


def default(values: Mapping[str, list[str]]) -> str:
    """Return a default: one value, or up to three with the choices that have them."""
    if len(values) == 1:
        return f"`{next(iter(values))}`" if next(iter(values)) else "empty"
    if len(values) > 3:
        return "by the choice"
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


def page() -> str:
    """Return the whole page."""
    parts, methods = [HEAD], []
    sections = described()
    of_methods = [option for name, one in sections.items() if name.startswith("strategy=") for option in one.options]
    counts = Counter((option.name, option.text) for option in of_methods)
    common = {option.name: option for option in of_methods if counts[option.name, option.text] >= SEVERAL}
    for name, one in sections.items():
        if name.startswith("strategy="):
            rows = [option for option in one.options if counts[option.name, option.text] < SEVERAL]
            own = table(rows) if rows else ""
            methods += [f"### `{name}`", one.title, own]
        elif name != "strategy":
            parts += [f"## {one.title}", section(name, one)]
    parts += [
        "## Methods",
        "Default: `strategy=fedreplay`. Several methods have:",
        table(list(common.values())),
        *methods,
    ]
    parts += ["## Presets", "Default: `preset=quick`."] + [preset(name) for name in choices("preset")]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


if __name__ == "__main__":
    print(page(), end="")
