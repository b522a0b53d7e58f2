"""Every option of a run, as `conf/` and the dataclasses that check the values describe it: for people who ask.

The page docs/options.md and `flwr-replay options` show the same descriptions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from flwr_replay.config.catalogue import brought, choices, conf_dir, conf_path, settable
from flwr_replay.config.compose import OF_CHOICES, SECTIONS, compose
from flwr_replay.config.halves import load_generator, load_strategy
from flwr_replay.config.run import RunConfig
from flwr_replay.config.strict_yaml import read_yaml
from flwr_replay.forecast.forecast import describe_strategies

__all__ = ["Described", "Option", "comments", "described", "key", "read", "shown"]

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
source = cache(inspect.getsource)  # which parses a whole file each time; many classes share a base


@dataclass(frozen=True)
class Option:
    """An option: its name as it is typed, what its value is, and one sentence or two."""

    name: str
    type: str
    default: Mapping[str, list[str]]  # values as they are typed, each with the choices that have it
    text: str
    only: str = ""  # the choices that have it, if not all: `cnn, unet only`, or `not boneage`


@dataclass(frozen=True)
class Described:
    """A group of options: `choices` with a text for each, the default one, and the options that any choice has."""

    title: str
    options: tuple[Option, ...] = ()
    choices: Mapping[str, str] | None = None
    chosen: str = ""


def described() -> dict[str, Described]:
    """Describe all options of a run by group: `run`, the sections, `strategy`, and `strategy=…` for each method."""
    config = conf_dir() / "config.yaml"
    values, texts = read(config), comments(config)
    run = {name: value for name, value in values.items() if name in get_type_hints(RunConfig) and name not in SECTIONS}
    groups = {"run": Described("The run", _plain("", RunConfig, run, texts))}
    for name, cls in SECTIONS.items():
        if name in values:
            groups[name] = Described(TITLES[name], _plain(f"{name}.", cls, values[name], texts))
        else:
            groups[name] = _group(name, cls, getattr(compose([]), name).name)
    ideas = {name: idea[:1].upper() + idea[1:] for name, (idea, _) in describe_strategies().items()}
    groups["strategy"] = Described("Methods", choices=ideas, chosen=compose([]).strategy.name)
    return groups | {f"strategy={name}": _method(name, idea) for name, idea in ideas.items()}


def comments(path: Path) -> dict[str, str]:
    """Return what stands behind each option of a YAML file, by `section.option`; '' is what stands above all."""
    texts, section, last = {"": ""}, "", ""
    for line in path.read_text(encoding="utf-8").splitlines():
        if matched := COMMENT.match(line):
            indent, name, value, text = matched.groups()
            section = section if indent else ""
            last = f"{section}.{name}" if section else name
            section = name if not indent and not value.strip() else section
            texts[last] = text or ""
        elif line.strip().startswith("# @"):
            continue
        elif line.strip().startswith("#"):  # goes on above, or behind the option
            texts[last] = f"{texts[last]} {line.strip().removeprefix('# ')}".strip()
    return texts


def field_comments(cls: type) -> dict[str, str]:
    """Return what stands behind each field of a dataclass, those that it inherits included."""
    sources = [source(base) for base in reversed(cls.__mro__) if base is not object]
    return {name: text for text_of in sources for name, text in FIELD.findall(text_of)}


def read(path: Path) -> dict[str, Any]:
    """Read a YAML file of `conf/`."""
    return read_yaml(path, "a file of options")


def shown(value: Any) -> str:
    """Write a value as it is typed."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(shown, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def typed(hint: Any) -> str:
    """Name a type for people."""
    name = getattr(hint, "__name__", str(hint))
    return f"list of {TYPES[hint.__args__[0].__name__]}s" if name == "tuple" else TYPES[name]


def key(name: str) -> str:
    """Write an option's name as it is typed."""
    return name.replace("_", "-")


def _default(by_choice: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return each default as it is typed, with the choices that have it."""
    values: dict[str, list[str]] = {}
    for choice, value in by_choice.items():
        values.setdefault(shown(value), []).append(choice)
    return values


def _group(name: str, cls: type, chosen: str) -> Described:
    """Describe a group: its choices, and the options that any of them has."""
    paths = {choice: conf_path(name, choice) for choice in choices(name)}
    values = {choice: settable(read(path)) for choice, path in paths.items()}
    texts = {choice: comments(path) for choice, path in paths.items()}
    classes = [load_generator(choice) if name in OF_CHOICES else cls for choice in paths]
    hints = {option: hint for kind in classes for option, hint in get_type_hints(kind).items()}
    plain = {option: text for kind in classes for option, text in field_comments(kind).items()}
    options_of = dict.fromkeys(field.name for kind in classes for field in fields(kind))

    def rows() -> Iterator[Option]:
        for option in options_of:
            having = {c: options[option] for c, options in values.items() if option in options}
            if having:
                comments = {texts[c][option] for c in having}
                lacking = [c for c in paths if c not in having]
                only = f"not {', '.join(lacking)}" if len(lacking) < len(having) else f"{', '.join(having)} only"
                text = (comments.pop() if len(comments) == 1 else "") or plain.get(option, "")
                yield Option(
                    key(f"{name}.{option}"),
                    typed(hints[option]),
                    _default(having),
                    text,
                    only if lacking else "",
                )

    return Described(TITLES[name], tuple(rows()), {choice: texts[choice][""] for choice in paths}, chosen)


def _method(name: str, idea: str) -> Described:
    """Describe a method; a broken one of another package must not hide the others."""
    try:
        return Described(idea, _of_strategy(name))
    except Exception as error:
        if name not in brought():
            raise
        return Described(f"{idea} Its options cannot be shown: {type(error).__name__}: {' '.join(str(error).split())}")


def _of_strategy(name: str) -> tuple[Option, ...]:
    """Describe a method's own options."""
    path, config = conf_path("strategy", name), load_strategy(name)[1]
    texts = {option: text for option, text in comments(path).items() if text}
    return _plain(
        "strategy.",
        config,
        settable(read(path)),
        {f"strategy.{k}": v for k, v in (field_comments(config) | texts).items()},
    )


def _plain(prefix: str, cls: type, values: Mapping[str, Any], texts: Mapping[str, str]) -> tuple[Option, ...]:
    """Describe options that all stand in one file."""
    hints = get_type_hints(cls)
    return tuple(
        Option(key(f"{prefix}{option}"), typed(hints[option]), _default({"": value}), texts[f"{prefix}{option}"])
        for option, value in values.items()
    )
