"""Local: the institution's half; the server's half is `strategies/local.py`.

Source: "Regular" in Kalra et al. 2023, section 4. The model lives in the institution's state directory.
"""

from flwr_replay.institution.client import InstitutionClient
from flwr_replay.learning.training import refuse_single_batches
from flwr_replay.payloads.common import Evaluation
from flwr_replay.payloads.local import EvaluateOwn, TrainedOwn, TrainOwn
from flwr_replay.wire.weights import to_arrays

__all__ = ["LocalClient"]


class LocalClient(InstitutionClient):
    """Trains a model that never leaves."""

    def train_own(self, request: TrainOwn) -> TrainedOwn:
        """Train the institution's own model for one pass."""
        data, weights = self.training_data(), self.kept("model", request)
        model = self.scratch_model(weights or to_arrays(self.fresh(request.init_seed)))
        refuse_single_batches(model, len(data), self.batch_size)
        learner = self.learner_of(model, self.resume_optimizer(model, request), request)
        for x_B, y_B in learner.batches(data, self.shuffle(request.exchange)):
            learner.step(x_B, y_B)
        loss = learner.train_loss()
        self.suspend(request, learner.optimizer)
        self.save("model", request, to_arrays(model), give=True)
        spent = self.spent(request.run)
        return TrainedOwn(num_examples=len(data), **learner.counts, train_loss=loss, **spent)

    def evaluate_own(self, request: EvaluateOwn) -> Evaluation:
        """Test the institution's own model after this round's training."""
        return self.evaluated(self.latest("model", request), request.split)
