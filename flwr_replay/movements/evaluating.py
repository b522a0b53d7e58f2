"""What a run tests, when, and what it makes of the answers: on the test shards, and on further examples."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from statistics import fmean
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_replay.config.sections import require
from flwr_replay.errors import RunError, WireError
from flwr_replay.learning.tasks import Task
from flwr_replay.payloads.common import Evaluation, Trained
from flwr_replay.report.metrics import VALIDATION
from flwr_replay.server.exchange import Exchanger
from flwr_replay.server.members import Member
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import Weights

__all__ = ["SPLIT_OF", "EvaluateFn", "Evaluations", "Metrics", "RunState", "own_metrics", "trained_metrics"]

UNMIXED = "before-mixing"  # in place of a split: the test shards, with models from before they were averaged or mixed
UNMIXED_ON = {"test": UNMIXED, "validation": f"{VALIDATION}{UNMIXED}"}  # the same, by the split whose examples test

SPLIT_OF = {unmixed: split for split, unmixed in UNMIXED_ON.items()}

Metrics = dict[str, float]
Pooled = tuple[Metrics, dict[str, Metrics]]  # over all institutions, and of each
EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]


@dataclass(kw_only=True)
class RunState:
    """The arguments of a strategy's `start`, and the result that it will return, by rounds."""

    grid: Grid
    num_rounds: int
    train_config: ConfigRecord
    evaluate_config: ConfigRecord
    evaluate_fn: EvaluateFn | None
    done: int = 0  # exchanges that were made before the run was resumed
    result: Result = field(default_factory=Result)
    trainings: dict[int, list[MetricRecord]] = field(default_factory=dict)  # by round: of each of its exchanges

    def trained(self, number: int, metrics: MetricRecord) -> None:
        """Enter the metrics of an exchange's training under its round; those of several exchanges are averaged."""
        self.trainings.setdefault(number, []).append(metrics)
        every: dict[str, list[Any]] = {}
        for name, value in (pair for record in self.trainings[number] for pair in record.items()):
            every.setdefault(name, []).append(value)
        self.result.train_metrics_clientapp[number] = MetricRecord({name: fmean(v) for name, v in every.items()})


@dataclass
class FurtherTest:
    """A further test, with every evaluation or with the last alone; both results are recorded as one."""

    # external: on other institutions' test examples; one of `UNMIXED_ON`: models as they were trained; test: on the
    # test shards, where rounds are judged by validation examples
    split: str
    at_end: bool = False  # whether it is made with the last evaluation only
    metrics: Pooled | None = None  # the last metrics there


