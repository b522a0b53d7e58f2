"""The floor for small cells: what a policy's `min-count` lets leave of counts.

A number of examples below the floor does not leave, nor one from which it follows: by a total less the other cells, by
subtracting two answers, or by what the server lets count as one class. What cannot be floored is refused. A count with
noise under an epsilon that the policy limits is no small cell: the noise protects it, and says nothing exact.

Weights are no counts. Without differential privacy they can tell some: FedSGD's gradient of a bias has the numbers of
all classes.
"""

from collections.abc import Callable, Iterable, Mapping
from math import ceil, inf, isqrt
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict

from flwr_replay.config.run import RunConfig
from flwr_replay.data import Examples
from flwr_replay.errors import RefusedError
from flwr_replay.institution.owner import Institution
from flwr_replay.institution.policy import ADVICE, Policy
from flwr_replay.payloads.common import Evaluation, RollCall
from flwr_replay.payloads.replay import Kept
from flwr_replay.state.counts import ReleasedCounts
from flwr_replay.state.store import StateStore
from flwr_replay.wire.fields import Field
from flwr_replay.wire.payload import Payload, Request, asked_for
from flwr_replay.wire.records import config_in, metrics_in

__all__ = [
    "TESTED",
    "check_counts",
    "check_declared",
    "check_examples",
    "check_known",
    "check_options",
    "check_room",
    "check_tested",
    "check_tests",
    "floored",
    "released",
    "take_room",
]

TESTED = ("num-examples", "confusion", "hits")  # all that may leave of a test


def check_options(policy: Policy, config: RunConfig) -> None:
    """Refuse a run that lets the server choose which examples count, or whose answers count none."""
    if config.task.balanced:
        raise _refused(policy, "with task.balanced a number of examples is that of the smallest class: leave it out")
    if config.task.kind != "classification":
        raise _refused(
            policy, f"tests and sums of labels of a {config.task.kind} do not count examples: choose a classification"
        )


def check_tests(policy: Policy, config: RunConfig) -> None:
    """Refuse a run that asks for more tests than are allowed: it would fail at its last."""
    if (tests := _tests(policy, config)) > (most := policy.max_evaluations):
        asks = f"(max-evaluations); this run asks for {tests:,}: set evaluate-every={config.rounds} split=test"
        if policy.min_count:
            raise _refused(policy, f"two tests can be subtracted, so of all runs together {most:,} may leave {asks}")
        raise RefusedError(f"policy allows {most:,} tests in a run {asks}, {ADVICE}")


def _tests(policy: Policy, config: RunConfig) -> int:
    """Return how many tests a run asks for; of a serial one's forgetting, those of one institution."""
    if policy.allowed_metrics == "none":
        return 0
    times, external = ceil(config.rounds / config.evaluate_every), int(config.external)
    further = config.rounds * config.forgetting
    if config.split == "test":
        return times * (1 + config.evaluate_before_mixing + external) + further
    return (times + 1) * (1 + config.evaluate_before_mixing) + external + further


def check_declared(
    policy: Policy, answer: type[Payload], promise: Callable[[type[Payload], Field], float] | None
) -> None:
    """Refuse a declaration with a field that has small counts, or of which nobody can say how many examples it is of.

    `promise` is as of `Policy.check_release`.
    """
    for name, field in answer.declared().items():
        limits = [policy.max_epsilon, policy.max_local_epsilon if field.kind.startswith("per-sample") else None]
        most = max((limit for limit in limits if limit is not None), default=-inf)
        if field.dp and promise and promise(answer, field) <= most:
            continue
        if what := _uncounted(answer, field):
            raise _refused(
                policy, f"{answer.__name__}.{name} are {what}: choose dp=, with max-epsilon in the policy, or leave it"
            )


def _uncounted(answer: type[Payload], field: Field) -> str:
    """Say what a field is of which nobody knows how many examples it counts; empty if it is none such."""
    if field.kind.startswith("per-sample"):
        return "rows of single patients, whose labels can be counted"
    if field.means == "class sums":
        return "sums of features that the server's weights choose, so of any few examples"
    if field.kind == "statistic" and not (field.public or field.withheld or issubclass(answer, Evaluation)):
        return "numbers, and nobody can say of how many examples"
    return ""


