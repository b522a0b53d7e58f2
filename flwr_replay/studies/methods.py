"""Parse a comparison as typed: methods with their own options, options for all methods, seeds."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain

from flwr_replay.config.catalogue import check_choice, choices, code_of, own_options
from flwr_replay.config.compose import SECTIONS, check_typed
from flwr_replay.config.own_code import allow
from flwr_replay.config.quoting import digits, key_of
from flwr_replay.config.run import RunConfig
from flwr_replay.errors import ConfigError, nearest

__all__ = [
    "Method",
    "methods_of",
    "named",
    "options_of",
    "own_option",
    "refuse_typos",
    "seeds_of",
    "seeds_told",
    "short_hash",
    "swept",
    "trial_options",
    "with_kept",
]

SEEDS = (0, 1, 2)
MOST_SEEDS = 1000
OPEN = re.compile(r"[^=]*=(auto|[^/'\"]*\.\.[^/'\"]*)")  # what is looked for before the comparison
OF_A_METHOD = (  # sections in which the methods may differ; of options with the same short name the last one is meant
    "task",
    "partition",
    "model",
    "prior",
    "generator",
    "replay",
    "privacy",
    "training",
)
OF_ALL = {  # options in which they may not, with the reason
    "preset": "a preset",
    "split": "what models are judged by",
    "external": "what models are judged by",
}
OURS = {  # options that a comparison sets itself, with what to write instead
    "strategy": "name the strategies before the options",
    "seed": "write seeds=3, seeds=0-4, or seeds=0,5,7",
    "runs_dir": "write --runs-dir DIR",
    "run_name": "cells are named by method and seed",
    "resume": "repeat the same command to continue",
}


@dataclass(frozen=True)
class Method:
    """One method of a comparison: a strategy with options of its own."""

    label: str  # as the user wrote it: fedreplay:cut=layer2
    strategy: str
    options: tuple[str, ...]  # of this method only, resolved: strategy.cut=layer2

    @property
    def slug(self) -> str:
        """A folder's name; a hash distinguishes options that differ only in special characters."""
        if not self.options:
            return self.strategy
        text = "-".join(option.removeprefix("strategy.") for option in self.options)
        slug = re.sub(r"[^a-z0-9.]+", "-", f"{self.strategy}-{text}".lower()).strip("-")
        plain = all(re.fullmatch(r"[a-z_.]+=[a-z0-9.]+", option) for option in self.options)
        return slug if plain and len(slug) < 80 else f"{slug[:60]}-{short_hash(list(self.options))}"


