"""`--tune N`: before a comparison, Optuna looks for each method's best values of some options, in N tries each.

`lr=0.001..0.1` is a range, and `lr=auto` that of `rates.RATES`. A try is a whole run with a seed that is not reported,
judged by its validation examples. All methods have as many tries: the default, seven more that fill the ranges evenly
(Sobol's sequence), then those of a tree-structured Parzen estimator. All follow from what was found before alone, so a
repeated command asks for the same ones, and tries that have finished are not repeated.

Under differential privacy a try spends epsilon like any run. The report says what all tries spend together: at most the
sums of their epsilons and deltas (Dwork and Roth 2014, doi 10.1561/0400000042, Theorem 3.16), by what its institutions
have stated and charged. One that fails is not tried again; one that is interrupted goes on from its checkpoint.
"""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf, isnan, nan
from operator import attrgetter
from pathlib import Path
from typing import Any

from scipy.stats.qmc import Sobol

from flwr_replay.config.compose import compose
from flwr_replay.config.quoting import NUMBER
from flwr_replay.config.run import RunConfig
from flwr_replay.engines.simulate import Simulation
from flwr_replay.errors import ConfigError
from flwr_replay.files.atomic import alone, make_folder, read_text
from flwr_replay.files.disk import there
from flwr_replay.privacy.accounting import rounded_up
from flwr_replay.report.comparison import of_data
from flwr_replay.report.metrics import VALIDATION, Stated, largest
from flwr_replay.report.run_files import RUN_ID, read_result
from flwr_replay.runs.opening import ENDED
from flwr_replay.studies.cells import Cell, run_all
from flwr_replay.studies.compare import planned, run_comparisons
from flwr_replay.studies.methods import named, own_option, swept, trial_options
from flwr_replay.studies.rates import AUTO, RATES

__all__ = ["compare_tuned"]

RANGE = re.compile(r"([\w.-]+)=(?=.*[^.])([^/'\"]*?)\.\.([^/'\"]*)")  # a path or a quoted text is none
SUCH = "write one such as lr=0.001..0.1"
EVEN = 8  # tries, the first ones
LOGARITHMIC = 10  # times the lower end that the upper one is, from which a range is searched by powers of ten
Ends = Sequence[str]  # low and high of a range, as short as the values between them
Space = dict[str, Any]  # by option, Optuna's distribution


