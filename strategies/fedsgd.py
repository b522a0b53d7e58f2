"""Federated SGD: the server's half; the institution's half is `clients/fedsgd.py`.

Source: McMahan et al. 2017 (arXiv:1602.05629), section 2, FederatedSGD; Qu et al. 2022, section 2.
Idea: In every round each institution computes one gradient over all its examples. The server takes the step.
Travels: the weights, to every institution (`Differentiate`), one gradient back (`Gradient`, with counts and a loss).

    for each round:
        for each institution k in parallel: g_k ← ∇L_k(θ), over all n_k examples
        θ ← θ - η Σ_k (n_k / n) g_k

With dp=gradient, in every round

    g_k ← (Σ_p ∇L_p(θ) / max(1, ‖∇L_p(θ)‖ / C) + N(0, σ²C² I)) / n_k     L_p sums the losses of one patient's examples

which is DP-SGD (Abadi et al. 2016, arXiv 1607.00133, Algorithm 1) with a sampling rate of 1. With noise=shared the sum
of all institutions has this noise once (`flwr_replay.privacy.shares`).

Deviations: The step is that of the configured optimizer, whose momentum the server keeps; training.momentum=0 is
McMahan's SGD. C is the option fraction. A round has one step, so FedSGD needs many more rounds than FedAvg. An
institution sums its gradient over batches of up to 256 examples. Batch norm normalises over a batch, and its running
statistics are averaged. With lr_by_noise the rate is bounded by the noise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import hypot, inf, sqrt
from typing import Any

import torch
from torch import nn

from flwr_replay.config.sections import NOT_NEGATIVE_FINITE, require, within
from flwr_replay.config.strategy import StrategyConfig, Traits
from flwr_replay.errors import refuse_each
from flwr_replay.learning.tasks import Classification
from flwr_replay.learning.training import make_optimizer
from flwr_replay.movements.base import Settings
from flwr_replay.movements.parallel import Parallel
from flwr_replay.payloads.common import Trained
from flwr_replay.payloads.fedsgd import Differentiate, Gradient
from flwr_replay.privacy.dpsgd import refuse_chance
from flwr_replay.privacy.plan import GRADIENT
from flwr_replay.wire.records import StateDict, Weights
from flwr_replay.wire.weights import load_arrays, load_optimizer_arrays, optimizer_arrays, to_arrays

__all__ = ["FedSGD", "FedSGDConfig"]


@dataclass(frozen=True, kw_only=True)
class FedSGDConfig(StrategyConfig):
    """Options of FedSGD."""

    name = "fedsgd"
    traits = Traits(summed=True, supports_replay=True, takes_fraction=True, dp_mechanisms=(GRADIENT,))
    lr_by_noise: float = 0.0  # with dp=gradient the rate is at most this times n √T / σ; 0: as training says

    def __post_init__(self) -> None:
        within("strategy.", self, lr_by_noise=NOT_NEGATIVE_FINITE)

    def dp_passes(self, rounds: int) -> Mapping[str, int]:
        """One gradient in every round."""
        return {GRADIENT: rounds}


class FedSGD(Parallel):
    """Every institution computes one gradient; the server takes one step."""

    config_type = FedSGDConfig
    config: FedSGDConfig
    needs = ("model",)
    stages = ("differentiate", "evaluate")
    answer = Gradient

    kept: StateDict | None = None  # the optimizer's state from the checkpoint, if the run is resumed

    @classmethod
    def check(cls, config: FedSGDConfig, settings: Settings, names: Sequence[str] = ()) -> None:
        """Refuse changed images and parts that drop out under DP."""
        refuse_each(
            partial(super().check, config, settings, names),
            lambda: refuse_chance(settings.model(0)) if settings.privacy and settings.model is not None else None,
            lambda: require(
                not (settings.privacy and settings.training.changes),
                "dp=gradient takes each image once, as it is: set training.augment=none",
            ),
        )

    def train_request(self, exchange: int, arrays: Weights) -> Differentiate:
        """Send θ to every institution."""
        return Differentiate(exchange=exchange, arrays=arrays, run=self.settings.run)

    def combine(self, answers: Sequence[Trained]) -> StateDict:
        """Take one step: θ ← θ - η Σ_k (n_k / n) g_k; the optimizer may add momentum."""
        mean, (model, optimizer) = self.mean(answers), self.stepper
        gradients = {name: mean[name] for name, _ in model.named_parameters()}
        buffers = {} if self.settings.privacy else {name: mean[name] for name in mean.keys() - gradients.keys()}
        load_arrays(model, {**self.sent, **buffers})
        for name, parameter in model.named_parameters():
            parameter.grad = torch.from_numpy(gradients[name]).to(parameter.dtype)
        for group in optimizer.param_groups:
            group["lr"] = min(self.lr(self.exchange), self.fastest)
        optimizer.step()
        return to_arrays(model)

    @property
    def fastest(self) -> float:
        """The largest rate: with n examples in a sum, T rounds, and noise σ, c n √T / σ with c `lr_by_noise`."""
        plan, n = self.settings.privacy, sum(member.num_examples for member in self.added)
        if not (plan and self.noise and self.config.lr_by_noise):
            return inf
        return self.config.lr_by_noise * n * sqrt(plan.passes[0].epochs) / self.noise

    def reach(self, norm: float, clip: float) -> float:
        """√2 ‖(f, 1)‖ / C, of a head's gradient (p − y) (f, 1)ᵀ: probabilities p differ from labels by √2 at most."""
        return sqrt(2) * hypot(norm, 1) / clip if isinstance(self.task, Classification) else inf

    @cached_property
    def stepper(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The backbone, which holds θ during a step, and the server's optimizer."""
        assert self.settings.model is not None
        model = self.settings.model(0)
        optimizer = make_optimizer(model, self.settings.training, self.settings.training.lr)
        if self.kept:
            load_optimizer_arrays(optimizer, self.kept)
        return model, optimizer

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return the optimizer's state."""
        return optimizer_arrays(self.stepper[1]), {}

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Restore the optimizer's state."""
        self.kept = arrays
