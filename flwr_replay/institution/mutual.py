"""A private model φ and a proxy θ that learn from each other: the steps, and what an institution keeps of them.

Source: Kalra et al. 2023 (ProxyFL), section 3.2, eq. 4-7; deep mutual learning: Zhang et al. 2018 (arXiv 1706.00384).

    L_φ = (1 - α) CE(f_φ(x), y) + α KL(h_θ(x) ‖ f_φ(x))
    L_θ = (1 - β) CE(h_θ(x), y) + β KL(f_φ(x) ‖ h_θ(x))         by DP-SGD, with dp=proxy

Arrays of a batch end in `_B`. Both losses use the outputs f_φ(x), h_θ(x) from before either model steps, so each passes
over a batch once. In the paper's KL the learning model stands first. Here the teacher does, as in deep mutual learning,
and no gradient flows into it. The paper's "alternate" leaves open whether φ sees θ before or after θ's step.

With β > 0 the proxy's gradient on one example depends, through f_φ, on all of the institution's examples, since φ
learns from them without noise. Then clipping does not bound what one example changes, and the accountant's epsilon is
no proof. That of whole updates is one, whatever they depend on (dp=update of FML).

The private model and its optimizer are in one file of the state directory and never leave. So is the proxy's
optimizer, unless its state travels with the proxy (proxy-optimizer=travels). Under DP that costs nothing: the state is
computed from noised gradients, from weights that were released and from what arrived, so it is post-processing.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import Tensor, nn
from torch.nn import functional

from flwr_replay.errors import BudgetError, PrivacyError, WireError
from flwr_replay.files.tensors import nested, unnested
from flwr_replay.generators.sampler import ReplaySampler
from flwr_replay.institution.budget import DPTraining
from flwr_replay.institution.learner import mixed_batches
from flwr_replay.institution.listening import ListeningClient
from flwr_replay.institution.owner import Shard
from flwr_replay.learning.augment import Augment, changed
from flwr_replay.learning.tasks import Task
from flwr_replay.learning.training import batches, finite, make_optimizer, mean_loss, refuse_single_batches, unstepped
from flwr_replay.models import has_batch_norm
from flwr_replay.models.layers import step
from flwr_replay.payloads.common import Present, RollCall
from flwr_replay.payloads.mutual import (
    EvaluatePair,
    EvaluateWithProxy,
    Mutual,
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

__all__ = ["Learning", "MutualLearner", "PairClient"]

TrainPair = TrainProxy | TrainMutually


@dataclass(frozen=True)
class Learning:
    """A model and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


