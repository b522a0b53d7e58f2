"""The institution's half of methods with a private model and a proxy: where they live, how they are tested.

The private model, its optimizer and the proxy's optimizer lie in the state directory and never leave.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from flwr_replay.client import InstitutionClient
from flwr_replay.errors import PrivacyError
from flwr_replay.mutual import Learning, MutualLearner
from flwr_replay.payloads.mutual import PairEvaluation
from flwr_replay.state import load_optimizer_arrays, optimizer_arrays
from flwr_replay.training import make_optimizer, refuse_single_batches, to_arrays
from flwr_replay.wire import Weights

__all__ = ["PairClient"]


class PairClient(InstitutionClient):
    """Base of the clients that train a private model φ and a proxy θ."""

    def pair(self, visit: Any, theta: Weights) -> MutualLearner:
        """Return what steps on both are; φ is the institution's own, θ as it came."""
        proxy = self.scratch_model(theta)
        kept = self.kept("private", visit)
        phi = self.scratch_model(kept or to_arrays(self.fresh_private(visit.private_seed)), "private")
        for model in (phi, proxy):
            refuse_single_batches(model, len(self.institution.train), self.batch_size)
        if visit.private_epochs:
            refuse_single_batches(phi, len(self.institution.train), visit.private_batch_size)
        training = replace(self.training, optimizer=visit.private_optimizer)
        halves = {
            "private": Learning(phi, make_optimizer(phi, training, visit.private_lr)),
            "proxy": Learning(proxy, make_optimizer(proxy, self.training, visit.lr)),
        }
        both = (self.kept("optimizers", visit, take=True) if visit.optimizer_state == "keep" else None) or {}
        for name, half in halves.items():
            own = {slot.removeprefix(f"{name}."): array for slot, array in both.items() if slot.startswith(f"{name}.")}
            if own:
                load_optimizer_arrays(half.optimizer, own)
        covered = self.purse is not None and self.purse.plan.covers("proxy")
        if self.purse and covered and visit.beta > 0 and not self.purse.plan.unproven:
            raise PrivacyError(
                "the run's configuration has strategy.beta=0, for which its epsilon is proven; the server asks for "
                f"beta={visit.beta:g}: refused"
            )
        pay = partial(self.purse.begin, "proxy", 1, visit) if self.purse and covered else None
        return MutualLearner(halves["private"], halves["proxy"], self.task, visit, self.batch_size, pay)

    def keep_pair(self, visit: Any, learner: MutualLearner) -> dict[str, Any]:
        """Keep what never leaves; return what an answer says of the training."""
        loss = learner.loss()
        if visit.optimizer_state == "keep":
            both = {
                f"{name}.{slot}": array
                for name, half in (("private", learner.private), ("proxy", learner.proxy))
                for slot, array in optimizer_arrays(half.optimizer).items()
            }
            self.save("optimizers", visit, both, give=True)
        self.save("private", visit, to_arrays(learner.private.model), give=True)
        told = {"num_examples": len(self.institution.train), "examples_seen": learner.seen, "train_loss": loss}
        return {**told, "proxy_steps": learner.proxy_steps}

    def tested(self, request: Any, theta: Weights) -> PairEvaluation:
        """Test φ as it stands after this round, and a proxy."""
        private = self.evaluated(self.latest("private", request), request.split, "private")
        return PairEvaluation.of_pair(private, self.evaluated(theta, request.split))