def short_hash(value: object) -> str:
    """Return eight hexadecimal digits of the SHA-256 of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def swept(names: Sequence[str], options: Sequence[str]) -> tuple[list[str], list[str]]:
    """Make a method of each value of an option with several, `lr=0.1|0.3`; return the methods and the other options.

    `fedreplay.cut=layer2|layer3` is for one method only. Quoted texts and paths are left as they are.

    >>> swept(["cwt", "deep := fedavg:width=9"], ["lr=0.1|0.3", "rounds=2"])[0]
    ['cwt:lr=0.1', 'cwt:lr=0.3', 'deep:lr=0.1 := fedavg:width=9:lr=0.1', 'deep:lr=0.3 := fedavg:width=9:lr=0.3']
    """
    methods, others = list(names), []
    allow(code for name in map(_strategy, names) for code in code_of(name))  # whoever compares it has named it
    for option in options:
        key, _, value = option.partition("=")
        if "|" not in value or set(value) & set("'\"/"):
            others.append(option)
            continue
        prefix, _, rest = key.partition(".")
        strategies = list(dict.fromkeys(map(_strategy, methods)))
        of_one = prefix in strategies
        if not of_one:
            _refuse_of_some(key.replace("-", "_"), value, strategies)
        ends = [f":{rest if of_one else key}={choice}" for choice in value.split("|")]
        several = [[name] if of_one and _strategy(name) != prefix else _ending(name, ends) for name in methods]
        methods = [name for variants in several for name in variants]
    return methods, others


def trial_options(options: Sequence[str], names: Sequence[str], tried: Sequence[str], seed: int) -> list[str]:
    """Return the options of trials: with one seed, and without those of strategies of which no method is tried.

    >>> trial_options(["rounds=2", "cwt.lr=1", "fedprox.mu=1", "seeds=3"], ["cwt:lr=1", "fedprox"], ["fedprox:lr=1"], 0)
    ['rounds=2', 'fedprox.mu=1', 'seeds=0,']
    """
    settled = {*map(_strategy, names)} - {*map(_strategy, tried)}
    left_out = ("seeds=", *(f"{strategy}." for strategy in settled))
    return [*(option for option in options if not option.startswith(left_out)), f"seeds={seed},"]


def with_kept(names: Sequence[str]) -> list[str]:
    """Return each method, and after it the same one whose optimizers keep their state from visit to visit.

    >>> with_kept(["fedavg", "gain := cwt:replay=vqvae2"])[1::2]
    ['fedavg, kept := fedavg:optimizer-state=keep', 'gain, kept := cwt:replay=vqvae2:optimizer-state=keep']
    """
    kept = [f"{label}, kept := {spec}:optimizer-state=keep" for label, spec in map(named, names)]
    return [name for pair in zip(names, kept, strict=True) for name in pair]


def _strategy(name: str) -> str:
    return named(name)[1].partition(":")[0]


def _ending(name: str, ends: Sequence[str]) -> list[str]:
    """Return a method with each of these options, its label with it, too."""
    label, spec = named(name)
    return [f"{label}{end} := {spec}{end}" if label != spec else f"{spec}{end}" for end in ends]


def options_of(options: Sequence[str], names: Sequence[str]) -> tuple[list[str], dict[str, list[str]], tuple[int, ...]]:
    """Return the options of all methods, those of each strategy (`fedreplay.cut=layer2`), and the seeds."""
    listed = list(dict.fromkeys(names))
    for name in listed:
        if "=" in name:
            raise ConfigError(f"the methods come first, without a name: compare fedavg,cwt rounds=5; got {name!r}")
        check_choice("strategy", name)
    sections = [field.name for field in fields(RunConfig)]
    shared: list[str] = []
    own: dict[str, list[str]] = {name: [] for name in listed}
    seeds: tuple[int, ...] = SEEDS
    for option in options:
        key, equals, value = option.partition("=")
        key = key.replace("-", "_")
        prefix, dot, rest = key.partition(".")
        if option in choices("strategy"):
            together = ",".join([*listed, option])
            raise ConfigError(f"methods are separated by commas, without blanks; got {option!r}: write {together}")
        if not equals or not key:
            raise ConfigError(f"an option is written key=value; got {option!r}")
        _refuse_ours(key, option)
        if key == "seeds":
            seeds = seeds_of(value)
        elif dot and prefix in listed:
            own[prefix].append(f"{rest}={value}")
        elif dot and prefix not in sections:
            known = [*listed, *sections]
            raise ConfigError(
                f"{option!r} must begin with a compared method or a section of options: {nearest(prefix, known)}"
            )
        else:
            _refuse_of_some(key, value, listed)
            shared.append(option)
    return shared, own, seeds


def _refuse_ours(key: str, option: str) -> None:
    """Refuse an option that a comparison sets itself."""
    if key in OURS:
        raise ConfigError(f"a comparison sets {key.replace('_', '-')} itself; got {option!r}: {OURS[key]}")


def seeds_of(text: str) -> tuple[int, ...]:
    """Read `seeds=`: how many, or a list with ranges; raise `ConfigError` if it is neither.

    >>> seeds_of("3"), seeds_of("31,"), seeds_of("0-2, 7")
    ((0, 1, 2), (31,), (0, 1, 2, 7))
    """
    rule = (
        f"seeds is a number from 1 to {MOST_SEEDS} (seeds=3: seeds 0, 1, 2) or a list without repetition "
        f"(seeds=0-4; seeds=0,5,7; seeds=31, is seed 31 alone); got {text[:80]!r}"
    )
    try:
        ranges = [
            [int(digits(end)) for end in span.split("-", 1)] for span in text.strip().removesuffix(",").split(",")
        ]
    except ValueError:
        raise ConfigError(rule) from None
    spans = [range(ends[0], ends[-1] + 1) for ends in ranges]
    if text.strip().isdecimal():
        spans = [range(ranges[0][0])]
    if not all(spans) or not 0 < sum(span.stop - span.start for span in spans) <= MOST_SEEDS:
        raise ConfigError(rule)
    numbers = tuple(chain.from_iterable(spans))
    if len({*numbers}) < len(numbers):
        raise ConfigError(rule)
    return numbers


def seeds_told(seeds: Sequence[int]) -> str:
    """Name seeds in rising order.

    >>> seeds_told([7]), seeds_told([7, 9]), seeds_told([0, 1, 2])
    ('seed 7', 'seeds 7, 9', 'seeds 0 to 2')
    """
    if len(seeds) > 2 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"seeds {seeds[0]} to {seeds[-1]}"
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _refuse_of_some(key: str, value: str, names: Sequence[str]) -> None:
    """Refuse an option for all methods that only some of them have."""
    plain = key.removeprefix("strategy.")
    knowing = [name for name in names if plain in own_options("strategy", name)]
    if knowing and len(knowing) < len(names):
        instead = " ".join(f"{name}.{plain.replace('_', '-')}={value}" for name in knowing)
        raise ConfigError(f"{key.replace('_', '-')} is an option of {', '.join(knowing)} only: write {instead}")


def methods_of(names: Sequence[str], own: dict[str, list[str]]) -> list[Method]:
    """Read `fedreplay`, `fedreplay:cut=layer2:patience=5` and `deep := fedreplay:cut=layer2`.

    A variant's own option wins over `fedreplay.cut=…`.
    """
    methods: list[Method] = []
    for name in names:
        label, spec = named(name)
        strategy, *variants = re.split(r":(?=[\w.-]+=)", spec)
        if ":" in strategy:
            raise ConfigError(f"a variant is written strategy:option=value; got {name!r}")
        pairs = [own_option(strategy, option) for option in variants]
        if twice := [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]:
            raise ConfigError(f"a variant sets an option once; got {twice[0]} twice in {name.strip()!r}: leave one")
        merged = dict([*(own_option(strategy, option) for option in own[strategy]), *pairs])
        method = Method(label, strategy, tuple(f"{key}={value}" for key, value in merged.items()))
        if any(method.slug == other.slug or label == other.label for other in methods):
            raise ConfigError(f"every method is compared once; got {name.strip()!r} twice: remove one")
        methods.append(method)
    return methods


def refuse_typos(strategies: Sequence[str], options: Sequence[str], tunes: bool) -> None:
    """Refuse what is wrong in a comparison as typed, before PyTorch is imported; ranges and `auto` are left out."""
    if not tunes and (ranged := next((option for option in options if OPEN.fullmatch(option) and ".." in option), "")):
        raise ConfigError(
            f"a range is searched by --tune; got {ranged}: add --tune 20, or write lr=auto or lr=0.1|0.01"
        )
    first = _strategy(strategies[0])
    for option in (option for option in options if OPEN.fullmatch(option) or "|" in option):
        full = _full_name(option, first)
        alike = [option] + [other for other in options if other != option and _full_name(other, first) == full]
        if len(alike) > 1:
            raise ConfigError(f"an option has one value, or several between bars; got {' and '.join(alike)}: keep one")
    strategies, options = swept(strategies, [option for option in options if not OPEN.fullmatch(option)])
    shared, own, _ = options_of(options, [named(name)[1].partition(":")[0] for name in strategies])
    for method in methods_of(strategies, own):
        check_typed([f"strategy={method.strategy}", *shared, *method.options])


def _full_name(option: str, strategy: str) -> str:
    try:
        return own_option(strategy, option)[0]
    except ConfigError:  # of one method, or of the comparison
        return key_of(option)


def named(name: str) -> tuple[str, str]:
    """Split `label := strategy:option=value` into label and method; without a label, the method is the label."""
    label, given, spec = name.partition(":=")
    return (label.strip(), spec.strip()) if given else (name.strip(), name.strip())


def own_option(strategy: str, option: str) -> tuple[str, str]:
    """Return an option of one method under its full name with its section, and its value."""
    key, _, value = option.partition("=")
    plain = key_of(option)
    _refuse_ours(plain, option)
    if plain == "seeds":
        raise ConfigError(f"seeds are of the whole comparison; got {option!r}: {OURS['seed']}")
    if plain in OF_ALL:
        raise ConfigError(
            f"{OF_ALL[plain]} holds for a whole comparison; got {plain}={value}: run a comparison for each {plain}"
        )
    sections = {name: [field.name for field in fields(SECTIONS[name]) if field.name != "name"] for name in OF_A_METHOD}
    sections["generator"] += [
        option for name in choices("generator") for option in sorted(own_options("generator", name))
    ]
    sections["strategy"] = sorted(own_options("strategy", strategy))
    full = {f"{section}.{name}" for section, names in sections.items() for name in names}
    short = {name: f"{section}.{name}" for section, names in sections.items() for name in names}  # the last one wins
    chosen = [field.name for field in fields(RunConfig) if field.name not in OURS]
    if plain in full or plain in chosen:
        return plain, value
    if plain in short:
        return short[plain], value
    known = [name.replace("_", "-") for name in [*short, *chosen]]
    raise ConfigError(f"unknown option {key!r} of the method {strategy}: {nearest(key, known)}")