def compare_tuned(
    strategies: list[str], options: list[str], against: str, jobs: int, runs_dir: Path, metric: str, tries: int
) -> tuple[str, dict[str, Any]]:
    """Tune methods, each in so many tries, and compare them; all else is as of `compare_strategies`.

    Raises
    ------
    ConfigError
        Also for what cannot be tuned; before any try.
    """
    import optuna  # takes a second

    if tries < 1:
        raise ConfigError(f"--tune must be at least 1; got {tries}")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    against = against or (named(strategies[0])[0] if len(strategies) == 1 else "")
    strategies, options = swept(strategies, options)
    methods = dict(map(named, strategies))
    ranges, fixed = _ranges(methods, options)
    whole = planned(strategies, fixed, against, runs_dir, metric)  # refused before any try
    if compose(list(whole.cells[0].overrides)).split != "validation":
        raise ConfigError("--tune chooses by validation examples; got split=test: write split=validation")
    metric, seed, more = whole.about["metric"], max(whole.about["seeds"]) + 1, whole.about["higher-is-better"]
    judge = VALIDATION + metric.removeprefix(VALIDATION)
    ends = [
        _with(label, methods[label], dict(zip(own, end, strict=True)), tried=True)
        for label, own in ranges.items()
        for end in zip(*own.values(), strict=True)
    ]
    words = trial_options(fixed, strategies, ends, seed)
    planned(ends, words, "", runs_dir, metric)  # an end that the option does not allow is refused, too
    way = optuna.study.StudyDirection.MAXIMIZE if more else optuna.study.StudyDirection.MINIMIZE
    sampler, new, failed = optuna.samplers.TPESampler, optuna.create_study, optuna.trial.TrialState.FAIL
    studies = {label: new(direction=way, sampler=sampler(seed=0, n_startup_trials=EVEN)) for label in ranges}
    spaces: dict[str, Space] = {}
    for label, config in ((cell.method.label, compose(list(cell.overrides))) for cell in whole.cells[: len(methods)]):
        if label in ranges:
            usual = {option: _default(config, option) for option in ranges[label]}
            spaces[label] = {option: _space(usual[option], *ends) for option, ends in ranges[label].items()}
            for values in _even(spaces[label], usual):
                studies[label].enqueue_trial(values)
    outcomes_by_label: dict[str, dict[str, dict[str, Any]]] = {label: {} for label in spaces}  # then by the try's name
    spent: dict[str, Stated | None] = {}  # what tries under DP have cost, by their names
    for _ in range(tries):
        asked = {label: studies[label].ask(space) for label, space in spaces.items()}
        names = {label: _with(label, methods[label], trial.params, tried=True) for label, trial in asked.items()}
        plan = planned([*names.values()], words, "", runs_dir, metric, "tuning")
        with alone(make_folder(plan.runs, "--runs-dir")):
            outcomes: dict[Path, dict[str, Any]] = {
                cell.folder: {"error": why} for cell in plan.cells if (why := _failed_before(cell))
            }
            if others := [replace(cell, metric=judge) for cell in plan.cells if cell.folder not in outcomes]:
                outcomes |= run_all(others, jobs)
        for (label, trial), cell in zip(asked.items(), plan.cells, strict=True):
            outcomes_by_label[label][names[label]] = outcome = outcomes[cell.folder]
            if compose(list(cell.overrides)).privacy.mechanisms:
                spent[names[label]] = _charged(cell)
            value = outcome["result"]["final"]["global"].get(judge, nan) if "result" in outcome else nan
            studies[label].tell(trial, None if isnan(value) else value, failed if isnan(value) else None)
    told, best = [], dict(zip(methods, strategies, strict=True))
    for label, study in studies.items():
        if len({trial.value for trial in study.trials} - {None}) > 1:  # else the default is as good
            best[label] = _with(label, methods[label], study.best_params)
            told.append(_with(label, "", study.best_params, tried=True).partition(" := ")[0])
    tried = {name: outcome for own in outcomes_by_label.values() for name, outcome in own.items()}
    shown = [name for name in tried if "result" in tried[name] or name not in spent]  # others would cost again
    every = [planned(shown, words, "", runs_dir, metric, "tuning")] if shown else []
    folder = "".join(f": {report['folder']}" for _, report in run_comparisons(every, jobs))  # a page of all tries
    fewer = [f"{label} {len(own)}" for label, own in outcomes_by_label.items() if len(own) < tries]
    different = f" (different ones: {', '.join(fewer)})" * bool(fewer)
    line = (
        f"--tune: {'; '.join(told) or 'all tries are alike, or failed'}; of {tries} tries each{different} the "
        f"best by {judge} with seed {seed}, which is not reported; {_costs(outcomes_by_label, spent)}{folder}"
    )
    tuned = sorted({option.rpartition(".")[2] for space in spaces.values() for option in space})
    whole = planned([*best.values()], fixed, against, runs_dir, metric, tuned=tuned)
    return run_comparisons([replace(whole, about=whole.about | {"rates": line})], jobs)[0]


def _ranges(methods: Mapping[str, str], options: Sequence[str]) -> tuple[dict[str, dict[str, Ends]], list[str]]:
    """Return what is searched for each method, by label and option, and the options without a range.

    A method's own value wins: `fedavg,cwt:lr=1 lr=0.01..0.1` searches for FedAvg's rate only.
    """
    searched: dict[str, dict[str, Ends]] = {label: {} for label in methods}
    options = [f"lr={RATES[0]}..{RATES[-1]}" if option in AUTO else option for option in options]
    ranges = {option: match.groups() for option in options if (match := RANGE.fullmatch(option))}
    for option, (_, low, high) in ranges.items():
        if not (NUMBER.fullmatch(low) and NUMBER.fullmatch(high) and float(low) < float(high)):
            raise ConfigError(f"a range is low..high, two numbers; got {option}: {SUCH}")
    fixed = [option for option in options if option not in ranges]
    for label, spec in methods.items():
        strategy, *own = re.split(r":(?=[\w.-]+=)", spec)
        own += [option.removeprefix(f"{strategy}.") for option in fixed if option.startswith(f"{strategy}.")]
        others = {each.partition(":")[0] for each in methods.values()} - {strategy}
        for option, (key, *ends) in ranges.items():
            if key.partition(".")[0] in others:
                continue
            full, _ = own_option(strategy, f"{key.removeprefix(f'{strategy}.')}=")
            if full in searched[label]:
                raise ConfigError(f"an option has one range; {full} of {label} has two, also {option}: leave one out")
            if of_data(full):
                raise ConfigError(f"what is tuned is no option of the data; got {option}: write one value")
            if full not in {own_option(strategy, each)[0] for each in own}:
                searched[label][full] = [end if end.isdecimal() else _short(float(end)) for end in ends]
    if not any(searched.values()):
        raise ConfigError(f"--tune is for options with a range that no method sets itself; got {options}: {SUCH}")
    return {label: ranges for label, ranges in searched.items() if ranges}, fixed


