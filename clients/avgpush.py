"""AvgPush: the institution's half; the server's half is `strategies/avgpush.py`.

Source: Kalra et al. 2023, section 4.1. The mixing is in `flwr_replay/institution/peer.py`.
"""

from flwr_replay.institution.peer import PeerClient
from flwr_replay.learning.training import refuse_single_batches
from flwr_replay.payloads.avgpush import EvaluatePeer, Push
from flwr_replay.payloads.common import Evaluation
from flwr_replay.payloads.relay import Released
from flwr_replay.wire.weights import encoded

__all__ = ["AvgPushClient"]


class AvgPushClient(PeerClient):
    """Trains a model of its own and releases it."""

    def push(self, request: Push) -> Released:
        """Train for one pass and release θ."""
        data, (theta, w) = self.training_data(), self.begin(request)
        model = self.scratch_model(theta)
        refuse_single_batches(model, len(data), self.batch_size)
        learner = self.learner_of(model, self.resume_optimizer(model, request), request)
        for x_B, y_B in learner.batches(data, self.shuffle(request.exchange)):
            learner.step(x_B, y_B)
        loss = learner.train_loss()
        self.suspend(request, learner.optimizer)
        released = self.release(request, encoded(model), w)
        return Released(num_examples=len(data), **learner.counts, train_loss=loss, **released)

    def evaluate_peer(self, request: EvaluatePeer) -> Evaluation:
        """Test θ after this round's mixing, or before it."""
        return self.evaluated(self.own_theta(request), request.split)
