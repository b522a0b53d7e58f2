"""From a user's options to a `RunConfig`; server and institutions use the same code.

Options are Hydra overrides (`flwr-replay run task=mnist cut=layer2`), or they come in Flower's run config. Its key
`overrides` holds further Hydra overrides as one text. A hyphen in a key is an underscore. The section may be left out
if the option's name is unique: `cut=layer2` is `strategy.cut=layer2`.

An institution gets the options from the server, which it does not trust. So Hydra composes only the files in `conf/`.
Of Hydra's grammar, an option's value may be a number, a text or a list; interpolations and functions are refused.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import is_dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from flwr_replay.config.binding import plain
from flwr_replay.config.catalogue import (
    GROUPS,
    check_choice,
    choices,
    code_of,
    conf_dir,
    conf_dir_of,
    conf_path,
    own_options,
    package_of,
    settable,
)
from flwr_replay.config.effect import idle
from flwr_replay.config.halves import declared_options, load_options
from flwr_replay.config.model import ModelConfig
from flwr_replay.config.own_code import OWN, allow
from flwr_replay.config.privacy import MECHANISMS, some_of
from flwr_replay.config.quoting import key_of, quoted, short, value_of
from flwr_replay.config.renamed import today
from flwr_replay.config.run import RunConfig, check_numbers
from flwr_replay.config.strict_yaml import DUMPER, LOADER, read_yaml
from flwr_replay.config.typed import HINTS, build, typed
from flwr_replay.errors import ConfigError, nearest, refuse_all

__all__ = [
    "SECTIONS",
    "check_typed",
    "compose",
    "compose_own",
    "from_run_config",
    "model_named",
    "named_code",
    "overrides_in",
    "overrides_of",
    "refuse_typed",
    "to_yaml",
]

BY_STRATEGY = "by_strategy"  # a preset's options for one strategy, by strategy and full name
DEFAULT = "default"  # a preset's file for every task without a file of its own
AT_ONCE = {"private": "fedstats"}  # by preset: what rounds=1 chooses, if no strategy is chosen
APART = ("strategy", "replay", "prior")  # no preset of ours touches them, nor do they touch other groups
COMMAND_LINE = ("runs_dir", "resume")  # given as --runs-dir and --resume
COUNTS = ("nodes", "rounds", "seed")  # Flower's run config needs a number for them; 0: as in conf/config.yaml
LONGEST = 20_000  # characters of all options; the time of Hydra's parser grows with their square, here seconds
_default: dict[str, dict[str, str]] = {}  # by a preset's file: the groups' choices where none is made, as far as known
WORDS = lru_cache(maxsize=16)(lambda text: tuple(shlex.split(text)))  # the same text comes with every message
SECTIONS = {name: kind for name, kind in HINTS(RunConfig).items() if isinstance(kind, type) and is_dataclass(kind)}
SECTIONS.pop("strategy")  # each has its own
LATER = ("privacy", "generator", "prior")  # sections about which a method or a choice has its say
OF_CHOICES = ("generator", "prior")  # sections whose choices have options of their own


def _chosen(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return the chosen groups as Hydra overrides, with the preset's file for the task, or its default file.

    A model that the user chose wins over the preset's. What is known to stand without a choice is left out, so that
    many ways to write the same choices are one to `_unset`.
    """
    chosen, unknown = {key: value for key, value in pairs if key in GROUPS}, list[str]()
    for group, choice in chosen.items():
        try:
            check_choice(group, choice)
        except ConfigError as error:
            unknown.append(str(error))
    refuse_all(unknown)
    preset, task = chosen.pop("preset", "quick"), chosen.get("task", "digits")
    if preset in AT_ONCE and dict(pairs).get("rounds") == "1":
        chosen.setdefault("strategy", AT_ONCE[preset])
    known = [path.stem for path in conf_path("preset", preset).glob("*.yaml")]
    if not {task, DEFAULT} & set(known):
        raise ConfigError(f"preset={preset} has values for task={', '.join(sorted(known))}; got task={task}")
    file = f"preset={preset}/{task if task in known else DEFAULT}"
    default = _default.get(file, {})
    return [file, *sorted(f"{group}={choice}" for group, choice in chosen.items() if default.get(group) != choice)]


def from_run_config(run_config: Mapping[str, Any]) -> RunConfig:
    """Compose from Flower's run config, as `overrides_in` reads it."""
    return compose(overrides_in(run_config))


