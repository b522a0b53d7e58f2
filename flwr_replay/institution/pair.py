"""The institution's half of methods with a private model and a proxy: where they are kept, how they are tested.

The private model and its optimizer are in one file of the state directory and never leave. So is the proxy's
optimizer, unless its state travels with the proxy (proxy-optimizer=travels). Under DP that costs nothing: the state is
computed from noised gradients, from weights that were released and from what arrived, so it is post-processing.
"""

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord

from flwr_replay.errors import BudgetError, PrivacyError, WireError
from flwr_replay.files.tensors import nested, unnested
from flwr_replay.institution.listening import ListeningClient
from flwr_replay.institution.mutual import Learning, MutualLearner
from flwr_replay.learning.training import make_optimizer, refuse_single_batches, unstepped
from flwr_replay.payloads.common import Present, RollCall
from flwr_replay.payloads.mutual import (
    EvaluatePair,
    EvaluateWithProxy,
    PairEvaluation,
    TrainMutually,
    TrainProxy,
)
from flwr_replay.wire.records import StateDict, Weights, array_record
from flwr_replay.wire.weights import (
    encoded,
    form_of,
    joined,
    load_optimizer_arrays,
    optimizer_arrays,
    parted,
    to_arrays,
)

__all__ = ["PairClient"]

TrainPair = TrainProxy | TrainMutually


class PairClient(ListeningClient):
    """Base of the clients that train a private model φ and a proxy θ."""

    def roll_call(self, request: RollCall) -> Present:
        """Answer the roll call once the private model could be built: an error comes before anyone trains."""
        refuse_single_batches(self.fresh_private(0), len(self.institution.train), self.batch_size)
        return super().roll_call(request)

    def pair(self, request: TrainPair, theta: Weights) -> MutualLearner:
        """Return a learner of the institution's own φ and the received θ. DP-SGD on θ is charged first.

        Beside θ there is the state of its optimizer, if and only if that travels.
        """
        travels = request.proxy_optimizer == "travels"
        theta, state = parted(theta) if travels else (theta, {})
        proxy, saved = self.scratch_model(theta), unnested(self.kept("pair", request, take=True) or {})
        weights = saved["model"] or to_arrays(self.fresh_private(request.private_seed))
        phi = self.scratch_model(weights, "private")
        refuse_single_batches(proxy, len(self.institution.train), self.batch_size)
        if request.private_epochs:
            lessons = len(self.institution.train) - len(self.held_rows(request))
            refuse_single_batches(phi, lessons, request.private_batch_size)
        training = replace(self.training, optimizer=request.private_optimizer)
        private = Learning(phi, make_optimizer(phi, training, request.private_lr))
        common = Learning(proxy, make_optimizer(proxy, self.training, request.lr))
        if travels:
            load_arrived(common.optimizer, state, unstepped(proxy, self.training))
        for half, key in ((private, "optimizer"), (common, "proxy-optimizer")):
            if request.optimizer_state == "keep" and (slots := saved[key]):
                load_optimizer_arrays(half.optimizer, slots)
        sampler, dp, rests = self.replay_sampler(request), None, False
        if self.budget and self.budget.plan.covers("proxy"):
            if request.beta != 0 and not self.budget.plan.unproven:
                raise PrivacyError(
                    "the run's configuration has strategy.beta=0, for which its epsilon is proven; the server asks for "
                    f"beta={request.beta:g}: refused"
                )
            try:
                dp = self.budget.begin("proxy", 1, request)
            except BudgetError:  # the budget is used up: θ stays as it is, φ learns on
                self.budget.rest("proxy", request)
                rests = True
        augment, rng = self.augmentation(dp, request.exchange), self.shuffle(request.exchange, "replay")
        return MutualLearner(private, common, self.task, request, self.batch_size, dp, rests, augment, sampler, rng)

    def keep_pair(self, request: TrainPair, learner: MutualLearner) -> dict[str, Any]:
        """Save what never leaves; return the answer's counts and loss.

        Whether φ has diverged depends on the examples, and no noise covers it. So it is not reported where the proxy is
        under DP: φ goes back to its weights from before this training, with a fresh optimizer.
        """
        loss = learner.loss()
        state = {"model": to_arrays(learner.private.model)}
        diverged = not all(np.isfinite(array).all() for array in state["model"].values())
        if diverged:
            logging.getLogger("flwr").warning("the private model diverged in exchange %s", request.exchange)
            before = self.state.load("pair", request.run, request.exchange) or {}
            state["model"] = unnested(before)["model"] or to_arrays(self.fresh_private(request.private_seed))
        if request.optimizer_state == "keep":
            if not diverged:
                state["optimizer"] = optimizer_arrays(learner.private.optimizer)
            if request.proxy_optimizer == "stays":
                state["proxy-optimizer"] = optimizer_arrays(learner.proxy.optimizer)
        self.save("pair", request, nested(state), give=True)
        return {
            "num_examples": len(self.institution.train),
            "examples_seen": learner.seen,
            "train_loss": loss,
            "num_steps": learner.proxy_steps,
        }

    def with_first_state(self, request: TrainPair, theta: Weights) -> Weights:
        """Add to a fresh proxy the state of its optimizer from before any step, if that travels."""
        return joined(theta, unstepped(self.fresh(0), self.training)) if request.proxy_optimizer == "travels" else theta

    def proxy_of(self, request: TrainPair, learner: MutualLearner) -> ArrayRecord:
        """Encode the proxy as it leaves, with the state of its optimizer if that travels."""
        state = optimizer_arrays(learner.proxy.optimizer) if request.proxy_optimizer == "travels" else {}
        return array_record(joined(encoded(learner.proxy.model), state))

    def tested(self, request: EvaluatePair | EvaluateWithProxy, theta: Weights) -> PairEvaluation:
        """Test φ as it stands after this round, with listen=pool together with θ, and a proxy.

        Beside the proxy's weights the state of its optimizer may be.
        """
        phi, theta = unnested(self.latest("pair", request))["model"], parted(theta)[0]
        shard = self.institution.shard(request.split)
        if not len(shard):
            return PairEvaluation.empty(self.task)
        proxy = self.evaluated(theta, request.split)
        if request.listen == "loss":
            return PairEvaluation.of_pair(self.evaluated(phi, request.split, "private"), proxy)
        return PairEvaluation.of_pair(self.tested_pool(phi, theta, request, shard), proxy)


def load_arrived(optimizer: torch.optim.Optimizer, arrived: StateDict, own: StateDict) -> None:
    """Load a state that was mixed elsewhere into a fresh optimizer, of whose form `own` is; step counts are rounded.

    `arrived` is unchanged. Its numbers were checked when it arrived; another form is a WireError.
    """
    if form_of(arrived) != form_of(own):
        raise WireError(
            f"the state of a proxy's optimizer must have its own names, shapes and dtypes, {len(own)} arrays; "
            f"{len(arrived)} of another form arrived: use one model and one training everywhere"
        )
    rounded = {name: np.asarray(np.rint(array)) for name, array in arrived.items() if name.endswith(".step")}
    load_optimizer_arrays(optimizer, {name: rounded.get(name, array.copy()) for name, array in arrived.items()})
