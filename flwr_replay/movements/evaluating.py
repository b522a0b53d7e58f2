"""How a movement has its weights tested: by whom, when, and what its observers ask in addition."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from flwr_replay.errors import RunError
from flwr_replay.movements.observers import UNMIXED_ON, Observer, TestOn
from flwr_replay.movements.run import Run
from flwr_replay.payloads.common import Evaluate, Evaluation
from flwr_replay.server.evaluation import Pooled, pool_answers, with_further
from flwr_replay.server.exchange import Exchanging
from flwr_replay.server.members import Member
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import Weights

__all__ = ["Evaluating"]


class Evaluating(Exchanging):
    """Has institutions test weights, and pools what they answer."""

    evaluated: ClassVar[type[Evaluation]] = Evaluation  # the answer to an evaluation
    own_models: ClassVar[bool] = False  # whether institutions test models of their own, which only training makes
    observers: list[Observer]

    @abstractmethod
    def exchanges_per_round(self) -> int:
        """Return how many exchanges make one pass over the institutions' data."""

    def evaluation(self, server_round: int, arrays: Weights) -> Request:
        """Return the request to evaluate."""
        return Evaluate(server_round=server_round, arrays=arrays, run=self.settings.run)

    def evaluation_on(self, split: str, server_round: int, arrays: Weights) -> Request:
        """Return the request to evaluate on a split, or before mixing on one."""
        examples = {unmixed: one for one, unmixed in UNMIXED_ON.items()}.get(split, split)
        return replace(self.evaluation(server_round, arrays), split=examples)  # type: ignore[call-arg]

    def judging(self, server_round: int, arrays: Weights) -> Request:
        """Return the request to evaluate on the split that rounds are judged by."""
        request = self.evaluation(server_round, arrays)
        return request if self.split == "test" else replace(request, split=self.split)  # type: ignore[call-arg]

    @property
    def split(self) -> str:
        """The split that rounds are judged by; where no ClientApp is this package's, their own tests."""
        return self.settings.split if self.members.ours else "test"

    def testers(self) -> list[Member]:
        """Return the institutions that can test: with `fraction`, a model of its own is made when one first trains."""
        waiting = self.own_models and self.settings.fraction < 1
        return [member for member in self.members if not waiting or member.name in self.trained]

    def tested_on(self, split: str, member: Member, arrays: ArrayRecord) -> ArrayRecord | None:
        """Return the weights that an institution is to test on a split; None: it has nothing to test there."""
        return arrays

    def evaluate_if_due(self, run: Run, server_round: int, arrays: ArrayRecord) -> None:
        """Have every institution evaluate, every `evaluate_every` rounds and after the last."""
        completed, rest = divmod(server_round, self.exchanges_per_round())
        last = completed == run.num_rounds
        if rest or not (last or completed % self.settings.evaluate_every == 0):
            return
        at_end = last and self.split != "test"
        for observer in self.observers:
            if at_end or not observer.at_end:
                observer.before_evaluation(self.tester(run, server_round, arrays))
        if at_end and any(one.split == "test" and not one.found for one in self.observers):
            raise self._untested()
        messages = self.configure_evaluate(server_round, arrays, run.evaluate_config, run.grid)
        replies = self.exchange(run.grid, server_round, messages, needed=False)
        metrics = self.aggregate_evaluate(server_round, replies)
        if metrics is not None:
            run.result.evaluate_metrics_clientapp[completed] = metrics
        elif last and self.members.ours:
            raise self._untested()
        if run.evaluate_fn and (central := run.evaluate_fn(completed, arrays)) is not None:
            run.result.evaluate_metrics_serverapp[completed] = central

    def _untested(self) -> RunError:
        failures = self.recorder.failures_line()
        return RunError(f"no institution could evaluate the last round; {failures}: resume the run")

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask all that can test to evaluate on their test shards, or on their validation examples."""
        request, testers = self.judging(server_round, arrays), self.testers()
        if len(testers) < len(self.members):
            self.recorder.log(f"{len(testers)} of {len(self.members)} institutions have trained a model to test so far")
        return (self.message(member, request, config) for member in testers)

    def tester(self, run: Run, server_round: int, arrays: ArrayRecord) -> TestOn:
        """Return a function that has every institution test these weights on the examples of a split."""

        def test_on(split: str) -> Pooled | None:
            tested = [(member, self.tested_on(split, member, arrays)) for member in self.testers() if member.ours]
            asked = [(member, self.evaluation_on(split, server_round, w)) for member, w in tested if w is not None]
            messages = (self.message(member, request, run.evaluate_config) for member, request in asked)
            replies = self.exchange(run.grid, server_round, messages, needed=False)
            return self.pooled(server_round, replies, self.recorder.tested if split == "test" else {})

        return test_on

    def pooled(
        self, server_round: int, replies: Iterable[Message], sums: dict[str, Evaluation] | None = None
    ) -> Pooled | None:
        """Pool the answers to an evaluation; an invalid one counts as its sender's failure. `sums` is filled."""
        refuse, settings = partial(self.recorder.failed, server_round), self.settings
        answers = self.answers(replies)
        return pool_answers(answers, settings.task, refuse, self.evaluated, settings.input_shape, sums)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Pool the metrics over the test shards: by sums, or by weighted means for a user's own ClientApp."""
        tested = any(one.split == "test" and one.found for one in self.observers)  # at the end, if not in every round
        sums = {} if tested else self.recorder.tested  # the recorder shows those of the test examples
        found = self.pooled(server_round, replies, sums)
        if found is None and not tested:
            return None
        found = found or ({}, {})  # nobody has validation examples
        if self.split != "test":
            found = with_further(({}, {}), found, f"{self.split}-")
            self.recorder.notes["validation-examples"] = sum(one.num_examples for one in sums.values())
        for observer in self.observers:
            found = observer.completed(found)
        pooled, own = found
        self.recorder.evaluated(server_round, pooled, own)
        return MetricRecord(dict(pooled))