def _default(config: RunConfig, option: str) -> float | None:
    """Return an option's value without tuning; None: what is chosen has no such option, or no number by default."""
    with suppress(AttributeError):
        value = attrgetter(option)(config)
        return value if type(value) in (int, float) else None
    return None


def _space(usual: float | None, *ends: str) -> Any:
    from optuna.distributions import FloatDistribution, IntDistribution

    low, high = map(float, ends)
    log, whole = high >= LOGARITHMIC * low > 0, all(end.isdecimal() for end in ends) and not isinstance(usual, float)
    return IntDistribution(int(low), int(high), log) if whole else FloatDistribution(low, high, log)


def _even(space: Space, usual: Mapping[str, float | None]) -> Iterator[dict[str, float]]:
    """Yield the first tries: the default, or the end of the range next to it, then those that fill the ranges."""
    if None not in usual.values():
        yield {o: sorted((span.low, usual[o], span.high))[1] for o, span in space.items()}
    for point in Sobol(len(space), scramble=False).random(EVEN)[1:]:
        yield {
            o: type(span.low)(
                span.low * (span.high / span.low) ** at if span.log else span.low + (span.high - span.low) * at
            )
            for (o, span), at in zip(space.items(), point.tolist(), strict=True)
        }


def _short(value: float) -> str:
    return f"{value:.3g}"


def _with(label: str, spec: str, values: Mapping[str, float | str], tried: bool = False) -> str:
    """Return a method with values of its own, as a comparison takes it; a try's name says them."""
    own = [f"{key}={_short(value) if isinstance(value, float) else value}" for key, value in values.items()]
    return f"{', '.join([label, *own]) if tried else label} := {':'.join([spec, *own])}"


def _charged(cell: Cell) -> Stated | None:
    """Return what institutions have stated of a try, and what their accounts say, who gave no answer, too."""
    if not there(cell.folder / RUN_ID):
        return None
    accounts = Simulation.of(compose(list(cell.overrides))).accounts(cell.folder).values()
    charged = [{"epsilon": own.stated_epsilon, "delta": own.delta} for own in accounts if own.mechanisms]
    return largest([*charged, *(read_result(cell.folder)["privacy"].values() if cell.done else ())])


def _failed_before(cell: Cell) -> str:
    """Say, to the user too, why a try is not repeated: it has failed, or left no checkpoint, and has spent epsilon."""
    ended = cell.folder / ENDED
    why = read_text(ended).strip() if there(ended) else "killed"
    if cell.done or (cell.begun and not why.startswith("failed")) or not _charged(cell):
        return ""
    print(f"tuning, {cell.method.label} is not tried again, as it has spent epsilon: {why}", file=sys.stderr)
    return why


def _costs(outcomes_by_label: Mapping[str, Mapping[str, Mapping[str, Any]]], spent: Mapping[str, Stated | None]) -> str:
    """Say what the tries of each method cost: examples, and epsilon where there is noise."""
    examples, failed, prices = 0, 0, []
    for label, outcomes in outcomes_by_label.items():
        examples += sum(outcome["result"]["examples-seen"] for outcome in outcomes.values() if "result" in outcome)
        failed += sum("error" in outcome and bool(spent.get(name)) for name, outcome in outcomes.items())
        if stated := [account for name in outcomes if (account := spent.get(name))]:
            epsilon = rounded_up(sum(inf if account.epsilon is None else account.epsilon for account in stated))
            prices.append(f"{label} {epsilon} at delta {rounded_up(sum(account.delta for account in stated), 2)}")
    price = f" and spent epsilon beside that of a run: {', '.join(prices)} (basic composition)" if prices else ""
    more = f"; {failed} of them failed, which counts, and are not tried again" if failed else ""
    return f"these tries saw {examples:,} examples{price}{more}"
