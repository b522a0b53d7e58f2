"""What a run tests, when, and what it makes of the answers; its observers have models tested on further examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar, Protocol

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flwr_replay.config.sections import require
from flwr_replay.errors import RunError
from flwr_replay.movements.run import EvaluateFn, RunState
from flwr_replay.payloads.common import Evaluation
from flwr_replay.report.judged import VALIDATION
from flwr_replay.server.evaluation import Pooled, pool_answers, with_further
from flwr_replay.server.exchange import Exchanger
from flwr_replay.server.members import Member
from flwr_replay.server.recorder import Recorder
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import Weights

__all__ = ["SPLIT_OF", "UNMIXED_ON", "Evaluations"]

UNMIXED = "before-mixing"  # in place of a split: the test shards, with models from before they were averaged or mixed
UNMIXED_ON = {"test": UNMIXED, "validation": f"{VALIDATION}{UNMIXED}"}  # the same, by the split whose examples test

SPLIT_OF = {unmixed: split for split, unmixed in UNMIXED_ON.items()}

TestOn = Callable[[str], Pooled | None]  # has every institution test the current model on its examples of a split


class Observer:
    """Base of the observers; it does nothing."""

    split: str  # the split on which it tests
    at_end: bool = False  # whether it tests with the last evaluation only
    found: Pooled | None = None  # the last metrics there

    def forecast(self, exchanges: int, evaluations: int) -> int:
        """Return the number of tests in a run, given its numbers of training exchanges and of evaluations with it."""
        return 0

    def after_exchange(self, exchange: int, data_of: Sequence[str], test_on: TestOn) -> None:
        """Observe the weights after an exchange that trained on the data of these institutions."""

    def before_evaluation(self, test_on: TestOn) -> None:
        """Observe the weights before they are tested on the test shards."""

    def completed(self, found: Pooled) -> Pooled:
        """Add the observed metrics to those of an evaluation."""
        return found


class Forgetting(Observer):
    """After every exchange, tests on each institution's own training examples: a row of the forgetting matrix."""

    split = "train"

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def forecast(self, exchanges: int, evaluations: int) -> int:
        """Return one test for each exchange."""
        return exchanges

    def after_exchange(self, exchange: int, data_of: Sequence[str], test_on: TestOn) -> None:
        """Test, and record the row."""
        if found := test_on(self.split):
            self.recorder.forgetting_row(exchange, data_of, found[1])


class FurtherTests(Observer):
    """With every evaluation, tests once more; both results are recorded as one.

    Parameters
    ----------
    split : str
        `external`: on other institutions' test examples; one of `UNMIXED_ON`: models as they were trained; `test`: on
        the test shards, where rounds are judged by validation examples.
    at_end : bool
        Whether to test with the last evaluation only.
    """

    def __init__(self, split: str, at_end: bool = False) -> None:
        self.split, self.at_end = split, at_end

    def forecast(self, exchanges: int, evaluations: int) -> int:
        """Return one test for each evaluation."""
        return evaluations

    def before_evaluation(self, test_on: TestOn) -> None:
        """Test, and keep the metrics for `completed`."""
        self.found = test_on(self.split)

    def completed(self, found: Pooled) -> Pooled:
        """Add the further metrics: those of test examples under plain names, others' begin with the split's."""
        if self.found is None:
            return found
        if self.split == "test":
            return with_further(self.found, found, "")
        return with_further(found, self.found, f"{self.split}-")


class EvaluatingMethod(Protocol):
    """What a method decides about its evaluations."""

    evaluated: ClassVar[type[Evaluation]]
    own_models: ClassVar[bool]
    global_model: ClassVar[bool]

    def exchanges_per_round(self) -> int:
        """Return how many exchanges make a round."""

    def evaluation(self, exchange: int, arrays: Weights) -> Request:
        """Return the request to evaluate."""

    def evaluation_on(self, split: str, exchange: int, arrays: Weights) -> Request:
        """Return the request to evaluate on a split."""

    def tested_on(self, split: str, member: Member, arrays: ArrayRecord) -> ArrayRecord | None:
        """Return the weights that an institution is to test."""

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of an evaluation."""

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Pool the answers."""


