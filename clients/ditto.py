"""Ditto: the institution's half; the server's half is `strategies/ditto.py`.

Source: Li, Hu, Beirami and Smith 2021 (arXiv 2012.04221), Algorithm 1. The personal model is in the institution's state
directory.
"""

from math import isfinite

from torch import Tensor

from flwr_replay.clients.fedprox import distance
from flwr_replay.errors import DivergedError
from flwr_replay.institution.client import InstitutionClient
from flwr_replay.institution.learner import Learner
from flwr_replay.learning.training import make_optimizer
from flwr_replay.payloads.common import Trained
from flwr_replay.payloads.ditto import EvaluatePersonal, PersonalEvaluation, TrainPersonal
from flwr_replay.wire.weights import to_arrays

__all__ = ["DittoClient"]


class DittoClient(InstitutionClient):
    """Trains the global model, and a personal one that never leaves."""

    def train_personal(self, request: TrainPersonal) -> Trained:
        """Train both models for E passes and return the global one's weights."""
        data, learner = self.training_data(), self.learner(request)
        anchor = [parameter.detach().clone() for parameter in learner.model.parameters()]  # θ
        self.passes(request, learner)
        model = self.scratch_model(self.kept("model", request) or request.arrays, "personal")  # v_k
        optimizer = make_optimizer(model, self.training, request.lr)
        personal = self.learner_of(model, optimizer, request, request.local_epochs)
        self.passes(request, personal, anchor)
        if self.institution.reports_losses:  # under masks no failure tells whose training diverged
            personal.train_loss()  # raises before anything is saved
        answer = self.trained(request, learner, len(data))
        self.save("model", request, to_arrays(model), give=True)
        return answer

    def passes(self, request: TrainPersonal, learner: Learner, anchor: list[Tensor] | None = None) -> None:
        """Train for E passes over the same batches; with an anchor, near it."""
        data, shuffle = self.training_data(), self.shuffle(request.exchange)
        for _ in range(request.local_epochs):
            for x_B, y_B in learner.batches(data, shuffle):
                pull = request.lam / 2 * distance(learner.model, anchor) if anchor else None
                learner.step(x_B, y_B, penalty=pull)

    def evaluate_personal(self, request: EvaluatePersonal) -> PersonalEvaluation:
        """Test the personal model and the global one."""
        own = self.evaluated(self.latest("model", request), request.split, "personal")
        if own.loss is not None and not isfinite(own.loss):
            raise DivergedError("the personal model's loss must stay finite: lower training.lr or lam and run again")
        return PersonalEvaluation.of_pair(own, self.evaluated(request.arrays, request.split))
