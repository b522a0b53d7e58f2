"""FML: the institution's half; the server's half is `strategies/fml.py`.

Source: Shen et al. 2020 (arXiv 2006.16765); Kalra et al. 2023, section 4.1. A training step is in
`flwr_replay/institution/mutual.py`.
"""

from typing import Any

from flwr_replay.clients.fedavg import SumsClient
from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.institution.mutual import MutualLearner, PairClient
from flwr_replay.learning.training import iterations
from flwr_replay.payloads.mutual import EvaluateWithProxy, PairEvaluation, TrainedMutually, TrainMutually
from flwr_replay.privacy.plan import UPDATE

__all__ = ["FMLClient"]


class FMLClient(PairClient, SumsClient):
    """Trains a private model and the common proxy."""

    def train_mutually(self, request: TrainMutually) -> TrainedMutually:
        """Train both models for one pass and return the proxy; with dp=update its update, with noise."""
        if self.budget and self.budget.plan.covers(UPDATE):
            return self.under_dp(request, self.budget)
        learner, statistics = self.passes(request)
        return TrainedMutually(arrays=self.proxy_of(request, learner), **statistics, **self.spent(request.run))

    def passes(self, request: TrainMutually) -> tuple[MutualLearner, dict[str, Any]]:
        """Train both models and keep what never leaves; return the learner, and an answer's counts and loss."""
        data, learner = self.training_data(), self.pair(request, request.arrays)
        learner.alone(data, self.lessons(request), self.shuffle(request.exchange, "private"))
        for x_B, y_B in learner.batches(data, self.shuffle(request.exchange)):
            learner.step(x_B, y_B)
        return learner, self.keep_pair(request, learner)

    def under_dp(self, request: TrainMutually, budget: PrivacyBudget) -> TrainedMutually:
        """Train both models and return the proxy's update with noise; φ may diverge, which no message says."""
        n, alone, batch = len(self.training_data()), len(self.lessons(request)), request.private_batch_size
        steps, of_alone = iterations(n, self.batch_size), request.private_epochs * iterations(alone, batch)
        return TrainedMutually(
            arrays=self.noisy_update(request, budget, lambda: self.passes(request)[0].proxy.model),
            num_examples=n,
            examples_seen=steps * min(n, self.batch_size) + of_alone * min(alone, batch),
            num_steps=steps,
            **self.spent(request.run),
        )

    def evaluate_with_proxy(self, request: EvaluateWithProxy) -> PairEvaluation:
        """Test the private model and the averaged proxy."""
        return self.tested(request, request.arrays)
