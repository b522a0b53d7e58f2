"""MyMethod: the institution's half; the server's half is `strategy.py`."""

import math

import numpy as np

from flwr_replay.institution.client import InstitutionClient
from flwr_replay.wire.records import opened
from mymethod.payload import TrainedMyMethod, TrainMyMethod

__all__ = ["MyMethodClient"]


class MyMethodClient(InstitutionClient):
    """Trains the global model on the institution's data, and says how far it moved."""

    def train_mymethod(self, request: TrainMyMethod) -> TrainedMyMethod:
        """Train for some passes; return the weights and the distance."""
        data, learner = self.training_data(), self.learner(request)
        shuffle = self.shuffle(request.exchange)  # every pass draws an order of its own from it
        for _ in range(request.local_epochs):
            for x_B, y_B in learner.batches(data, shuffle):
                learner.step(x_B, y_B)
        trained = self.trained(request, learner, len(data))
        received, now = opened(request.arrays), opened(trained.arrays)
        moved = math.sqrt(sum(float(np.sum((now[name] - received[name]) ** 2.0)) for name in now))
        return TrainedMyMethod(**vars(trained), moved=moved)
