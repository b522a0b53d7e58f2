"""Checks the answers to an evaluation and pools their metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields

from flwr.app import Message

from flwr_replay.errors import WireError
from flwr_replay.learning.tasks import Task
from flwr_replay.payloads.common import Evaluation
from flwr_replay.server.members import Member

__all__ = ["Pooled", "check_evaluation", "pool_answers", "with_further"]

Metrics = dict[str, float]
Pooled = tuple[Metrics, dict[str, Metrics]]


def pool_answers(
    answers: Iterable[tuple[Member, Message]],
    task: Task | None,
    refuse: Callable[[str, str], None],
    declared: type[Evaluation] = Evaluation,
    input_shape: tuple[int, ...] | None = None,
    tested: dict[str, Evaluation] | None = None,
) -> Pooled | None:
    """Pool over the test shards: by sums, or by weighted means if no institution runs this package's ClientApp.

    Parameters
    ----------
    answers : iterable of pairs
        Institutions with their replies.
    task : Task | None
        See `flwr_replay.learning.tasks`; None: metrics are used as reported.
    refuse : Callable[[str, str], None]
        Called with the name of an institution whose answer is invalid, and the reason.
    declared : type[Evaluation]
        The payload of an answer.
    input_shape : tuple of int | None
        The shape of one example, if it is known.
    tested : dict of str to Evaluation, or None
        Is filled with the valid answers of this package's ClientApp, by institution, in place of what it holds.

    Returns
    -------
    pooled : dict of str to float
        Metrics over all institutions.
    own : dict of str to dict
        Metrics of each institution. In place of both, None if no answer is valid.
    """
    own: dict[str, Metrics] = {}
    evaluations: dict[str, Evaluation] = {} if tested is None else tested
    evaluations.clear()
    for member, reply in answers:
        if member.ours and task is not None:
            try:
                evaluation = declared.decode(reply.content)
                check_evaluation(evaluation, task, input_shape)
                if not evaluation.num_examples:  # it has no validation examples
                    continue
                own[member.name] = declared.pool(task, [evaluation])
                evaluations[member.name] = evaluation
            except WireError as error:
                refuse(member.name, str(error))
        else:
            own[member.name] = _scalars(reply)
    if not own:
        return None
    pooled = (
        declared.pool(task, list(evaluations.values())) if task and evaluations else _weighted_means(list(own.values()))
    )
    return pooled, own


def check_evaluation(evaluation: Evaluation, task: Task, input_shape: tuple[int, ...] | None = None) -> None:
    """Refuse sums that no test shard can have.

    Parameters
    ----------
    evaluation : Evaluation
        The answer, of one model or of a pair.
    task : Task
        See `flwr_replay.learning.tasks`; its empty evaluation shows which fields must be there.
    input_shape : tuple of int | None
        The shape of one example; needed for masks, which count pixels.

    Raises
    ------
    WireError
        If counts do not add up.
    """
    labels = task.blank_labels(1, input_shape or ())
    counted = evaluation.num_examples * labels.size if input_shape or labels.ndim == 1 else None
    blank = type(evaluation).empty(task)
    for field in fields(blank):
        wanted, value = getattr(blank, field.name), getattr(evaluation, field.name)
        if not isinstance(wanted, (list, tuple)) or not len(value):  # the task checks which of them must be there
            continue
        if len(value) != len(wanted):
            raise WireError(f"{field.name} must hold {len(wanted)} counts; got {len(value)}")
        if counted is not None and sum(value) != counted:
            raise WireError(
                f"{field.name} must count {counted} of {evaluation.num_examples} examples; got {sum(value)}"
            )


def with_further(found: Pooled, further: Pooled, prefix: str) -> Pooled:
    """Add the metrics of a further test to those on the test shards, under names with a prefix."""

    def named(metrics: Metrics) -> Metrics:
        return {f"{prefix}{name}": value for name, value in metrics.items()}

    (pooled, own), (further_pooled, further_own) = found, further
    both = {name: {**own.get(name, {}), **named(further_own.get(name, {}))} for name in {**own, **further_own}}
    return {**pooled, **named(further_pooled)}, both


def _scalars(reply: Message) -> Metrics:
    records = reply.content.metric_records.values()
    return {name: float(v) for record in records for name, v in record.items() if not isinstance(v, list)}


def _weighted_means(own: list[Metrics]) -> Metrics:
    """Average the metrics that all report, weighted by `num-examples`, 1 if it is missing."""
    shared = set.intersection(*(set(metrics) for metrics in own)) - {"num-examples"}
    weights = [metrics.get("num-examples", 1.0) for metrics in own]
    total = sum(weights)
    return {
        name: sum(w * metrics[name] for w, metrics in zip(weights, own, strict=True)) / total for name in sorted(shared)
    }