def overrides_in(run_config: Mapping[str, Any]) -> list[str]:
    """Read Flower's run config; an empty text is not set, and neither is a 0 of `nodes`, `rounds` or `seed`.

    Every plain key is one override. The key `overrides` is split as a shell does, and wins over plain keys.
    """
    try:
        further = WORDS(str(run_config.get("overrides", "")))
    except ValueError as error:
        raise ConfigError(f"overrides must be quoted as in a shell; got {run_config['overrides']!r}: {error}") from None
    unset = [key for key, value in run_config.items() if value == "" or (key in COUNTS and value == 0)]
    plain = [f"{key}={value}" for key, value in run_config.items() if key not in ("overrides", *unset)]
    return [*plain, *further]


def named_code(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the code that must be allowed for these words: functions, and another package's strategy."""
    pairs = [override.partition("=") for override in overrides]
    functions = [code for key, _, value in pairs if key in OWN for code in code_of(value, key)]
    return (*code_of(dict(_pairs(overrides)).get("strategy", "")), *functions)


def compose_own(overrides: Sequence[str], own: Sequence[str] = ()) -> RunConfig:
    """Compose the user's own words, and let this process import the code that they name.

    Raises
    ------
    ConfigError
        As `check_typed` does; as `refuse_typed` does for a user's `own`.
    """
    refuse_typed(own, overrides, [check_typed(overrides)])
    config = compose(overrides)
    allow(config.own_code)
    return config


def check_typed(overrides: Sequence[str]) -> RunConfig:
    """Refuse a user's own words as `compose` does, but all that is wrong at once, and without waiting for PyTorch."""
    allow(named_code(overrides))
    read = partial(_compose, options_of=declared_options)
    try:
        return read(tuple(overrides))
    except ConfigError as error:
        if len(error.args) == 1:
            refuse_all([str(error), *_further(overrides, str(error), read)])
        raise


def compose(overrides: Sequence[str]) -> RunConfig:
    """Compose `conf/` with overrides; a later override wins.

    Raises
    ------
    ConfigError
        For an unknown option, choice or value, with the nearest valid names.
    """
    return _compose(tuple(overrides), load_options)


def _further(overrides: Sequence[str], fault: str, read: Callable[[tuple[str, ...]], Any]) -> Iterator[str]:
    """Find what else is wrong: leave out one option after another that a fault is about, and read the rest.

    Such an option is named in the fault's text, and without it another rule breaks, which does not name it, or none.
    A wrong choice of a group ends the search: what it would have allowed is not known.
    """
    left = list(overrides)
    while True:
        for option in sorted(left, key=lambda option: key_of(option) in GROUPS):
            name = re.escape(key_of(option).rpartition(".")[2].replace("_", "-"))
            named = re.compile(rf"(?<![\w-]){name}(?![\w-])")
            if not named.search(fault):
                continue
            without, then = [other for other in left if other is not option], ""
            try:
                read(tuple(without))
            except ConfigError as error:
                then = str(error)
            if not named.search(then) and then.split("; got")[0] != fault.split("; got")[0]:
                break
        else:
            return
        if not then or key_of(option) in GROUPS:
            return
        yield then
        left, fault = without, then


def _values(overrides: Sequence[str]) -> dict[str, Any]:
    """Return all options; what needs no method's code is checked, and its sections are built."""
    if (length := sum(map(len, overrides))) > LONGEST:
        raise ConfigError(f"all options together may have {LONGEST} characters; got {length}: set fewer options")
    pairs = _pairs(overrides)
    values = deepcopy(dict(_unset(tuple(_chosen(pairs)))))
    by_strategy = values.pop(BY_STRATEGY, {})
    later = {f"{group}.{option}" for group, option in OWN.items() if dict(pairs).get(group, "own") != "own"}
    later -= {override.partition("=")[0] for override in overrides}
    by_name = {_full_key(key, values): (key, value) for key, value in pairs if key not in (*GROUPS, *later)}
    for full, (key, value) in by_name.items():
        section, _, option = full.rpartition(".")
        (values[section] if section else values)[option] = value_of(key, full, value)
    for key, value in by_strategy.get(values["strategy"]["name"], {}).items():
        section, option = key.split(".")
        if key not in by_name and option in values[section]:  # a model without norm layers has no such option
            values[section][option] = value
    values["task"]["validation"] = values["split"] == "validation"
    typed(SECTIONS["privacy"], values["privacy"], "privacy")
    values |= {name: build(cls, values[name], name) for name, cls in SECTIONS.items() if name not in LATER}
    others = {key: value for key, value in values.items() if key not in (*SECTIONS, "strategy")}
    check_numbers(SimpleNamespace(**typed(RunConfig, others, "")))
    return values


@lru_cache(maxsize=256)
def _compose(overrides: tuple[str, ...], options_of: Callable[[str, str], type[Any]]) -> RunConfig:
    values = _values(overrides)
    strategy_config = options_of("strategy", values["strategy"].pop("name"))
    traits, dp = strategy_config.traits, values["privacy"]["dp"]
    if dp == "auto":
        values["privacy"]["dp"] = traits.dp_by_default
    if {*dp.split("+")} & {*MECHANISMS} - {*traits.dp_mechanisms}:  # before it asks for what the method cannot have
        needs = {} if traits.draws_images else {"generator": "vqvae2", "prior": "pixelcnn"}
        needs |= {"statistics": "statistics"} if traits.supports_draws else {}
        able = [name for name in traits.dp_mechanisms if name not in needs]
        more = [f", with replay={needs[name]} dp={name}" for name in traits.dp_mechanisms if name in needs]
        raise ConfigError(
            f"strategy={strategy_config.name} can have dp={some_of(able)}{''.join(more)}; got dp={dp}: "
            "choose among these, or another strategy"
        )
    classes = {name: options_of(name, values[name]["name"]) for name in OF_CHOICES}
    classes |= {"privacy": SECTIONS["privacy"], "strategy": strategy_config}
    values |= {name: build(cls, values[name], name) for name, cls in classes.items()}
    config: RunConfig = build(RunConfig, values, "")
    return config


def refuse_typed(own: Sequence[str], overrides: Sequence[str], configs: Sequence[RunConfig]) -> None:
    """Refuse an option with two values, or without an effect in any of these runs, of which one has these overrides."""
    base = {key: value for key, value in _unset(tuple(_chosen(_pairs(overrides)))).items() if key != BY_STRATEGY}
    first, faults = dict[str, str](), list[str]()
    for option in own:
        key = key_of(option)
        full = key if key in GROUPS else _full_key(key, base)
        faults.append(idle(full, option, configs))
        earlier = first.setdefault(full, option)
        if earlier.partition("=")[2] != option.partition("=")[2]:
            raise ConfigError(f"an option has one value; got {short(earlier)} and {short(option)}: remove one")
    refuse_all([fault for fault in faults if fault])


@cache
def model_named(name: str) -> ModelConfig:
    """Return a model as in `conf/model/<name>.yaml`, or of own code; a ConfigError if no model has this name."""
    if not (code := code_of(name, "model")):
        check_choice("model", name)
    values = _hydra((f"model={'own' if code else name}",))["model"]
    config: ModelConfig = build(ModelConfig, {**values, "build": code[0]} if code else values, "model")
    return config


def to_yaml(config: RunConfig) -> str:
    """Write a resolved configuration as YAML; composing from it again gives the same `RunConfig`."""
    import yaml

    return yaml.dump(plain(config), Dumper=DUMPER)


def overrides_of(path: Path) -> list[str]:
    """Read a run's `config.yaml`, or its `options.json` at an institution, back as overrides that set every option."""
    import yaml

    values: dict[str, Any] = {}
    for key, value in yaml.load(path.read_text(encoding="utf-8"), LOADER).items():
        section, _, option = key.rpartition(".")  # keys of options.json are flat
        (values.setdefault(section, {}) if section else values)[option] = value
    choices_of = {group: values[group].get("library") or values[group]["name"] for group in GROUPS if group in values}
    chosen = [f"{group}={choice}" for group, choice in choices_of.items()]
    base = _unset(tuple(_chosen(_pairs(chosen))))
    overrides: list[str] = []
    for key, value in values.items():
        if isinstance(value, dict):
            overrides += [f"{key}={choices_of[key]}"] if key in choices_of else []
            # An option that is not in the choice's YAML cannot be set, so it has its default.
            known = settable(base[key])
            overrides += [f"{key}.{option}={quoted(item)}" for option, item in value.items() if option in known]
        else:
            overrides.append(f"{key}={quoted(value)}")
    return overrides


def _pairs(overrides: Sequence[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"an option is written key=value; got {short(override)}")
        if key in OWN and (code := code_of(value, key)):
            pairs += [(key, "own"), (f"{key}.{OWN[key]}", quoted(*code))]
        else:
            pairs.append((key_of(override), today(key_of(override), value)))
    return pairs


def _full_key(key: str, base: Mapping[str, Any]) -> str:
    """Return an option's name with its section; what is chosen is no option."""
    known = {name: name for name, value in base.items() if not isinstance(value, dict)}
    for section, options in base.items():
        if isinstance(options, dict):
            known |= {f"{section}.{name}": f"{section}.{name}" for name in settable(options)}
    if key in known:
        return known[key]
    matches = [full for full in known if full.partition(".")[2] == key]
    # in these sections an option needs its full name if another section has the same one
    matches = [full for full in matches if not full.startswith(OF_CHOICES)] or matches
    if len(matches) > 1:
        raise ConfigError(f"option {key!r} is in several sections; write one of {', '.join(matches)}")
    if matches and not matches[0].startswith(OF_CHOICES):
        return matches[0]
    plain = key.removeprefix("strategy.")
    having = [name for name in choices("strategy") if plain in own_options("strategy", name)]
    if matches and having:  # ProxyFL's beta is not the generator's
        raise ConfigError(f"{key} is an option of strategy={', '.join(having)}; for the other one write {matches[0]}")
    if matches:
        return matches[0]
    shown = [name.replace("_", "-") for name in known if name not in COMMAND_LINE]
    owners = {
        group: ", ".join(name for name in choices(group) if key.removeprefix(f"{group}.") in own_options(group, name))
        for group in ("strategy", "partition", *OF_CHOICES)
    }
    if rules := [f"{group}={names}" for group, names in owners.items() if names]:
        ours = ", ".join(f"{group}={base[group]['name']}" for group, names in owners.items() if names)
        raise ConfigError(f"{key.replace('_', '-')} is an option of {' and of '.join(rules)}; got {ours}")
    groups = [name for name, options in base.items() if isinstance(options, dict) and "name" in options]
    near = nearest(key.replace("_", "-"), [*shown, *groups])
    raise ConfigError(f"unknown option {key.replace('_', '-')!r}: {near}; `flwr-replay options` lists all")


@lru_cache(maxsize=256)
def _unset(chosen: tuple[str, ...]) -> Mapping[str, Any]:
    """Return the options, read-only, with these groups chosen and no option set."""
    choices_of = dict(override.split("=", 1) for override in chosen)
    files = {group: conf_path(group, choice) for group, choice in choices_of.items() if group in APART}
    ours = all(conf_dir_of(group, choice.partition("/")[0]) == conf_dir() for group, choice in choices_of.items())
    values = {**_hydra(tuple(choice for choice in chosen if not ours or choice.partition("=")[0] not in files))}
    if ours:
        values |= {group: dict(read_yaml(file, f"the options of {group}")) for group, file in files.items()}
    name = str((values.get("strategy") or {}).get("name"))
    if choices_of.get("strategy", name) != name:
        wanted = choices_of["strategy"]
        raise ConfigError(
            f"strategy={wanted} must be what {conf_path('strategy', wanted)} has as name; got {name}: correct it"
        )
    if not package_of(name):  # the files of another package's may choose for other groups, too
        left = [
            group for group in values.keys() & set(GROUPS) if not any(pick.startswith(f"{group}=") for pick in chosen)
        ]
        _default.setdefault(chosen[0], {}).update({group: values[group]["name"] for group in left})
    return MappingProxyType(values)


@lru_cache(maxsize=256)  # a study composes hundreds of times, and each takes Hydra 0.1 s
def _hydra(overrides: tuple[str, ...]) -> dict[str, Any]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    folders = set[Path]()
    for group, _, choice in (override.partition("=") for override in overrides):
        if (folder := conf_dir_of(group, choice.partition("/")[0])) != conf_dir():  # Hydra reads YAML 1.1
            read_yaml(folder / group / f"{choice}.yaml", f"the options of {group}={choice}")
            folders.add(folder)
    search = f"hydra.searchpath=[{','.join(quoted(f'file://{folder}') for folder in sorted(folders))}]"
    try:
        with initialize_config_dir(config_dir=str(conf_dir()), version_base="1.3"):
            composed = OmegaConf.to_container(hydra_compose("config", overrides=[*overrides, search]), resolve=False)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"options must be Hydra overrides; got {' '.join(overrides)!r}: {first}") from None
    assert isinstance(composed, dict)
    return {str(key): value for key, value in composed.items()}
