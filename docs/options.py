"""Write docs/options.md from `conf/` and the dataclasses: `python docs/options.py > docs/options.md`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from unittest.mock import patch

from flwr_replay.config import catalogue
from flwr_replay.config.catalogue import choices, conf_path
from flwr_replay.forecast.described import Described, Option, comments, described, key

SEVERAL = 2  # options of one choice only: more of them stand below the others, under its name
FEW = 3  # choices that are named beside an option
HEAD = """# Options

Every option of a run, as `docs/options.py` finds them. `flwr-replay options` says the same in a terminal, and names all
choices that have an option.

- An option is written `key=value`, and stands here with its default. A hyphen in a key is an underscore.
- The section may be left out where the name is unique: `cut=layer2` is `strategy.cut=layer2`. Options of `generator`
  and `prior` are written in full where another section has the same name.
- What you set wins over the preset, and the preset over `conf/config.yaml`.
- A list is written `[a,b]`; text with spaces or commas is quoted: `"task.data-dir='/my data'"`.
- In a study file for `flwr run` the keys of `[tool.flwr.app.config]` hold the same options; all others go into
  `overrides`.

**A run leaves** a directory under `runs/`, after `flwr run` under `~/.flwr-replay/runs`: options, metrics, ledger,
models, result and `report.html`. Simulated institutions' states are under `~/.flwr-replay/state`.
`$FLWR_REPLAY_HOME` moves both.

**Resuming.** `flwr-replay run --resume DIR` goes on where the run stopped. On a CPU it ends with the same bits, except
under `dp=`, whose noise is secret. `rounds=` with it makes the run longer.

`flwr-replay COMMAND --help` lists a command's flags. `compare` also takes `seeds=`: `seeds=31` is 31 seeds, 0 to 30;
`seeds=31,` is seed 31; `seeds=5-7` three. `lr=auto` tries five rates with every method. With `lr=0.001..0.1 --tune 20`
Optuna tries twenty, on a seed that is not reported; the report says their ε (`flwr-replay[optuna]`). Commands exit
with 0; with 1 if some of several runs failed; with 2 after a mistake.
"""
PRESETS = """\
Default: `preset=quick`. A preset changes some defaults, task by task and method by method:
`PRESET/TASK.yaml` in `conf/preset/` has the values, `default.yaml` those of every other task."""


def escaped(text: str) -> str:
    """Keep Markdown from reading `<class>` as HTML and `[a][b]` as a link."""
    return text.replace("<", "\\<").replace("][", "]\\[")


def listed(options: Sequence[Option]) -> str:
    """Return a list of options: name and default as they are typed, text, and the choices that have it, if few."""
    return "\n".join(
        f"- {typed(option)}: {escaped(option.text)}"
        + (f" ({option.only})" if option.only and option.only.count(",") < FEW else "")
        for option in options
    )


def typed(option: Option) -> str:
    """Return an option with its default: one value, or up to three with the choices that have them."""
    first, *others = option.default.items()
    if not others:
        return f"`{option.name}={first[0]}`"
    if len(option.default) > FEW:
        return f"`{option.name}`, by the choice"
    shown = [f"`{option.name}={first[0]}`", *(f"`{value}`" if value else "empty" for value, _ in others)]
    having = [", ".join(names) if len(names) <= FEW else "others" for names in option.default.values()]
    return "; ".join(f"{value} ({names})" for value, names in zip(shown, having, strict=True))


def section(name: str, shown: Described) -> str:
    """Describe a group: its default, its choices, its options, those of a single choice under its name."""
    paragraphs = [f"Default: `{name}={shown.chosen}`."] if shown.chosen else []
    if shown.choices:
        paragraphs.append("\n".join(f"- `{name}={choice}`: {escaped(text)}" for choice, text in shown.choices.items()))
        paragraphs.append("Options:")
    alone = Counter(option.only for option in shown.options)
    own = {choice: alone[f"{choice} only"] for choice in shown.choices or {} if alone[f"{choice} only"] > SEVERAL}
    paragraphs.append(listed([option for option in shown.options if option.only.removesuffix(" only") not in own]))
    for choice in own:
        rows = [replace(option, only="") for option in shown.options if option.only == f"{choice} only"]
        paragraphs += [f"With `{name}={choice}` only:", listed(rows)]
    return "\n\n".join(paragraphs)


def preset(name: str) -> str:
    """Say of every task on what a preset's values rest."""
    tasks: dict[str, list[str]] = {}
    for path in sorted(conf_path("preset", name).glob("*.yaml")):
        guessed = [f"`{key(option)}`" for option, text in comments(path).items() if text.startswith("not given in")]
        own = f" Our choice, since the paper gives none: {', '.join(guessed)}." if guessed else ""
        task = "every other task" if path.stem == "default" else f"`{path.stem}`"
        tasks.setdefault(f"{comments(path)['']}{own}", []).append(task)
    lines = [f"- {', '.join(names)}: {text}" for text, names in tasks.items()]
    return f"### `preset={name}`\n\n" + "\n".join(lines)


def words(option: Option) -> tuple[str, ...]:
    """Return what a reader is told of an option: methods that have it in the same words share one line."""
    return option.name, option.text, *option.default


def methods(sections: Mapping[str, Described]) -> list[str]:
    """Describe the methods: first the options that several have, then those of a single method."""
    by_name = {key.removeprefix("strategy="): method for key, method in sections.items() if key.startswith("strategy=")}
    having: dict[tuple[str, ...], list[str]] = {}
    for name, method in by_name.items():
        for option in method.options:
            having.setdefault(words(option), []).append(name)
    shared: dict[tuple[str, ...], dict[tuple[str, ...], Option]] = {}
    for option in (option for method in by_name.values() for option in method.options):
        if len(names := having[words(option)]) > 1:
            shared.setdefault((*names,), {})[words(option)] = option
    paragraphs = [f"With {', '.join(names)}:\n\n{listed([*options.values()])}" for names, options in shared.items()]
    own = {name: [o for o in method.options if len(having[words(o)]) == 1] for name, method in by_name.items()}
    paragraphs.append(
        "Without options of their own: " + ", ".join(f"`strategy={name}`" for name in own if not own[name]) + "."
    )
    for name, options in own.items():
        paragraphs += [f"### `strategy={name}`", listed(options)] if options else []
    return paragraphs


@patch.object(catalogue, "brought", dict)  # the page is of this package, whatever else is installed
def page() -> str:
    """Return the whole page."""
    sections = described()
    paragraphs = [HEAD]
    for name, shown in sections.items():
        if not name.startswith("strategy"):
            paragraphs += [f"## {shown.title}", section(name, shown)]
    paragraphs += [
        "## Methods",
        f"Default: `strategy={sections['strategy'].chosen}`. [What each does.](../README.md#methods)",
        *methods(sections),
    ]
    paragraphs += ["## Presets", PRESETS, *map(preset, choices("preset"))]
    return "\n\n".join(paragraph.strip("\n") for paragraph in paragraphs if paragraph) + "\n"


if __name__ == "__main__":
    print(page(), end="")
