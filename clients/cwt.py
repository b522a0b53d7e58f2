"""Cyclic weight transfer: the institution's half; the server's half is `strategies/cwt.py`.

Source: Chang et al. 2018; Qu et al. 2022, section 4.1. A visit is max(1, ⌊|D_k|/b⌋) SGD iterations. With replay every
batch also holds replayed examples (Qu et al. 2022, Algorithm 1, lines 1-6). From `institution/client.py` are the data,
the learner (θ, its optimizer, what is replayed, DP-SGD's noise) and the answer: θ, its loss and counts.
"""

from flwr_replay.institution.client import InstitutionClient
from flwr_replay.payloads.common import Train, Trained

__all__ = ["CWTClient"]


class CWTClient(InstitutionClient):
    """Trains the visiting model on the institution's data."""

    def train(self, request: Train) -> Trained:
        """Train θ for one visit and return it."""
        data, learner = self.training_data(request.pooled), self.learner(request)
        for x_B, y_B in learner.batches(data, self.shuffle(request.exchange)):  # Alg. 1, lines 2-4
            learner.step(x_B, y_B)  # line 5: θ ← θ − η ∇L(θ; x_B)
        return self.trained(request, learner, len(data))
