"""The institution's half of methods with a private model and a proxy: where they are kept, how they are tested.

The private model, its optimizer and the proxy's optimizer are in one file of the state directory and never leave.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np

from flwr_replay.errors import BudgetError, PrivacyError
from flwr_replay.files.tensors import nested, unnested
from flwr_replay.institution.client import InstitutionClient
from flwr_replay.institution.mutual import Learning, MutualLearner
from flwr_replay.learning.training import make_optimizer, refuse_single_batches
from flwr_replay.payloads.common import Present, RollCall
from flwr_replay.payloads.mutual import (
    EvaluatePair,
    EvaluateWithProxy,
    PairEvaluation,
    TrainMutually,
    TrainProxy,
)
from flwr_replay.wire.records import Weights
from flwr_replay.wire.weights import load_optimizer_arrays, optimizer_arrays, to_arrays

__all__ = ["PairClient"]

TrainPair = TrainProxy | TrainMutually


class PairClient(InstitutionClient):
    """Base of the clients that train a private model φ and a proxy θ."""

    def roll_call(self, request: RollCall) -> Present:
        """Answer the roll call once the private model could be built: an error comes before anyone trains."""
        refuse_single_batches(self.fresh_private(0), len(self.institution.train), self.batch_size)
        return super().roll_call(request)

    def pair(self, request: TrainPair, theta: Weights) -> MutualLearner:
        """Return a learner of the institution's own φ and the received θ. DP-SGD on θ is charged first."""
        proxy, kept = self.scratch_model(theta), unnested(self.kept("pair", request, take=True) or {})
        own = kept["model"] or to_arrays(self.fresh_private(request.private_seed))
        phi = self.scratch_model(own, "private")
        refuse_single_batches(proxy, len(self.institution.train), self.batch_size)
        if request.private_epochs:
            refuse_single_batches(phi, len(self.institution.train), request.private_batch_size)
        training = replace(self.training, optimizer=request.private_optimizer)
        private = Learning(phi, make_optimizer(phi, training, request.private_lr))
        common = Learning(proxy, make_optimizer(proxy, self.training, request.lr))
        for half, part in ((private, "optimizer"), (common, "proxy-optimizer")):
            if request.optimizer_state == "keep" and (slots := kept[part]):
                load_optimizer_arrays(half.optimizer, slots)
        covered = self.budget is not None and self.budget.plan.covers("proxy")
        if self.budget and covered and request.beta != 0 and not self.budget.plan.unproven:
            raise PrivacyError(
                "the run's configuration has strategy.beta=0, for which its epsilon is proven; the server asks for "
                f"beta={request.beta:g}: refused"
            )
        dp, rests = None, False
        if self.budget and covered:
            try:
                dp = self.budget.begin("proxy", 1, request)
            except BudgetError:  # the budget is used up: θ stays as it is, φ learns on
                self.budget.rest("proxy", request)
                rests = True
        return MutualLearner(private, common, self.task, request, self.batch_size, dp, rests)

    def keep_pair(self, request: TrainPair, learner: MutualLearner) -> dict[str, Any]:
        """Save what never leaves; return the answer's counts and loss.

        Whether φ has diverged depends on the examples, and no noise covers it. So it is not reported where the proxy is
        under DP: φ goes back to its weights from before this training, with a fresh optimizer.
        """
        loss = learner.loss()
        kept = {"model": to_arrays(learner.private.model)}
        diverged = not all(np.isfinite(array).all() for array in kept["model"].values())
        if diverged:
            logging.getLogger("flwr").warning("the private model diverged in exchange %s", request.server_round)
            before = self.state.load("pair", request.run, request.server_round) or {}
            kept["model"] = unnested(before)["model"] or to_arrays(self.fresh_private(request.private_seed))
        if request.optimizer_state == "keep":
            if not diverged:
                kept["optimizer"] = optimizer_arrays(learner.private.optimizer)
            kept["proxy-optimizer"] = optimizer_arrays(learner.proxy.optimizer)
        self.save("pair", request, nested(kept), give=True)
        return {
            "num_examples": len(self.institution.train),
            "examples_seen": learner.seen,
            "train_loss": loss,
            "proxy_steps": learner.proxy_steps,
        }

    def tested(self, request: EvaluatePair | EvaluateWithProxy, theta: Weights) -> PairEvaluation:
        """Test φ as it stands after this round, and a proxy."""
        private = self.evaluated(unnested(self.latest("pair", request))["model"], request.split, "private")
        return PairEvaluation.of_pair(private, self.evaluated(theta, request.split))