class Evaluations:
    """The evaluations of a run: every `evaluate_every` rounds and after the last, with its observers' further tests.

    Parameters
    ----------
    method : EvaluatingMethod
        Whose models are tested.
    exchanger : Exchanger
        Has the members and the settings, and makes the exchanges.
    """

    def __init__(self, method: EvaluatingMethod, exchanger: Exchanger) -> None:
        self.method, self.exchanger = method, exchanger
        self.members, self.recorder = exchanger.members, exchanger.recorder
        settings = exchanger.settings
        judged, unmixed = settings.split, settings.evaluate_before_mixing
        at_end = judged != "test"  # then nobody tests on test examples before
        self.observers: list[Observer] = [FurtherTests(UNMIXED_ON[judged])] if unmixed else []
        further = {"external": settings.external, UNMIXED_ON["test"]: unmixed and at_end, "test": at_end}
        self.observers += [FurtherTests(split, at_end) for split, asked in further.items() if asked]
        self.observers += [Forgetting(self.recorder)] if settings.forgetting else []

    def refuse(self, evaluate_fn: EvaluateFn | None) -> None:
        """Refuse a test at the server where it has no model that it can read."""
        require(
            evaluate_fn is None or self.method.global_model,
            f"evaluate_fn needs a global model; {type(self.method).__name__} has none, and institutions test theirs: "
            "omit it",
        )
        require(
            evaluate_fn is None or not self.exchanger.settings.sealed,
            "evaluate_fn needs weights that the server can read; in a sealed run it can read none: omit it",
        )

    @property
    def split(self) -> str:
        """The split that rounds are judged by; where no ClientApp is this package's, their own tests."""
        return self.exchanger.settings.split if self.members.ours else "test"

    def judging(self, exchange: int, arrays: Weights) -> Request:
        """Return the request to evaluate on the split that rounds are judged by."""
        request = self.method.evaluation(exchange, arrays)
        return request if self.split == "test" else replace(request, split=self.split)  # type: ignore[call-arg]

    def testers(self) -> list[Member]:
        """Return the institutions that can test: with `fraction`, a model of its own is made when one first trains."""
        waiting = self.method.own_models and self.exchanger.settings.fraction < 1
        return [member for member in self.members if not waiting or member.name in self.exchanger.trained]

    def requests(self, exchange: int, arrays: Weights) -> list[tuple[Member, Request]]:
        """Return the request of an evaluation for each of all that can test."""
        request, testers = self.judging(exchange, arrays), self.testers()
        if len(testers) < len(self.members):
            self.recorder.log(f"{len(testers)} of {len(self.members)} institutions have trained a model to test so far")
        return [(member, request) for member in testers]

    def if_due(self, run: RunState, exchange: int, arrays: ArrayRecord) -> None:
        """Have every institution evaluate, every `evaluate_every` rounds and after the last."""
        completed, rest = divmod(exchange, self.method.exchanges_per_round())
        last = completed == run.num_rounds
        if rest or not (last or completed % self.exchanger.settings.evaluate_every == 0):
            return
        at_end = last and self.split != "test"
        for observer in self.observers:
            if at_end or not observer.at_end:
                observer.before_evaluation(partial(self.test, run, exchange, arrays))
        if at_end and any(one.split == "test" and not one.found for one in self.observers):
            raise self._untested()
        messages = self.method.configure_evaluate(exchange, arrays, run.evaluate_config, run.grid)
        replies = self.exchanger(run.grid, exchange, messages, needed=False)
        metrics = self.method.aggregate_evaluate(exchange, replies)
        if metrics is not None:
            run.result.evaluate_metrics_clientapp[completed] = metrics
        elif last and self.members.ours:
            raise self._untested()
        if run.evaluate_fn and (central := run.evaluate_fn(completed, arrays)) is not None:
            run.result.evaluate_metrics_serverapp[completed] = central

    def _untested(self) -> RunError:
        failures = self.recorder.failures_line()
        return RunError(f"no institution could evaluate the last round; {failures}: resume the run")

    def after_exchange(self, run: RunState, exchange: int, arrays: ArrayRecord, data_of: Sequence[str]) -> None:
        """Tell the observers the weights after an exchange that trained on the data of these institutions."""
        for observer in self.observers:
            observer.after_exchange(exchange, data_of, partial(self.test, run, exchange, arrays))

    def test(self, run: RunState, exchange: int, arrays: ArrayRecord, split: str) -> Pooled | None:
        """Have every institution test these weights on the examples of a split."""
        tested = [(m, self.method.tested_on(split, m, arrays)) for m in self.testers() if m.ours]
        asked = [(m, self.method.evaluation_on(split, exchange, w)) for m, w in tested if w is not None]
        messages = (self.exchanger.message(member, request, run.evaluate_config) for member, request in asked)
        replies = self.exchanger(run.grid, exchange, messages, needed=False)
        return self.pooled(exchange, replies, self.recorder.tested if split == "test" else {})

    def pooled(
        self, exchange: int, replies: Iterable[Message], sums: dict[str, Evaluation] | None = None
    ) -> Pooled | None:
        """Pool the answers to an evaluation; an invalid one counts as its sender's failure. `sums` is filled."""
        refuse, settings = partial(self.recorder.failed, exchange), self.exchanger.settings
        answers = self.exchanger.answers(replies)
        return pool_answers(answers, settings.task, refuse, self.method.evaluated, settings.input_shape, sums)

    def completed(self, exchange: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Pool the answers, add what the observers have found, and record both."""
        tested = any(one.split == "test" and one.found for one in self.observers)  # at the end, if not in every round
        sums = {} if tested else self.recorder.tested  # the recorder shows those of the test examples
        found = self.pooled(exchange, replies, sums)
        if found is None and not tested:
            return None
        found = found or ({}, {})  # nobody has validation examples
        if self.split != "test":
            found = with_further(({}, {}), found, f"{self.split}-")
            self.recorder.notes["validation-examples"] = sum(one.num_examples for one in sums.values())
        for observer in self.observers:
            found = observer.completed(found)
        pooled, own = found
        self.recorder.evaluated(exchange, pooled, own)
        return MetricRecord(dict(pooled))

    def forecast(
        self, travelling: Weights, num_rounds: int, trains_in: Mapping[str, Sequence[int]]
    ) -> list[tuple[Member, Request, int]]:
        """Return the requests of all evaluations, those of the observers included, and how often each is sent.

        Parameters
        ----------
        travelling : Weights
            The weights as they travel.
        num_rounds : int
            The rounds of the run.
        trains_in : Mapping of str to Sequence of int
            By institution: the rounds in which it trains.
        """
        rounds, every = range(1, num_rounds + 1), self.exchanger.settings.evaluate_every
        evaluated = {at for at in rounds if at % every == 0 or at == num_rounds}

        def times(member: Member, observer: Observer | None) -> int:
            trains = trains_in.get(member.name, [])
            own = self.method.own_models
            can: Sequence[int] = rounds[min(trains, default=num_rounds + 1) - 1 :] if own else rounds
            can = trains if observer and observer.split in SPLIT_OF else can
            evaluations = len((evaluated if not observer or not observer.at_end else {num_rounds}) & {*can})
            exchanges = len(can) * self.method.exchanges_per_round()
            return observer.forecast(exchanges, evaluations) if observer else evaluations

        requests: list[tuple[Request, Observer | None]] = [(self.judging(0, travelling), None)]
        requests += [(self.method.evaluation_on(one.split, 0, travelling), one) for one in self.observers]
        return [(member, request, times(member, observer)) for request, observer in requests for member in self.members]
