"""Observers of a run's loop: they have the model tested on other examples than the institutions' test shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flwr_replay.report.judged import VALIDATION
from flwr_replay.server.evaluation import Pooled, with_further
from flwr_replay.server.recorder import Recorder

__all__ = ["UNMIXED_ON", "Forgetting", "FurtherTests", "Observer", "TestOn"]

UNMIXED = "before-mixing"  # in place of a split: the test shards, with models from before they were averaged or mixed
UNMIXED_ON = {"test": UNMIXED, "validation": f"{VALIDATION}{UNMIXED}"}  # the same, by the split whose examples test

TestOn = Callable[[str], Pooled | None]  # has every institution test the current model on its examples of a split


class Observer:
    """Base of the observers; it does nothing."""

    split: str  # the split on which it tests
    at_end: bool = False  # whether it tests with the last evaluation only
    found: Pooled | None = None  # the last metrics there

    def forecast(self, exchanges: int, evaluations: int) -> int:
        """Return the number of tests in a run, given its numbers of training exchanges and of evaluations with it."""
        return 0

    def after_exchange(self, server_round: int, data_of: Sequence[str], test_on: TestOn) -> None:
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

    def after_exchange(self, server_round: int, data_of: Sequence[str], test_on: TestOn) -> None:
        """Test, and record the row."""
        if found := test_on(self.split):
            self.recorder.forgetting_row(server_round, data_of, found[1])


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
