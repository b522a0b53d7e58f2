"""Every option of a run, as `conf/` and the dataclasses that check the values describe it: for people who ask.

The page docs/options.md and `flwr-replay options` show the same descriptions.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr_replay.config.catalogue import choices, conf_dir, conf_path, settable
from flwr_replay.config.compose import OF_CHOICES, SECTIONS
from flwr_replay.config.run import RunConfig
from flwr_replay.config.sources import Fields, describe_strategies, fields_of, place_of
from flwr_replay.config.strict_yaml import read_yaml
from flwr_replay.errors import ConfigError

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
    chosen = {name: choice for pick in values["defaults"] if isinstance(pick, dict) for name, choice in pick.items()}
    known = _fields(RunConfig)
    run = {name: value for name, value in values.items() if name in known and name not in SECTIONS}
    groups = {"run": Described("The run", _plain("", known, run, texts))}
    for name, cls in SECTIONS.items():
        if name in values:
            groups[name] = Described(TITLES[name], _plain(f"{name}.", _fields(cls), values[name], texts))
        else:
            groups[name] = _group(name, cls, chosen[name])
    ideas = {name: idea[:1].upper() + idea[1:] for name, (idea, _) in describe_strategies().items()}
    groups["strategy"] = Described("Methods", choices=ideas, chosen=chosen["strategy"])
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


def _fields(cls: type) -> Fields:
    return fields_of(cls.__module__, cls.__name__)


def read(path: Path) -> dict[str, Any]:
    """Read a YAML file of `conf/`."""
    return read_yaml(path, "a file of options")


def shown(value: Any) -> str:
    """Write a value as it is typed."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(shown, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def typed(kind: str) -> str:
    """Name a type for people."""
    return f"list of {TYPES[kind[6:-6]]}s" if kind.startswith("tuple[") else TYPES[kind]


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
    known: dict[str, tuple[str, str]] = {}
    for choice in paths:
        known |= fields_of(place_of(name, choice), f"{choice}Config") if name in OF_CHOICES else _fields(cls)

    def rows() -> Iterator[Option]:
        for option, (kind, plain) in known.items():
            having = {c: options[option] for c, options in values.items() if option in options}
            if having:
                comments = {texts[c][option] for c in having}
                lacking = [c for c in paths if c not in having]
                only = f"not {', '.join(lacking)}" if len(lacking) < len(having) else f"{', '.join(having)} only"
                text = (comments.pop() if len(comments) == 1 else "") or plain
                yield Option(
                    key(f"{name}.{option}"),
                    typed(kind),
                    _default(having),
                    text,
                    only if lacking else "",
                )

    return Described(TITLES[name], tuple(rows()), {choice: texts[choice][""] for choice in paths}, chosen)


def _method(name: str, idea: str) -> Described:
    """Describe a method; a broken one of another package must not hide the others."""
    try:
        values, fields = (
            settable(read(path := conf_path("strategy", name))),
            fields_of(place_of("strategy", name), f"{name}Config"),
        )
        texts = {f"strategy.{option}": comment for option, (_, comment) in fields.items()}
        texts |= {f"strategy.{option}": text for option, text in comments(path).items() if text}
        return Described(idea, _plain("strategy.", fields, values, texts))
    except ConfigError as error:
        return Described(f"{idea} Its options cannot be shown: {error}")


def _plain(prefix: str, fields: Fields, values: Mapping[str, Any], texts: Mapping[str, str]) -> tuple[Option, ...]:
    """Describe options that all stand in one file; one that no field has is none."""
    return tuple(
        Option(key(f"{prefix}{option}"), typed(fields[option][0]), _default({"": value}), texts[f"{prefix}{option}"])
        for option, value in values.items()
        if option in fields
    )
