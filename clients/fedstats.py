"""FedStats: the institution's half; the server's half is `strategies/fedstats.py`.

Under DP the sums are made once in a run: who asks again gets the same bytes, since fresh noise would average out. They
are on the disk before they are charged, and charged before they leave.
"""

from __future__ import annotations

import numpy as np
import torch

from flwr_replay.errors import PrivacyError, WireError
from flwr_replay.files.atomic import alone
from flwr_replay.files.tensors import digest
from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.institution.client import InstitutionClient
from flwr_replay.learning.heads import features_of, linear_head
from flwr_replay.learning.training import at_once
from flwr_replay.models.layers import as_input
from flwr_replay.payloads.fedstats import ClassSums, Summarise
from flwr_replay.privacy.plan import STATISTICS
from flwr_replay.privacy.sums import class_sums, in_units, noisy
from flwr_replay.wire.records import StateDict, opened

__all__ = ["FedStatsClient"]

BLOCK = 256  # most examples in memory at once
KEPT, MADE_BY, ONCE = "class-sums", "made-by", 1  # key of the state, of the encoder in it, and its only number


class FedStatsClient(InstitutionClient):
    """Sums the features of the institution's training examples, class by class."""

    def summarise(self, request: Summarise) -> ClassSums:
        """Return sums of features and numbers of examples, in the place of the head's weights."""
        if not request.clip > 0:
            raise WireError(f"features are clipped to a norm above 0; the server asks for {request.clip}: refused")
        covered = self.budget if self.budget and self.budget.plan.covers(STATISTICS) else None
        made = self.once(request, covered) if covered else self.summed(request, None)
        n = len(self.institution.train)
        return ClassSums(
            arrays={**opened(request.arrays), **made},
            num_examples=n,
            examples_seen=n,
            num_steps=0,
            **self.spent(request.run),
        )

    def once(self, request: Summarise, budget: PrivacyBudget) -> StateDict:
        """Return the run's noisy sums, which are made and charged at the first request.

        Raises
        ------
        PrivacyError
            If the run's sums were made by other weights, or are lost, or the budget does not allow them.
        """
        made_by = np.frombuffer(digest({**opened(request.arrays), "clip": np.array(request.clip)}).encode(), np.uint8)
        with alone(self.state.of_run(request.run).parent, wait=True):
            kept, charged = self.state.at(KEPT, request.run, ONCE), STATISTICS in budget.charged(request.run)
            if charged and (kept is None or not np.array_equal(kept[MADE_BY], made_by)):
                raise PrivacyError(
                    "under dp=statistics an institution makes its sums once in a run, by one network; in this run it "
                    "made others, or they are gone; fresh noise would cost as much again: begin a new run"
                )
            if kept is None or not charged:
                kept = {**self.summed(request, budget), MADE_BY: made_by}
                self.state.save(KEPT, request.run, ONCE, kept, self.institution.durable)
                budget.charge(STATISTICS, budget.plan.cost(STATISTICS, budget.examples, 1), request)
            else:
                budget.rest(STATISTICS, request)
        return {name: array for name, array in kept.items() if name != MADE_BY}

    def summed(self, request: Summarise, budget: PrivacyBudget | None) -> StateDict:
        """Sum the features of all training examples; with a budget, add noise."""
        train, model = self.institution.train, self.scratch_model(request.arrays)
        name, head = linear_head(model)
        blocks = torch.split(train.x, at_once(train.x, BLOCK, model))
        features_NF = torch.cat([features_of(model, as_input(x_B)).cpu() for x_B in blocks])
        patients = self.institution.data.train.patients
        of = np.arange(len(train)) if patients is None else np.unique(patients, return_inverse=True)[1]
        sums = class_sums(features_NF, train.y.cpu(), torch.from_numpy(of), head.out_features, request.clip)
        if budget:
            sigma = budget.plan.cost(STATISTICS, budget.examples, 1).sigma
            sums = noisy(sums, sigma, budget.stream(STATISTICS, request))
        sums_CF, numbers_C = (part / len(train) for part in in_units(sums, request.clip))
        return {f"{name}.weight": sums_CF.float().numpy(), f"{name}.bias": numbers_C.float().numpy()}
