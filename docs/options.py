"""Write docs/options.md from `conf/` and the dataclasses: `python docs/options.py > docs/options.md`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import click
import typer
import yaml

from flwr_replay.cli.main import app
from flwr_replay.config import RunConfig
from flwr_replay.config.compose import SECTIONS, choices, compose, conf_dir, load_generator, load_strategy
from flwr_replay.runs.forecast import describe_strategies

HEAD = """# Options

Every option of a run, its default and its meaning. This page is written by `python docs/options.py > docs/options.md`
from `conf/` and the dataclasses that check the values; a test compares the two.

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

**Resuming.** `flwr-replay run --resume DIR` goes on where the run stopped and ends with the same bits. Under
`dp=` the bits differ, since the noise is secret. `rounds=` with it makes the run longer.

## Commands

`flwr-replay compare` takes `seeds=` as an option besides. Commands exit with 0; with 1 if some runs of several failed;
with 2 after a mistake of the user's, which is said in one line.
"""
TITLES = {
    "task": "Data set and task",
    "partition": "How a data set is dealt to simulated institutions",
    "model": "Model",
    "training": "Training",
    "replay": "Generative replay",
    "generator": "Generators",
    "prior": "Prior over the generator's codes",
    "privacy": "Differential privacy",
}
TYPES = {"str": "text", "int": "whole number", "float": "number", "bool": "true, false"}
COMMENT = re.compile(r"^( *)(\w+):(.*?)(?: +# (.*))?$")
FIELD = re.compile(r"^    (\w+): [^#\n]*# (.*)$", re.M)


def comments(path: Path) -> dict[str, str]:
    """Return what stands behind each option of a YAML file, by `section.option`; '' is what stands above all."""
    found, section, last = {"": ""}, "", ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if matched := COMMENT.match(line):
            indent, name, value, text = matched.groups()
            section = section if indent else ""
            last = f"{section}.{name}" if section else name
            section = name if not indent and not value.strip() else section
            found[last] = text or ""
        elif line.strip().startswith("# @"):
            continue
        elif line.strip().startswith("#"):  # goes on above, or behind the option
            found[last] = f"{found[last]} {line.strip().removeprefix('# ')}".strip()
    return found


def field_comments(cls: type) -> dict[str, str]:
    """Return what stands behind each field of a dataclass, those that it inherits included."""
    sources = [inspect.getsource(base) for base in reversed(cls.__mro__) if base is not object]
    return {name: text for source in sources for name, text in FIELD.findall(source)}


def read(path: Path) -> dict[str, Any]:
    """Read a YAML file of `conf/`."""
    values: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    return values


def shown(value: Any) -> str:
    """Write a value as it is typed."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(shown, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def typed(hint: Any) -> str:
    """Name a type for people."""
    name = getattr(hint, "__name__", str(hint))
    return f"list of {TYPES[hint.__args__[0].__name__]}s" if name == "tuple" else TYPES[name]


def escaped(text: str) -> str:
    """Keep Markdown from reading `|` as a column, `<class>` as HTML and `[a][b]` as a link."""
    return text.replace("|", "\\|").replace("<", "\\<").replace("][", "]\\[")


def key(name: str) -> str:
    """Write an option's name as it is typed."""
    return name.replace("_", "-")


def table(rows: Iterator[tuple[str, Any, str, str]]) -> str:
    """Return a table of options: name, type, default, text."""
    lines = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for name, hint, default, text in rows:
        lines.append(f"| `{key(name)}` | {typed(hint)} | {default} | {escaped(text)} |")
    return "\n".join(lines)


def default(by_choice: Mapping[str, Any]) -> str:
    """Return a default: one value, or each with the choices that have it."""
    values: dict[str, list[str]] = {}
    for choice, value in by_choice.items():
        values.setdefault(shown(value), []).append(choice)
    if len(values) == 1:
        return f"`{next(iter(values))}`" if next(iter(values)) else "empty"
    return "; ".join(f"{f'`{value}`' if value else 'empty'} ({', '.join(names)})" for value, names in values.items())


def group(name: str, cls: type) -> str:
    """Describe a group: its choices, then the options that any of them has."""
    paths = {choice: conf_dir() / name / f"{choice}.yaml" for choice in choices(name)}
    values, texts = {c: read(path) for c, path in paths.items()}, {c: comments(path) for c, path in paths.items()}
    classes = [load_generator(choice) for choice in paths] if name == "generator" else [cls]
    hints = {option: hint for one in classes for option, hint in get_type_hints(one).items()}
    plain = {option: text for one in classes for option, text in field_comments(one).items()}
    options_of = dict.fromkeys(field.name for one in classes for field in fields(one) if field.name != "name")

    def rows() -> Iterator[tuple[str, Any, str, str]]:
        for option in options_of:
            having = {c: options[option] for c, options in values.items() if option in options}
            if having:
                said = {texts[c][option] for c in having}
                lacking = [c for c in paths if c not in having]
                only = f"not {', '.join(lacking)}" if len(lacking) < len(having) else f"{', '.join(having)} only"
                own = f" ({only})" if lacking else ""
                text = said.pop() if len(said) == 1 else ""
                yield (
                    f"{name}.{option}",
                    hints[option],
                    default(having),
                    (text or plain.get(option, "")) + own,
                )

    listed = [f"- `{name}={choice}`: {escaped(texts[choice][''])}" for choice in paths]
    return "\n".join(listed) + "\n\n" + table(rows())


def strategy(name: str, idea: str) -> str:
    """Describe a method and its own options."""
    path, config = conf_dir() / "strategy" / f"{name}.yaml", load_strategy(name)[1]
    values, texts, plain = read(path), comments(path), field_comments(config)
    hints = get_type_hints(config)
    own = [
        (f"strategy.{option}", hints[option], default({name: value}), texts[option] or plain.get(option, ""))
        for option, value in values.items()
        if option != "name"
    ]
    return f"### `strategy={name}`\n\n{idea[:1].upper()}{idea[1:]}\n\n" + (
        table(iter(own)) if own else "No options of its own."
    )


def plain_section(prefix: str, cls: type, values: Mapping[str, Any], texts: Mapping[str, str]) -> str:
    """Describe options that stand in `conf/config.yaml` itself."""
    hints = get_type_hints(cls)
    return table(
        (f"{prefix}{option}", hints[option], default({"": value}), texts[f"{prefix}{option}"])
        for option, value in values.items()
    )


def preset(name: str) -> str:
    """Describe what a preset changes, task by task."""
    lines = []
    for path in sorted((conf_dir() / "preset" / name).glob("*.yaml")):
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
        lines.append(f"- {task}: {', '.join(chosen) or 'nothing'}. {comments(path)['']}")
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
    config = conf_dir() / "config.yaml"
    values, texts = read(config), comments(config)
    run = {name: value for name, value in values.items() if name in get_type_hints(RunConfig) and name not in SECTIONS}
    parts = [HEAD, commands(), "## The run", plain_section("", RunConfig, run, texts)]
    for name, cls in SECTIONS.items():
        own = plain_section(f"{name}.", cls, values[name], texts) if name in values else group(name, cls)
        chosen = "" if name in values else f"Default: `{name}={getattr(compose([]), name).name}`.\n\n"
        parts += [f"## {TITLES[name]}", chosen + own]
    parts += ["## Methods", "Default: `strategy=fedreplay`."]
    parts += [strategy(name, idea) for name, (idea, _) in describe_strategies().items()]
    parts += ["## Presets", "Default: `preset=quick`."] + [preset(name) for name in choices("preset")]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


if __name__ == "__main__":
    print(page(), end="")
