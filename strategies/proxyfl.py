"""ProxyFL: the server's half; the institution's half is `clients/proxyfl.py`.

Source: Kalra et al. 2023 (arXiv 2111.11343), Algorithm 1.
Idea: every institution trains a private model φ_k and a small common proxy θ_k that learn from each other, the proxy by
DP-SGD; only proxies are exchanged, over a graph, and each institution mixes what it gets.
Travels: θ_k up, once (`TrainProxy`, `ReleasedProxy`), shares of the others' θ down (`Deliver`, `Committed`).

    for each round t, at every institution k:
        for max(1, ⌊n_k/b⌋) batches:                                                    # lines 2-5
            θ_k ← θ_k - η DP-gradient of (1-β) CE(h_θ) + β KL(f_φ ‖ h_θ)                # eq. 5, 7
            φ_k ← φ_k - η gradient of (1-α) CE(f_φ) + α KL(h_θ ‖ f_φ)                   # eq. 4, 6
        z_k ← Σ_k' P(t)[k, k'] w_k' θ_k',  w_k ← Σ_k' P(t)[k, k'] w_k',  θ_k ← z_k / w_k  # lines 7-10

What is protected: with dp=proxy and β = 0, every institution's training examples against whoever sees its proxies, by
its own (ε, δ). With β > 0, the paper's setting, that ε is what the paper counts and no proof
(`flwr_replay/institution/mutual.py`).
Not protected: what metrics on test examples tell of private models, who takes part, numbers of examples.

Deviations: proxies pass through the server, which forwards them and averages nothing. θ_k and w_k travel as they are,
and the receiver multiplies them, as it must after line 10 (`movements/topology.py`). In the divergence the teacher
stands first, as in deep mutual learning; both models step from answers before either has stepped
(`flwr_replay/institution/mutual.py`). An optimizer's state stays at its institution while proxies change places, which
the paper leaves open. A private model may learn from the proxy that arrived in passes of its own (private-epochs),
which costs no privacy. With dp=proxy a private model that diverges begins anew from before the visit, and nobody is
told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flwr_replay.movements.gossip import Gossip, GossipConfig
from flwr_replay.movements.mutual import MutualConfig, check_pair
from flwr_replay.payloads.mutual import EvaluatePair, PairEvaluation, ReleasedProxy, TrainProxy
from flwr_replay.rng import derived_seed
from flwr_replay.server.members import Member
from flwr_replay.server.settings import Settings
from flwr_replay.wire.records import Weights

__all__ = ["ProxyFL", "ProxyFLConfig"]


@dataclass(frozen=True, kw_only=True)
class ProxyFLConfig(MutualConfig, GossipConfig):
    """Options of ProxyFL."""

    name: ClassVar[str] = "proxyfl"

    def __post_init__(self) -> None:
        MutualConfig.__post_init__(self)
        GossipConfig.__post_init__(self)


class ProxyFL(Gossip):
    """Private models learn from proxies that travel."""

    name = "proxyfl"
    config_type = ProxyFLConfig
    config: ProxyFLConfig
    stages = ("train-proxy", "deliver", "evaluate-pair")
    dp_mechanisms = ("proxy",)
    evaluated = PairEvaluation
    answer = ReleasedProxy
    seed_of = "proxy"  # the private models begin as every other method's, and two equal ones would teach nothing

    @classmethod
    def check(cls, config: GossipConfig, settings: Settings, names: Sequence[str] = ()) -> None:
        """Refuse private models that cannot be built."""
        super().check(config, settings, names)
        check_pair(cls.name, settings)

    def train_request(self, server_round: int, member: Member) -> TrainProxy:
        """Ask for one pass of both models."""
        return TrainProxy(
            **self.instructions(server_round, member),
            **self.config.instructions(self.settings.training, self.lr(server_round)),
            private_seed=derived_seed(self.settings.seed, "model"),
            optimizer_state=self.config.optimizer_state,
        )

    def evaluation(self, server_round: int, arrays: Weights) -> EvaluatePair:
        """Each institution tests its private model and, after mixing, its proxy."""
        return EvaluatePair(server_round=server_round, run=self.settings.run)
