"""FML, federated mutual learning: the server's half; the institution's half is `clients/fml.py`.

Source: Shen et al. 2020 (arXiv 2006.16765), with DP-SGD on the proxy as in Kalra et al. 2023 (ProxyFL), section 4.1.
Idea: As in ProxyFL, every institution trains a private model and a proxy. A server averages the proxies (Shen et al.
call them memes) and sends the same one to all.
Travels: the proxy, down to all and, trained, up again (`TrainMutually`, `TrainedMutually`).

    for each round:
        every institution k: φ_k, θ_k ← train both from (φ_k, θ) for max(1, ⌊n_k/b⌋) batches, as in ProxyFL
        θ ← Σ_k n_k θ_k / Σ_k n_k

What is protected: As in ProxyFL. With β > 0 the proxies' ε is the one that the paper counts; it is not proven.

Deviations: Shen et al. have no differential privacy. Both losses use the predictions of both models from before either
steps. The state of a proxy's optimizer stays at its institution; with optimizer-state=reset every round begins with a
fresh one. A private model may train alone for some passes first (private-epochs). With dp=proxy a private model that
diverges returns to its state before the round, and no message says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flwr_replay.config.sections import one_of
from flwr_replay.movements.mutual import MutualConfig, check_pair
from flwr_replay.movements.parallel import Parallel, weighted_mean
from flwr_replay.payloads.common import Trained
from flwr_replay.payloads.mutual import EvaluateWithProxy, PairEvaluation, TrainedMutually, TrainMutually
from flwr_replay.rng import derived_seed
from flwr_replay.server.settings import Settings
from flwr_replay.wire.records import StateDict, Weights, opened

__all__ = ["FML", "FMLConfig"]


@dataclass(frozen=True, kw_only=True)
class FMLConfig(MutualConfig):
    """Options of FML."""

    name: ClassVar[str] = "fml"
    optimizer_state: str = "keep"  # keep: both optimizers keep their state | reset: fresh ones every round

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("strategy.optimizer-state", self.optimizer_state, ("keep", "reset"))


class FML(Parallel):
    """Private models learn from a proxy that the server averages."""

    name = "fml"
    config_type = FMLConfig
    config: FMLConfig
    stages = ("train-mutually", "evaluate-with-proxy")
    dp_mechanisms = ("proxy",)
    evaluated = PairEvaluation
    answer = TrainedMutually
    one_form = True

    @classmethod
    def check(cls, config: FMLConfig, settings: Settings, names: Sequence[str] = ()) -> None:
        """Refuse private models that cannot be built."""
        super().check(config, settings, names)
        check_pair(cls.name, settings)

    def train_request(self, server_round: int, arrays: Weights) -> TrainMutually:
        """Ask for one pass of both models."""
        lr = self.lr(max(1, server_round))
        return TrainMutually(
            server_round=server_round,
            arrays=arrays,
            run=self.settings.run,
            lr=lr,
            **self.config.instructions(self.settings.training, lr),
            private_seed=derived_seed(self.settings.seed, "private"),
            optimizer_state=self.config.optimizer_state,
        )

    def combine(self, answers: Sequence[Trained]) -> StateDict:
        """Average the proxies: θ ← Σ_k n_k θ_k / Σ_k n_k."""
        return weighted_mean([opened(a.arrays) for a in answers], [a.num_examples for a in answers])

    def evaluation(self, server_round: int, arrays: Weights) -> EvaluateWithProxy:
        """Each institution tests its private model and the averaged proxy."""
        own = self.config.listening
        return EvaluateWithProxy(server_round=server_round, arrays=arrays, run=self.settings.run, **own)
