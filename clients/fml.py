"""FML: the institution's half; the server's half is `strategies/fml.py`.

Source: Shen et al. 2020 (arXiv 2006.16765); Kalra et al. 2023, section 4.1. A training step is in
`flwr_replay/institution/mutual.py`.
"""

from flwr_replay.institution.mutual import PairClient
from flwr_replay.payloads.mutual import EvaluateWithProxy, PairEvaluation, TrainedMutually, TrainMutually

__all__ = ["FMLClient"]


class FMLClient(PairClient):
    """Trains a private model and the common proxy."""

    def train_mutually(self, request: TrainMutually) -> TrainedMutually:
        """Train both models for one pass and return the proxy."""
        data, learner = self.training_data(), self.pair(request, request.arrays)
        learner.alone(data, self.lessons(request), self.shuffle(request.exchange, "private"))
        for x_B, y_B in learner.batches(data, self.shuffle(request.exchange)):
            learner.step(x_B, y_B)
        statistics = self.keep_pair(request, learner)
        return TrainedMutually(arrays=self.proxy_of(request, learner), **statistics, **self.spent(request.run))

    def evaluate_with_proxy(self, request: EvaluateWithProxy) -> PairEvaluation:
        """Test the private model and the averaged proxy."""
        return self.tested(request, request.arrays)
