"""FedBN: the institution's half; the server's half is `strategies/fedbn.py`.

Source: Li et al. 2021 (arXiv 2102.07623), Algorithm 1. The whole model, as it was tested last, is in the institution's
state directory.
"""

from dataclasses import replace

from flwr_replay.institution.client import InstitutionClient
from flwr_replay.payloads.common import Evaluate, Evaluation
from flwr_replay.payloads.fedbn import TrainedShared, TrainShared, of_norms, shared
from flwr_replay.wire.records import array_record, opened
from flwr_replay.wire.weights import to_arrays

__all__ = ["FedBNClient"]


class FedBNClient(InstitutionClient):
    """Trains the global model with a batch norm of the institution's own."""

    def train_shared(self, request: TrainShared) -> TrainedShared:
        """Train for E passes, and return all weights but batch norm's."""
        own = of_norms(self.kept("model", request) or {})
        request = replace(request, arrays=array_record({**opened(request.arrays), **own}))
        data, learner = self.training_data(), self.learner(request)
        shuffle = self.shuffle(request.exchange)
        for _ in range(request.local_epochs):
            for x_B, y_B in learner.batches(data, shuffle):
                learner.step(x_B, y_B)
        answer = self.trained(request, learner, len(data))
        self.save("model", request, to_arrays(learner.model), give=True)
        released = array_record(shared(opened(answer.arrays)))
        return TrainedShared(**{**vars(answer), "arrays": released})

    def evaluate_model(self, request: Evaluate) -> Evaluation:
        """Test the received weights with the institution's own batch norm, and keep them so."""
        own = of_norms(self.latest("model", request))
        arrays = {**opened(request.arrays), **own}
        tested = self.evaluated(arrays, request.split)  # raises before another form of model is saved
        self.save("model", request, arrays)
        return tested
