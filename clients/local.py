"""Local: the institution's half; the server's half is `strategies/local.py`.

Source: "Regular" in Kalra et al. 2023, section 4. The model lives in the institution's state directory.
"""

from __future__ import annotations

from flwr_replay.client import InstitutionClient
from flwr_replay.errors import TrainingError
from flwr_replay.payloads.common import Evaluation
from flwr_replay.payloads.local import EvaluateOwn, Trained, TrainOwn
from flwr_replay.training import batches, mean_loss, refuse_single_batches, step, to_arrays

__all__ = ["LocalClient"]


class LocalClient(InstitutionClient):
    """Trains a model that never leaves."""

    def train_own(self, visit: TrainOwn) -> Trained:
        """Train the institution's own model for one pass."""
        data, losses, seen = self.training_data(), [], 0
        kept = self.kept("model", visit)
        model = self.scratch_model(kept or to_arrays(self.fresh(visit.init_seed)))
        refuse_single_batches(model, len(data), self.batch_size)
        optimizer = self.resume_optimizer(model, visit)
        for x_B, y_B in batches(data.x, data.y, self.batch_size, self.shuffle(visit.server_round)):
            losses.append(step(model, optimizer, self.task.loss(model(x_B), y_B)))
            seen += len(y_B)
        loss = mean_loss(losses)
        self.suspend(visit, optimizer)
        self.state.save("model", visit.run, visit.server_round, to_arrays(model))
        return Trained(num_examples=len(data), examples_seen=seen, train_loss=loss)

    def evaluate_own(self, request: EvaluateOwn) -> Evaluation:
        """Test the institution's own model, as it stands after this round."""
        kept = self.state.load("model", request.run, request.server_round + 1)
        if kept is None:
            raise TrainingError(
                f"institution {self.institution.name!r} has no model yet: its training has failed so far"
            )
        shard = self.institution.shard(request.split)
        return self.task.evaluate(self.scratch_model(kept), shard.x, shard.y)
