"""What watches a run beside its loop: tests on other examples than the institutions' test shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flwr_replay.server.evaluation import Pooled, with_external
from flwr_replay.server.recorder import Recorder

__all__ = ["ExternalTests", "Forgetting", "Observer", "TestOn"]

TestOn = Callable[[str], Pooled | None]  # has every institution test the model as it is now on its examples of a split


class Observer:
    """Base of the observers: watches nothing."""

    split: str  # the examples that it has the model tested on

    def forecast(self, exchanges: int, evaluations: int) -> int:
        """Return how often it tests in a run with so many exchanges that train, and so many evaluations."""
        return 0

    def after_exchange(self, server_round: int, data_of: Sequence[str], test_on: TestOn) -> None:
        """Look at the weights that an exchange has changed; it has trained on the data of these institutions."""

    def before_evaluation(self, test_on: TestOn) -> None:
        """Look at the weights before they are tested on the test shards."""

    def completed(self, found: Pooled) -> Pooled:
        """Add what was seen to the metrics of an evaluation."""
        return found


class Forgetting(Observer):
    """After every exchange, tests on each institution's own training examples: a row of the forgetting matrix."""

    split = "train"

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def forecast(self, exchanges: int, evaluations: int) -> int:
        """Count the exchanges."""
        return exchanges

    def after_exchange(self, server_round: int, data_of: Sequence[str], test_on: TestOn) -> None:
        """Test, and note the row."""
        if found := test_on(self.split):
            self.recorder.forgetting_row(server_round, data_of, found[1])


class ExternalTests(Observer):
    """Beside every evaluation, tests on other institutions' examples; both results are noted as one."""

    split = "external"
    found: Pooled | None = None  # the last metrics there

    def forecast(self, exchanges: int, evaluations: int) -> int:
        """Count the evaluations."""
        return evaluations

    def before_evaluation(self, test_on: TestOn) -> None:
        """Test."""
        self.found = test_on(self.split)

    def completed(self, found: Pooled) -> Pooled:
        """Put the external metrics beside those on the test shards."""
        return with_external(found, self.found) if self.found else found