def _sums(answers: Iterable[type[Payload]]) -> bool:
    """Say whether there are such sums among the answers; rows have an epsilon of all runs."""
    fields = ((answer, field) for answer in answers for field in answer.declared().values())
    return any(_uncounted(answer, field) and not field.kind.startswith("per-sample") for answer, field in fields)


def check_examples(policy: Policy, train: Examples) -> None:
    """Refuse to say the number of too few training examples."""
    if len(train) < policy.min_count:
        raise _refused(policy, f"it has fewer than {policy.min_count} training examples: take part with more")


def check_tested(policy: Policy, examples: int) -> None:
    """Refuse a test of too few examples."""
    if examples < (least := policy.min_count):
        raise _refused(policy, f"fewer than {least} examples were tested: test on more examples, or leave tests out")


def released(institution: Institution) -> ReleasedCounts:
    """Return the counts that have left in all runs."""
    return ReleasedCounts(institution.state, institution.policy.min_count, institution.policy.max_evaluations)


def check_room(policy: Policy, state: Path, config: RunConfig, answers: Iterable[type[Payload]]) -> None:
    """Refuse a run whose tests or sums could not leave since other runs' have, or may."""
    ReleasedCounts(state, policy.min_count, policy.max_evaluations).check_room(_tests(policy, config), _sums(answers))


def take_room(
    institution: Institution, config: RunConfig, run: str, request: type[Request] | None, asked: Mapping[str, Any]
) -> None:
    """Keep for a run at its roll call what it may ask for, before anyone trains; refuse as `check_room`.

    Later messages say that it goes on.
    """
    counts, own = released(institution), StateStore(institution).of_run(run)
    if request is RollCall:
        counts.check_room(_tests(institution.policy, config), _sums(asked_for(request, asked)), own)
    else:
        counts.goes_on(own)


def check_known(institution: Institution) -> None:
    """Refuse as `check_examples` and `ReleasedCounts.check_total` do, once the data were read."""
    if "data" in vars(institution):
        check_examples(institution.policy, institution.data.train)
        released(institution).check_total(len(institution.data.train))


def check_counts(institution: Institution, run: str, answer: type[Payload] | None, content: RecordDict) -> None:
    """Refuse an answer with a number of other training examples than all, or with numbers that are not declared."""
    metrics = metrics_in(content)
    policy, n = institution.policy, metrics.get("num-examples")
    if answer is None and (other := sorted({*metrics, *config_in(content)} - {"num-examples"})):
        raise _refused(policy, f"nobody can say of how many examples {other[0]} is: leave it out")
    check_known(institution)
    if answer and _sums([answer]):
        released(institution).sums(run)
    if n is None or (answer and issubclass(answer, Kept)):  # which counts others' examples
        return
    if n < policy.min_count or ("data" in vars(institution) and n != len(institution.data.train)):
        raise _refused(
            policy,
            "num-examples must be of all training examples; here it is of some: choose no classes, nor hold any out",
        )
    released(institution).check_total(int(n))


def floored(policy: Policy, reply: Message) -> dict[str, Any]:
    """Return what may leave of a test: all cells, if none is small; else right answers, or a lower bound of them.

    The bound says only that few are right, or few wrong (of few, it is 0): a good model must not end without its test.

    Raises
    ------
    RefusedError
        If there are few examples.
    """
    metrics, least = metrics_in(reply.content), policy.min_count
    cells, n = np.asarray(metrics.get("confusion", [])), metrics.get("num-examples", 0)
    if not len(cells) or isqrt(len(cells)) ** 2 != len(cells) or cells.sum() != n:
        raise _refused(policy, "a test has num-examples, and all of these in a square confusion: return both")
    right = int(cells.reshape(isqrt(len(cells)), -1).trace())
    check_tested(policy, n)
    if cells.min() >= least:
        return {"num-examples": n, "confusion": cells.tolist()}
    return {"num-examples": n, "hits": 0 if right < least or n < 2 * least - 1 else min(right, n - least + 1)}


def _refused(policy: Policy, why: str) -> RefusedError:
    return RefusedError(f"policy lets no count below {policy.min_count} leave (min-count); {why}")
