"""An institution's own model beside one that it receives: listen=pool, two classifiers as one.

The own model never leaves. What weighs the two is held out of its training, and never leaves either.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from flwr_replay.errors import RefusedError
from flwr_replay.institution.client import InstitutionClient
from flwr_replay.institution.owner import Shard
from flwr_replay.learning.pooling import Pool
from flwr_replay.payloads.common import Evaluation
from flwr_replay.payloads.fedreplay import EvaluatePooled
from flwr_replay.payloads.mutual import EvaluatePair, EvaluateWithProxy, Listening
from flwr_replay.wire.records import Weights
from flwr_replay.wire.weights import to_arrays

__all__ = ["ListeningClient"]

Test = EvaluatePair | EvaluateWithProxy | EvaluatePooled


class ListeningClient(InstitutionClient):
    """Base of the clients that pool a model of their own, φ, with a received one, θ."""

    def lessons(self, request: Listening) -> Tensor:
        """Return the rows from which φ learns in passes of its own: all but those that are held out."""
        rows = torch.arange(len(self.training_data()))
        return rows[~torch.isin(rows, self.held_rows(request))]

    def held_out(self, request: Listening) -> Shard:
        """Return the examples by which a pool's weights are chosen: the validation split, or those that are held out.

        They never leave. φ's test metrics do, which depend on them.
        """
        data, rows = self.training_data(), self.held_rows(request)
        rows = rows.to(data.y.device)
        return self.institution.validation or replace(data, x=data.x[rows], y=data.y[rows])

    def held_rows(self, request: Listening) -> Tensor:
        """Return the rows that are held out, the same in every exchange; none without a pool or beside a split.

        Refused under masks, and if the policy lets no exact metrics leave: a server that sends models of its own can
        read single held-out examples from the answers of a pool, even from counts.
        """
        if request.listen != "pool" or self.institution.validation is not None:
            return torch.empty(0, dtype=torch.int64)
        if self.institution.policy.allowed_metrics != "exact" or not self.institution.reports_losses:
            raise RefusedError(
                "without a validation split the tests of listen=pool depend on single training examples; the run is "
                "masked, or a policy lets no exact metrics leave: choose listen=loss or none, or ask for such a split"
            )
        n = len(self.training_data())
        most = min(n - 1, max(1, round(request.holdout * n)))
        return torch.randperm(n, generator=self.shuffle("held-out"))[:most]

    def tested_pool(self, phi: Weights, theta: Weights, request: Test, shard: Shard) -> Evaluation:
        """Test φ and θ as one classifier. θ has learned from the held-out examples, too; DP hides them."""
        held = self.held_out(request)
        pool = Pool.fitted(self._loaded(phi, "private"), self._loaded(theta), held.x, held.y)
        arrays = {f"other.{name}": array for name, array in to_arrays(pool.other).items()}
        self.save("pool", request, {"weights": np.array(pool.weights), **arrays})  # whoever uses φ later needs both
        return self.task.evaluate(pool, shard.x, shard.y)
