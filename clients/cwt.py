"""Cyclic weight transfer: the institution's half; the server's half is `strategies/cwt.py`.

Source: Chang et al. 2018; Qu et al. 2022, section 4.1. A visit is max(1, ⌊|D_k|/b⌋) SGD iterations.
"""

from __future__ import annotations

from flwr_replay.client import InstitutionClient
from flwr_replay.payloads.common import Visit, Visited
from flwr_replay.training import batches, encoded, mean_loss, step

__all__ = ["CWTClient"]


class CWTClient(InstitutionClient):
    """Trains the visiting model on the institution's data."""

    def train(self, visit: Visit) -> Visited:
        """Train for one visit and hand the model back."""
        data, losses, seen = self.training_data(visit.pooled), [], 0
        model, optimizer = self.resume(visit)
        for x_B, y_B in batches(data.x, data.y, self.batch_size, self.shuffle(visit.server_round)):
            losses.append(step(model, optimizer, self.task.loss(model(x_B), y_B)))  # θ ← θ − η ∇L(θ; x_B)
            seen += len(y_B)
        loss = mean_loss(losses)
        self.suspend(visit, optimizer)
        return Visited(arrays=encoded(model), num_examples=len(data), examples_seen=seen, train_loss=loss)