class Evaluations:
    """The evaluations of a run: every `evaluate_every` rounds and after the last, with further tests.

    `method` is the `Movement` whose models are tested.
    """

    def __init__(self, method: Any, exchanger: Exchanger) -> None:
        self.method, self.exchanger = method, exchanger
        self.members, self.recorder = exchanger.members, exchanger.recorder
        settings = exchanger.settings
        judged, unmixed = settings.split, settings.evaluate_before_mixing
        at_end = judged != "test"  # then nobody tests on test examples before
        self.further = [FurtherTest(UNMIXED_ON[judged])] if unmixed else []
        further = {"external": settings.external, UNMIXED_ON["test"]: unmixed and at_end, "test": at_end}
        self.further += [FurtherTest(split, at_end) for split, asked in further.items() if asked]

    def refuse(self, evaluate_fn: EvaluateFn | None) -> None:
        """Refuse a test at the server where it has no model that it can read."""
        require(
            evaluate_fn is None or self.method.traits().global_model,
            f"evaluate_fn needs a global model; {type(self.method).__name__} has none, and institutions test theirs "
            "(global_model=False in its Traits): omit it",
        )
        require(
            evaluate_fn is None or self.exchanger.settings.hiding.readable,
            "evaluate_fn needs weights that the server can read; in a sealed run it can read none: omit it",
        )

    @property
    def split(self) -> str:
        """The split that rounds are judged by; where no ClientApp is this package's, their own tests."""
        return self.exchanger.settings.split if self.members.ours else "test"

    def judging(self, exchange: int, arrays: Weights) -> Request:
        """Return the request to evaluate on the split that rounds are judged by."""
        request: Request = self.method.evaluation(exchange, arrays)
        return request if self.split == "test" else replace(request, split=self.split)  # type: ignore[call-arg]

    def testers(self) -> list[Member]:
        """Return the institutions that can test: with `fraction`, a model of its own is made when one first trains."""
        waiting = self.method.traits().own_models and self.exchanger.settings.fraction < 1
        return [member for member in self.members if not waiting or member.name in self.exchanger.trained]

    def requests(self, exchange: int, arrays: Weights) -> list[tuple[Member, Request]]:
        """Return the request of an evaluation for each of all that can test."""
        testers, split = self.testers(), self.split
        if len(testers) < len(self.members):
            self.recorder.log(f"{len(testers)} of {len(self.members)} institutions have trained a model to test so far")
        tested = [(member, self.method.tested_on(split, member, arrays)) for member in testers]
        return [(member, self.judging(exchange, weights)) for member, weights in tested if weights is not None]

    def if_due(self, run: RunState, exchange: int, arrays: ArrayRecord) -> None:
        """Have every institution evaluate, every `evaluate_every` rounds and after the last."""
        completed = self.method.round_of(exchange)
        last, goes_on = completed == run.num_rounds, self.method.round_of(exchange + 1) == completed
        if goes_on or not (last or completed % self.exchanger.settings.evaluate_every == 0):
            return
        at_end = last and self.split != "test"
        for test in self.further:
            if at_end or not test.at_end:
                test.metrics = self.test(run, exchange, arrays, test.split)
        if at_end and any(test.split == "test" and not test.metrics for test in self.further):
            raise self._untested()
        messages = self.method.configure_evaluate(exchange, arrays, run.evaluate_config, run.grid)
        replies = self.exchanger(run.grid, exchange, messages, needed=False)
        metrics = self.method.aggregate_evaluate(exchange, replies)
        if metrics is not None:
            run.result.evaluate_metrics_clientapp[completed] = metrics
        elif last and self.members.ours:
            raise self._untested()
        self.at_server(run, completed, arrays)

    def at_server(self, run: RunState, completed: int, arrays: ArrayRecord) -> None:
        """Have the user's `evaluate_fn` test the weights after a round; in round 0 the fresh ones, as Flower does."""
        if run.evaluate_fn and (central := run.evaluate_fn(completed, arrays)) is not None:
            run.result.evaluate_metrics_serverapp[completed] = central
            shown = (f"{name} {v if isinstance(v, list) else round(v, 4)}" for name, v in central.items())
            self.recorder.log(f"round {completed}, evaluate_fn: {', '.join(shown)}")

    def _untested(self) -> RunError:
        failures = self.recorder.failures_line()
        return RunError(f"no institution could evaluate the last round; {failures}: resume the run")

    def after_exchange(self, run: RunState, exchange: int, arrays: ArrayRecord, data_of: Sequence[str]) -> None:
        """With `forgetting`, test on each institution's own training examples: a row of the forgetting matrix."""
        if self.exchanger.settings.forgetting and (tested := self.test(run, exchange, arrays, "train")):
            self.recorder.forgetting_row(exchange, data_of, tested[1])

    def test(self, run: RunState, exchange: int, arrays: ArrayRecord, split: str) -> Pooled | None:
        """Have every institution test these weights on the examples of a split."""
        tested = [(m, self.method.tested_on(split, m, arrays)) for m in self.testers() if m.ours]
        requests = [(m, self.method.evaluation_on(split, exchange, w)) for m, w in tested if w is not None]
        messages = (self.exchanger.message(member, request, run.evaluate_config) for member, request in requests)
        replies = self.exchanger(run.grid, exchange, messages, needed=False)
        return self.pooled(exchange, replies, self.recorder.tested if split == "test" else {})

    def pooled(
        self, exchange: int, replies: Iterable[Message], sums: dict[str, Evaluation] | None = None
    ) -> Pooled | None:
        """Pool the answers to an evaluation: by sums, or by weighted means if no ClientApp is this package's.

        An invalid one counts as its sender's failure. `sums` is filled with the valid answers of this package's
        ClientApp, by institution, in place of what it holds. None if no answer is valid.
        """
        own: dict[str, Metrics] = {}
        evaluations: dict[str, Evaluation] = {} if sums is None else sums
        evaluations.clear()
        task, declared = self.exchanger.settings.task, self.method.evaluated
        for member, reply in self.exchanger.answers(replies):
            if member.ours and task is not None:
                try:
                    evaluation = declared.decode(reply.content)
                    check_evaluation(evaluation, task, self.exchanger.settings.input_shape)
                    if not evaluation.num_examples:  # it has no validation examples
                        continue
                    own[member.name] = declared.pool(task, [evaluation])
                    evaluations[member.name] = evaluation
                except WireError as error:
                    self.recorder.failed(exchange, member.name, str(error))
            else:
                own[member.name] = _scalars(reply)
        if not own:
            return None
        summed = task and evaluations
        return (declared.pool(task, [*evaluations.values()]) if summed else _weighted_means([*own.values()])), own

    def completed(self, exchange: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Pool the answers, add what the further tests have found, and record both."""
        tested = any(t.split == "test" and t.metrics for t in self.further)  # at the end, if not in every round
        sums = {} if tested else self.recorder.tested  # the recorder shows those of the test examples
        metrics = self.pooled(exchange, replies, sums)
        if metrics is None and not tested:
            return None
        metrics = metrics or ({}, {})  # nobody has validation examples
        if self.split != "test":
            metrics = with_further(({}, {}), metrics, f"{self.split}-")
            self.recorder.notes["validation-examples"] = sum(evaluation.num_examples for evaluation in sums.values())
        for test in self.further:  # metrics of test examples have plain names, others' begin with the split's
            if test.metrics and test.split == "test":
                metrics = with_further(test.metrics, metrics, "")
            elif test.metrics:
                metrics = with_further(metrics, test.metrics, f"{test.split}-")
        pooled, own = metrics
        self.recorder.evaluated(exchange, pooled, own)
        return MetricRecord(dict(pooled))

    def forecast(
        self, travelling: Weights, num_rounds: int, trains_in: Mapping[str, Sequence[int]]
    ) -> list[tuple[Member, Request, int]]:
        """Return the requests of all evaluations, and how often each is sent.

        `travelling` are the weights as they travel, `trains_in` the rounds in which an institution trains, by name.
        """
        rounds, every = range(1, num_rounds + 1), self.exchanger.settings.evaluate_every
        evaluated = {at for at in rounds if at % every == 0 or at == num_rounds}

        def tested(member: Member, unmixed: bool = False) -> Sequence[int]:
            trains = trains_in.get(member.name, [])
            own = rounds[min(trains, default=num_rounds + 1) - 1 :] if self.method.traits().own_models else rounds
            return trains if unmixed else own

        tests = [(self.judging(0, travelling), False, evaluated)]
        for test in self.further:
            request = self.method.evaluation_on(test.split, 0, travelling)
            tests.append((request, test.split in SPLIT_OF, {num_rounds} if test.at_end else evaluated))
        requests = [(m, request, len(at & {*tested(m, own)})) for request, own, at in tests for m in self.members]
        if self.exchanger.settings.forgetting:
            request, exchanges = self.method.evaluation_on("train", 0, travelling), self.method.exchanges_per_round()
            requests += [(member, request, len(tested(member)) * exchanges) for member in self.members]
        return requests


def check_evaluation(evaluation: Evaluation, task: Task, input_shape: tuple[int, ...] | None = None) -> None:
    """Refuse sums, of one model or of a pair, that no test shard can have: counts that do not add up.

    The shape of an example is needed for masks, which count pixels.
    """
    labels = task.blank_labels(1, input_shape or ())
    counted = evaluation.num_examples * labels.size if input_shape or labels.ndim == 1 else None
    blank = type(evaluation).empty(task)
    for item in fields(blank):
        wanted, value = getattr(blank, item.name), getattr(evaluation, item.name)
        if not isinstance(wanted, (list, tuple)) or not len(value):  # the task checks which of them must be there
            continue
        if len(value) != len(wanted):
            raise WireError(f"{item.name} must hold {len(wanted)} counts; got {len(value)}")
        if counted is not None and sum(value) != counted:
            raise WireError(f"{item.name} must count {counted} of {evaluation.num_examples} examples; got {sum(value)}")


def with_further(tested: Pooled, further: Pooled, prefix: str) -> Pooled:
    """Add the metrics of a further test to those on the test shards, under names with a prefix."""

    def named(metrics: Metrics) -> Metrics:
        return {f"{prefix}{name}": value for name, value in metrics.items()}

    (pooled, own), (further_pooled, further_own) = tested, further
    by_name = {name: {**own.get(name, {}), **named(further_own.get(name, {}))} for name in {**own, **further_own}}
    return {**pooled, **named(further_pooled)}, by_name


def trained_metrics(answered: Sequence[tuple[Trained, Metrics | None]]) -> MetricRecord:
    """Return what trainings report: our clients' mean loss, and of users' own ClientApps what they call theirs."""
    losses = [(a.train_loss, a.num_examples) for a, own in answered if own is None and a.train_loss is not None]
    total = sum(n for _, n in losses)
    metrics = {"train-loss": sum(loss * n for loss, n in losses) / total} if losses else {}
    own = [own for _, own in answered if own is not None]
    return MetricRecord({**metrics, **(_weighted_means(own) if own else {})})  # type: ignore[dict-item]


def own_metrics(member: Member, reply: Message) -> Metrics | None:
    """Return the metrics that a user's own ClientApp reports; None of ours."""
    return None if member.ours else _scalars(reply)


def _scalars(reply: Message) -> Metrics:
    records = (record for record in reply.content.values() if isinstance(record, MetricRecord))
    return {name: float(v) for record in records for name, v in record.items() if not isinstance(v, list)}


def _weighted_means(own: list[Metrics]) -> Metrics:
    """Average the metrics that all report, weighted by `num-examples`, 1 if it is missing."""
    shared = set.intersection(*(set(metrics) for metrics in own)) - {"num-examples"}
    weights = [metrics.get("num-examples", 1.0) for metrics in own]
    total = sum(weights)
    return {
        name: sum(w * metrics[name] for w, metrics in zip(weights, own, strict=True)) / total for name in sorted(shared)
    }
