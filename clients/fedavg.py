"""Federated averaging: the institution's half; the server's half is `strategies/fedavg.py`.

Source: McMahan et al. 2017, Algorithm 1, ClientUpdate; Qu et al. 2022, section 4.1 for the number of iterations.
"""

from flwr_replay.institution.client import InstitutionClient
from flwr_replay.payloads.common import Train, Trained

__all__ = ["FedAvgClient"]


class FedAvgClient(InstitutionClient):
    """Trains the global model on the institution's data."""

    def train(self, request: Train) -> Trained:
        """Train for E passes and return the weights."""
        data, learner = self.training_data(), self.learner(request)
        shuffle = self.shuffle(request.exchange)  # every pass draws a new order from it
        for _ in range(request.local_epochs):
            for x_B, y_B in learner.batches(data, shuffle):
                learner.step(x_B, y_B)
        return self.trained(request, learner, len(data))
