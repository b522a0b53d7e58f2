"""FML, federated mutual learning: the server's half; the institution's half is `clients/fml.py`.

Source: Shen et al. 2020 (arXiv 2006.16765), with DP-SGD on the proxy as in Kalra et al. 2023 (ProxyFL), section 4.1.
Idea: As in ProxyFL, every institution trains a private model and a proxy. A server averages the proxies (Shen et al.
call them memes) and sends the same one to all.
Travels: the proxy, down to all and, trained, up again (`TrainMutually`, `TrainedMutually`).

    for each round:
        every institution k: φ_k, θ_k ← train both from (φ_k, θ) for max(1, ⌊n_k/b⌋) batches, as in ProxyFL
        θ ← Σ_k n_k θ_k / Σ_k n_k

With dp=update no step has noise: a proxy's whole update gets it, clipped to C, as in `strategies/fedavg.py`. With
masked=true the server reads the mean of all proxies, and no single one. Of equal institutions this mean is what each
has after mixing on ProxyFL's complete graph.

What is protected: As in ProxyFL. With β > 0 the proxies' ε is the one that the paper counts; it is not proven. That of
dp=update is, for any β: an update is clipped whatever it depends on, φ too.

Deviations: Shen et al. have no differential privacy. Both losses use the predictions of both models from before either
steps. The state of a proxy's optimizer stays at its institution. With proxy-optimizer=travels it is released and
averaged with the proxy; it makes messages up to three times as large, and under DP it has the proxy's epsilon, since it
depends on noised gradients and on what arrived. With reset, or optimizer-state=reset, it is fresh every round. A
private model may train alone for some passes first (private-epochs). With dp=proxy, dp=update or masks a private model
that diverges returns to its state before the round, and no message says so. With fraction= only those drawn for a round
train; the paper has all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flwr_replay.errors import refuse_each
from flwr_replay.movements.mutual import MutualConfig, check_pair, first_state
from flwr_replay.movements.parallel import Parallel
from flwr_replay.payloads.common import Trained
from flwr_replay.payloads.mutual import EvaluateWithProxy, PairEvaluation, TrainedMutually, TrainMutually
from flwr_replay.privacy.plan import UPDATE
from flwr_replay.rng import derived_seed
from flwr_replay.server.members import Member
from flwr_replay.server.settings import Settings
from flwr_replay.wire.records import StateDict, Weights, array_record, opened
from flwr_replay.wire.weights import joined, parted

__all__ = ["FML", "FMLConfig"]


@dataclass(frozen=True, kw_only=True)
class FMLConfig(MutualConfig):
    """Options of FML."""

    name = "fml"
    traits = replace(MutualConfig.traits, summed=True, dp_mechanisms=(*MutualConfig.traits.dp_mechanisms, UPDATE))

    def dp_passes(self, rounds: int) -> Mapping[str, int]:
        """The proxy makes one pass a round, or one update."""
        return {**super().dp_passes(rounds), UPDATE: rounds}


class FML(Parallel):
    """Private models learn from a proxy that the server averages."""

    config_type = FMLConfig
    config: FMLConfig
    stages = ("train-mutually", "evaluate-with-proxy")
    evaluated = PairEvaluation
    answer = TrainedMutually

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.proxy_state = first_state(self.config, self.settings)  # of the proxy's optimizer, averaged; if it travels

    @classmethod
    def check(cls, config: FMLConfig, settings: Settings, names: Sequence[str] = ()) -> None:
        """Refuse private models that cannot be built."""
        refuse_each(partial(super().check, config, settings, names), partial(check_pair, config, settings))

    def train_request(self, exchange: int, arrays: Weights) -> TrainMutually:
        """Ask for one pass of both models."""
        lr = self.lr(max(1, exchange))
        return TrainMutually(
            exchange=exchange,
            arrays=joined(arrays, self.proxy_state),
            run=self.settings.run,
            lr=lr,
            **self.config.instructions(self.settings.training, lr),
            private_seed=derived_seed(self.settings.seed, "private"),
            optimizer_state=self.config.optimizer_state,
        )

    def combine(self, answers: Sequence[Trained]) -> StateDict:
        """Average the proxies, and their optimizers' state if it travels: θ ← Σ_k n_k θ_k / Σ_k n_k."""
        theta, self.proxy_state = parted(self.mean(answers))
        return theta

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return the averaged state of the proxy's optimizer."""
        return self.proxy_state, {}

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Restore it."""
        self.proxy_state = arrays

    def evaluation(self, exchange: int, arrays: Weights) -> EvaluateWithProxy:
        """Each institution tests its private model and the averaged proxy."""
        listening = self.config.listening
        return EvaluateWithProxy(exchange=exchange, arrays=arrays, run=self.settings.run, **listening)

    def tested_on(self, split: str, member: Member, arrays: Weights) -> Weights | None:
        """Return the averaged proxy, or the one that the institution has trained, without its optimizer's state."""
        tested = super().tested_on(split, member, arrays)
        return tested if tested is None or tested is arrays else array_record(parted(opened(tested))[0])