class MutualLearner:
    """Steps of both models, φ (`private`) and θ (`proxy`).

    `task` is a classification, whose loss is CE; `request` says α, β and how the private model trains alone;
    `batch_size` is b. `dp` is a charged pass of DP-SGD on θ, None: plain steps. If the budget is used up, θ `rests` and
    φ learns on. `augment` changes the images of a batch at random, for both models alike. φ also learns from what
    `sampler` draws, in the order of `rng`; in a batch it stands before the own examples.
    """

    def __init__(
        self,
        private: Learning,
        proxy: Learning,
        task: Task,
        request: Mutual,
        batch_size: int,
        dp: DPTraining | None,
        rests: bool = False,
        augment: Augment | None = None,
        sampler: ReplaySampler | None = None,
        rng: torch.Generator | None = None,
    ) -> None:
        self.private, self.proxy, self.task, self.batch_size = private, proxy, task, batch_size
        self.drawn = sampler.beside(batch_size) if sampler and request.listen == "loss" else 0  # in a common step
        self.alpha, self.beta, self.request = request.alpha, request.beta, request
        self.dp, self.rests, self.augment, self.sampler, self.rng = dp, rests, augment, sampler, rng
        self.fewest = 2 if has_batch_norm(private.model) else 1  # examples that φ needs in a batch
        self.losses: list[Tensor] = []  # of φ
        self.seen, self.proxy_steps = 0, 0

    def batches(self, data: Shard, shuffle: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one pass over the examples: Poisson batches where θ's steps are under DP."""
        drawn = self.dp.batches(data) if self.dp else batches(data.x, data.y, self.batch_size, shuffle)
        return changed(self.mixed(drawn, self.batch_size) if self.drawn else drawn, self.augment)

    def mixed(self, real: Iterator[tuple[Tensor, Tensor]], size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of b = `size` own examples, behind draws where there are such."""
        return mixed_batches(real, self.sampler, size, self.rng) if self.sampler and self.rng else real

    def alone(self, data: Shard, rows: Tensor, shuffle: torch.Generator) -> None:
        """Let φ learn from the proxy as it arrived, pass after pass over these rows; θ stays as it is."""
        phi, theta = self.private, self.proxy
        for _ in range(self.request.private_epochs):
            drawn = batches(data.x, data.y, self.request.private_batch_size, shuffle, among=rows)
            for plain_B, y_B in changed(self.mixed(drawn, self.request.private_batch_size), self.augment):
                x_B = shift_batch(plain_B, self.request.private_shift, shuffle)
                f_B, h_B = phi.model(x_B), inference(theta.model, x_B)
                loss_phi = partial(mutual_loss, self.task, self.alpha, f_B, y_B=y_B)  # eq. 4
                self.private_step(loss_phi, h_B)  # eq. 6
                self.seen += len(y_B)

    def step(self, x_B: Tensor, y_B: Tensor) -> None:
        """Let both models step on a batch, each with the other's outputs from before either has stepped."""
        learns = len(y_B) >= self.fewest and self.request.listen == "loss"  # else in passes of its own
        f_B = self.private.model(x_B) if learns else inference(self.private.model, x_B)
        loss_phi = partial(mutual_loss, self.task, self.alpha, f_B, y_B=y_B)  # eq. 4: (1 - α) CE(f, y) + α KL(h ‖ f)
        each = self.dp is not None  # DP-SGD needs every example's own loss
        loss_theta = partial(mutual_loss, self.task, self.beta, each=each)  # eq. 5: (1 - β) CE(h, y) + β KL(f ‖ h)
        h_B = self.proxy_step(loss_theta, x_B, y_B, f_B.detach())  # eq. 7: θ ← θ - η (Σ clipped g_θ + noise) / b
        if learns:
            self.private_step(loss_phi, h_B)  # eq. 6: φ ← φ - η ∇L_φ
        self.seen += self.batch_size + self.drawn if self.dp else len(y_B)  # a Poisson batch's size is secret

    def private_step(self, loss: Callable[..., Tensor], h_B: Tensor) -> None:
        """Let φ step on a batch."""
        self.losses.append(step(self.private.model, self.private.optimizer, loss(h_B)))

    def proxy_step(self, loss: Callable[..., Tensor], x_B: Tensor, y_B: Tensor, f_B: Tensor) -> Tensor:
        """Let θ step on the own examples, by DP-SGD where charged, not at all where θ rests; return h from before."""
        theta = self.proxy
        if self.rests:
            return inference(theta.model, x_B)
        h_chunks = [inference(theta.model, x_B[: self.drawn]) if self.drawn else f_B[:0]]  # then chunk by chunk
        own = x_B[self.drawn :], y_B[self.drawn :], f_B[self.drawn :]

        def loss_of(x: Tensor, y: Tensor, f: Tensor) -> Tensor:
            h_chunks.append(theta.model(x))
            return loss(h_chunks[-1], f, y)

        if self.dp:
            self.dp.step(theta.model, theta.optimizer, loss_of, own, self.batch_size)
        else:
            step(theta.model, theta.optimizer, loss_of(*own))
        self.proxy_steps += 1
        return torch.cat(h_chunks).detach()

    def loss(self) -> float | None:
        """Return φ's mean loss, which must be finite; None where the proxy is under DP, since the loss has no noise."""
        return mean_loss(self.losses) if self.losses and not (self.dp or self.rests) else None


def inference(model: nn.Module, x_B: Tensor) -> Tensor:
    """Return a model's logits in evaluation mode, without gradients; nothing in the model changes."""
    model.eval()
    with torch.no_grad():
        logits_B: Tensor = model(x_B)
    model.train()
    return logits_B


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
        under DP, or masks: φ goes back to its weights from before this training. What diverged has a fresh optimizer.
        """
        quiet = not self.institution.reports_losses or (self.budget and self.budget.plan.covers("update"))
        loss = None if quiet else learner.loss()
        state, kept = {"model": to_arrays(learner.private.model)}, {"optimizer": learner.private}
        kept |= {"proxy-optimizer": learner.proxy} if request.proxy_optimizer == "stays" else {}
        if not finite(learner.private.model):
            logging.getLogger("flwr").warning("the private model diverged in exchange %s", request.exchange)
            before = self.state.load("pair", request.run, request.exchange) or {}
            state["model"] = unnested(before)["model"] or to_arrays(self.fresh_private(request.private_seed))
        for key, half in kept.items() if request.optimizer_state == "keep" else ():
            if finite(half.model) and finite(half.optimizer):
                state[key] = optimizer_arrays(half.optimizer)
        self.save("pair", request, nested(state), give=True)
        return {
            "num_examples": len(self.institution.train),
            "examples_seen": learner.seen,
            "train_loss": loss,
            "num_steps": learner.proxy_steps,
        }

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


def shift_batch(x_BCHW: Tensor, pixels: int, rng: torch.Generator) -> Tensor:
    """Shift all images of a batch by one random offset, at most `pixels` to each side; zeros enter at the border."""
    if not pixels:
        return x_BCHW
    height, width = x_BCHW.shape[2:]
    down, right = torch.randint(2 * pixels + 1, (2,), generator=rng).tolist()
    padded = functional.pad(x_BCHW, (pixels,) * 4)
    return padded[:, :, down : down + height, right : right + width]


def mutual_loss(
    task: Task, weight: float, student_B: Tensor, teacher_B: Tensor, y_B: Tensor, each: bool = False
) -> Tensor:
    """Return (1 - weight) CE + weight KL(teacher ‖ student) of logits (B, C): a mean, or of `each` example, (B,)."""
    loss = task.losses(student_B, y_B) if each else task.loss(student_B, y_B)
    if not weight:
        return loss
    apart_B = divergences(student_B, teacher_B)
    return (1 - weight) * loss + weight * (apart_B if each else apart_B.mean())


def divergences(student_B: Tensor, teacher_B: Tensor) -> Tensor:
    """Return KL(teacher ‖ student) of every example's logits, nats, (B,)."""
    student, teacher = functional.log_softmax(student_B, 1), functional.log_softmax(teacher_B, 1)
    return functional.kl_div(student, teacher, reduction="none", log_target=True).sum(1)
