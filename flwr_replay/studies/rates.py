"""`lr=auto`: before a comparison, every method runs with five learning rates on the first seed, and keeps the best.

The best is that with the best metric on validation examples at the end. The trials are runs of the comparison like all
others: the same for every method, nothing travels but what it sends anyway, and the best one counts as the first
seed's. Trials are whole runs: after two rounds of ten on digits at KS 0.9, CWT's best rate by validation loss was
0.0003, whose accuracy at the end is 0.818; that of 0.003 is 0.903 (three seeds).
"""

from collections.abc import Container, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from flwr_replay.errors import ConfigError
from flwr_replay.report.metrics import VALIDATION
from flwr_replay.studies.methods import SEEDS, named, seeds_of, trial_options

__all__ = ["AUTO", "refuse", "trials", "with_rates"]

RATES = ("0.001", "0.003", "0.01", "0.03", "0.1")
AUTO = frozenset({"lr=auto", "training.lr=auto"})


def trials(names: Sequence[str], options: Sequence[str], still: Container[str] = ()) -> tuple[list[str], list[str]]:
    """Return the trials, each method with each rate, and their options.

    A method with a rate of its own has none, and no method whose label says that it takes no steps, `still`.

    >>> trials(["cwt", "a := fedavg:lr=1"], ["rounds=9", "seeds=5-7"])[0][3:]
    ['cwt, lr 0.03 := cwt:lr=0.03', 'cwt, lr 0.1 := cwt:lr=0.1']
    >>> trials(["cwt"], ["rounds=9", "seeds=5-7"])[1]
    ['rounds=9', 'seeds=5,']
    """
    methods = [(label, spec) for label, spec in map(named, names) if not _has_own(spec, options) and label not in still]
    if not methods:
        raise ConfigError(
            "lr=auto is for methods that need an lr; here each has its own, or takes no steps: leave it out"
        )
    tried = [f"{_label(label, rate)} := {spec}:lr={rate}" for label, spec in methods for rate in RATES]
    seeds = [seeds_of(option.partition("=")[2]) for option in options if option.startswith("seeds=")]
    return tried, trial_options(options, names, tried, [SEEDS, *seeds][-1][0])


def refuse(split: str, noise: Mapping[str, Sequence[object]]) -> None:
    """Refuse trials that no validation examples judge, or in which institutions, by method, train with noise."""
    if split != "validation":
        raise ConfigError("lr=auto chooses by validation examples; got split=test: write split=validation")
    if private := [label.partition(", lr ")[0] for label, entries in noise.items() if entries]:
        raise ConfigError(
            f"lr=auto tries {len(RATES)} rates, and under differential privacy each would be charged; got "
            f"{private[0]}: give it a rate of its own, as in proxyfl:lr=0.01"
        )


def with_rates(names: Sequence[str], report: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return the methods with their rates, and a line on the trials, whose comparison is `report`.

    A method keeps its default where no trial's metric is finite, or all are the same. The trials' folder is told as
    seen from the comparison's page.
    """
    metric, best = f"{VALIDATION}{report['metric']}", max if report["higher-is-better"] else min
    metrics: dict[str, float] = {}
    for cell in report["cells"]:
        value = cell.get("result", {"final": {"global": {}}})["final"]["global"].get(metric, float("nan"))
        metrics |= {cell["label"]: value} if isfinite(value) else {}
    rated, told = [], []
    for name in names:
        label, spec = named(name)
        figures = {rate: metrics[_label(label, rate)] for rate in RATES if _label(label, rate) in metrics}
        if len({*figures.values()}) < 2:
            rated.append(name)
            own = not {_label(label, rate) for rate in RATES} & {cell["label"] for cell in report["cells"]}
            told.append(f"{label} {'its own or none' if own else 'its default, as no rate was better than another'}")
            continue
        rate = best(figures, key=lambda rate: figures[rate])
        rated.append(f"{label} := {spec}:lr={rate}")
        told.append(f"{label} {rate}" + (" (an end of what was tried)" if rate in (RATES[0], RATES[-1]) else ""))
    examples = sum(cell["result"]["examples-seen"] for cell in report["cells"] if "result" in cell)
    return rated, (
        f"lr=auto: {', '.join(told)}; best of {', '.join(RATES)} by {metric} with seed {report['seeds'][0]}; these "
        f"trials saw {examples:,} examples: ../{Path(report['folder']).name}"
    )


def _label(label: str, rate: str) -> str:
    return f"{label}, lr {rate}"


def _has_own(spec: str, options: Sequence[str]) -> bool:
    strategy, *own = spec.split(":")
    own += [option.removeprefix(f"{strategy}.") for option in options if option.startswith(f"{strategy}.")]
    return any(option.startswith(("lr=", "training.lr=")) for option in own)
