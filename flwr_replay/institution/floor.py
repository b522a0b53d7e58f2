"""The floor for small cells: what a policy's `min-count` lets leave of counts.

A number of examples below the floor does not leave, nor one from which it follows: by a total less the other cells, by
subtracting two answers, or by what the server lets count as one class. What cannot be floored is refused. A count with
noise under an epsilon that the policy limits is no small cell: the noise protects it, and says nothing exact.

Weights are no counts. Without differential privacy they can tell some: FedSGD's gradient of a bias has the numbers of
all classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, inf, isqrt
from typing import Any

import numpy as np
from flwr.app import Message

from flwr_replay.config.run import RunConfig
from flwr_replay.data import Examples
from flwr_replay.errors import RefusedError
from flwr_replay.institution.owner import Institution
from flwr_replay.institution.policy import Policy
from flwr_replay.payloads.common import Evaluation
from flwr_replay.payloads.replay import Kept
from flwr_replay.state.counts import Released
from flwr_replay.wire.fields import Field
from flwr_replay.wire.payload import Payload
from flwr_replay.wire.records import metrics_in

__all__ = [
    "TESTED",
    "Released",
    "check_counts",
    "check_declared",
    "check_examples",
    "check_known",
    "check_options",
    "floored",
]

TESTED = ("num-examples", "confusion", "hits")  # all that may leave of a test


def check_options(policy: Policy, config: RunConfig) -> None:
    """Refuse a run that lets the server choose which examples count, or that asks for more tests than are allowed."""
    if config.task.balanced:
        raise _refused(policy, "with task.balanced a number of examples is that of the smallest class: leave it out")
    each = 1 + config.external + config.evaluate_before_mixing
    tests = ceil(config.rounds / config.evaluate_every) * each + (config.split != "test")
    tests += config.rounds * config.forgetting
    if policy.allowed_metrics != "none" and tests > policy.max_evaluations:
        raise _refused(
            policy,
            f"two tests can be subtracted, so of all runs together {policy.max_evaluations:,} may leave "
            f"(max-evaluations); this run asks for {tests:,}: set evaluate-every={config.rounds} split=test",
        )


def check_declared(
    policy: Policy, answer: type[Payload], promise: Callable[[type[Payload], Field], float] | None, config: RunConfig
) -> None:
    """Refuse a declaration with a field that has small counts, or of which nobody can say how many examples it is of.

    `promise` is as of `Policy.check_release`.
    """
    if issubclass(answer, Evaluation) and config.task.kind != "classification":
        raise _refused(policy, f"tests of a {config.task.kind} do not count examples: leave tests out, metrics: none")
    for name, field in answer.declared().items():
        limits = [policy.max_epsilon, policy.max_local_epsilon if field.kind.startswith("per-sample") else None]
        most = max((limit for limit in limits if limit is not None), default=-inf)
        if field.dp and promise and promise(answer, field) <= most:
            continue
        what = ""
        if field.kind.startswith("per-sample"):
            what = "rows of single patients, whose labels can be counted"
        elif field.means == "class sums":
            what = "sums of features that the server's weights choose, so of any few examples"
        elif field.kind == "statistic" and not (field.public or field.withheld or issubclass(answer, Evaluation)):
            what = "numbers, and nobody can say of how many examples"
        if what:
            raise _refused(
                policy, f"{answer.__name__}.{name} are {what}: choose dp=, with max-epsilon in the policy, or leave it"
            )


def check_examples(policy: Policy, train: Examples, config: RunConfig) -> None:
    """Refuse to say the number of too few training examples, or sums of labels that have few values."""
    if len(train) < policy.min_count:
        raise _refused(policy, f"it has fewer than {policy.min_count} training examples: take part with more")
    if config.task.kind == "regression" and len(np.unique(train.y)) < policy.min_count:
        raise _refused(
            policy,
            f"its labels have fewer than {policy.min_count} values, so their sums are counts of classes: choose a "
            "classification",
        )


def released(institution: Institution) -> Released:
    """Return the counts that have left in all runs."""
    return Released(institution.state, institution.policy.min_count, institution.policy.max_evaluations)


def check_known(institution: Institution, config: RunConfig) -> None:
    """Refuse as `check_examples` and `flwr_replay.state.counts.Released.check_total` do, once the data were read."""
    if "data" in vars(institution):
        check_examples(institution.policy, institution.data.train, config)
        released(institution).check_total(len(institution.data.train))


def check_counts(
    institution: Institution, config: RunConfig, answer: type[Payload] | None, metrics: Mapping[str, Any]
) -> None:
    """Refuse an answer with a number of other training examples than all, or with numbers that are not declared."""
    policy, n = institution.policy, metrics.get("num-examples")
    if answer is None and (other := sorted(metrics.keys() - {"num-examples"})):
        raise _refused(policy, f"nobody can say of how many examples {other[0]} is: leave it out")
    check_known(institution, config)
    if n is None or (answer and issubclass(answer, Kept)):  # which counts others' examples
        return
    if n < policy.min_count or ("data" in vars(institution) and n != len(institution.data.train)):
        raise _refused(
            policy,
            "num-examples must be of all training examples; here it is of some: choose no classes, nor hold any out",
        )
    released(institution).check_total(int(n))


def floored(policy: Policy, reply: Message) -> dict[str, Any]:
    """Return what may leave of a test: all cells, if none is small; else right answers, unless few are right, or wrong.

    Raises
    ------
    RefusedError
        If there are few examples, or of these few are right, or few wrong.
    """
    metrics = metrics_in(reply.content)
    least, cells, n = policy.min_count, np.asarray(metrics.get("confusion", [])), metrics["num-examples"]
    right = int(cells.reshape(isqrt(len(cells)), -1).trace()) if len(cells) else 0
    for count, what in ((n, "were tested"), (right, "were classified rightly"), (n - right, "wrongly")):
        if count < least:
            raise _refused(policy, f"fewer than {least} examples {what}: test on more examples, or leave tests out")
    kept = {"num-examples": n, "confusion": cells.tolist()}
    return kept if cells.min() >= least else {"num-examples": n, "hits": right}


def _refused(policy: Policy, why: str) -> RefusedError:
    return RefusedError(f"policy lets no count below {policy.min_count} leave (min-count); {why}")
