"""MOON, model-contrastive learning: the server's half; the institution's half is `clients/moon.py`.

Source: Li, He and Song 2021 (arXiv 2103.16257), Algorithm 1.
Idea: FedAvg with a term that keeps the features of local models near the global one's, and off the last local one's.
Travels: as in FedAvg: the weights, to every institution (`TrainContrasted`, with μ and τ) and back.

    for each round:
        for each institution k in parallel: θ_k ← E passes at k over L(θ_k) + μ ℓ(z, z_global, z_last)
        θ ← Σ_k (n_k / n) θ_k

    ℓ = -log( exp(cos(z, z_global)/τ) / (exp(cos(z, z_global)/τ) + exp(cos(z, z_last)/τ)) )

Deviations: The features z are those that the model's linear head takes; the paper adds a projection head of two layers.
At its first training an institution has no last model, and ℓ is left out; in the paper it is constant then. The last
model is that of an institution's last training, however long ago, and even if its answer was lost. Both fixed models
are in evaluation mode, as in the authors' code: with batch norm z differs from z_global before the first step. The rest
is FedAvg's; μ = 0 is FedAvg, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flwr_replay.config.sections import NOT_NEGATIVE_FINITE, POSITIVE, require, within
from flwr_replay.learning.heads import linear_head
from flwr_replay.movements.base import Settings
from flwr_replay.payloads.moon import TrainContrasted
from flwr_replay.strategies.fedavg import FedAvg, FedAvgConfig
from flwr_replay.wire.records import Weights

__all__ = ["Moon", "MoonConfig"]


@dataclass(frozen=True, kw_only=True)
class MoonConfig(FedAvgConfig):
    """Options of MOON."""

    name = "moon"
    # not classifier: DP-SGD has no term beside the loss
    traits = replace(
        FedAvgConfig.traits, supports_draws=False, dp_mechanisms=("generator", "prior"), needs_roll_call=True
    )
    mu: float = 1.0  # weight of the contrastive term; paper: 5 on CIFAR-10, 1 on the others
    temperature: float = 0.5  # τ; paper: 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        within("strategy.", self, mu=NOT_NEGATIVE_FINITE, temperature=POSITIVE)


class Moon(FedAvg):
    """FedAvg with a contrastive term at the institutions."""

    config_type = MoonConfig
    config: MoonConfig
    stages = ("train-contrasted", "evaluate")

    @classmethod
    def check(cls, config: MoonConfig, settings: Settings, names: Sequence[str] = ()) -> None:
        """Refuse a model whose head takes no features, or none that change."""
        super().check(config, settings, names)
        if settings.model is None:
            return
        model = settings.model(0)
        name, _ = linear_head(model)
        require(
            any(p.requires_grad and not of.startswith(f"{name}.") for of, p in model.named_parameters()),
            "strategy=moon compares features that training changes; nothing trains but the head: use "
            "strategy=fedavg, or set model.train=all",
        )

    def train_request(self, exchange: int, arrays: Weights) -> TrainContrasted:
        """Send θ, μ and τ to every institution."""
        mu, temperature = self.config.mu, self.config.temperature
        return TrainContrasted(**vars(super().train_request(exchange, arrays)), mu=mu, temperature=temperature)
