"""ProxyFL: the server's half; the institution's half is `clients/proxyfl.py`.

Source: Kalra et al. 2023 (arXiv 2111.11343), Algorithm 1.
Idea: Every institution trains a private model φ_k and a small proxy θ_k that learn from each other, the proxy by
DP-SGD. Only proxies are exchanged, over a graph, and each institution mixes its own with those that it receives.
Travels: θ_k up, once a round (`TrainProxy`, `ReleasedProxy`); the senders' proxies down, with the share of each
(`Deliver`, `Committed`).

    for each round t, at every institution k:
        for max(1, ⌊n_k/b⌋) batches:                                                    # lines 2-5
            θ_k ← θ_k - η DP-gradient of (1-β) CE(h_θ) + β KL(f_φ ‖ h_θ)                # eq. 5, 7
            φ_k ← φ_k - η gradient of (1-α) CE(f_φ) + α KL(h_θ ‖ f_φ)                   # eq. 4, 6
        z_k ← Σ_k' P(t)[k, k'] w_k' θ_k',  w_k ← Σ_k' P(t)[k, k'] w_k',  θ_k ← z_k / w_k  # lines 7-10

By default P(t) is `exponential`: in round t each sends its proxy to the institution 2^(t mod ⌈log2 K⌉) places on, by
name. So proxies change places, and none are averaged (`flwr_replay/movements/topology.py`).

What is protected: With dp=proxy and β = 0, every institution's training examples, by its own (ε, δ), against whoever
sees its proxies. With β > 0, the paper's setting, that ε is the one that the paper counts; it is not proven
(`flwr_replay/institution/mutual.py` says why).
With replay=statistics φ learns from features, too, that the institution draws from the sums of all
(`flwr_replay/server/replay_sums.py`). Under dp=statistics+proxy one account has the noisy sums and the proxies, and
states one ε of both together. Drawing is post-processing of what was charged and costs nothing more. θ's batches of
DP-SGD stay as they are: Poisson samples of the own examples, as the account counts them. (As public rows beside these,
draws would cost nothing either, but they were tried, and drew θ to what is wrong in them.)
Not protected: what test metrics reveal about the private models, which institutions take part, numbers of examples.

Deviations: Proxies pass through the server, which forwards them and averages nothing. θ_k and w_k travel unscaled, and
the receiver multiplies by w_k and the share; after the division in line 10 this is necessary
(`flwr_replay/learning/pushsum.py`). The KL divergence has the teacher first, as in deep mutual learning. Both losses
use the predictions of both models from before either steps (`flwr_replay/institution/mutual.py`). An optimizer's state
stays at its institution while proxies move, which the paper leaves open. With proxy-optimizer=travels that of the
proxy's is released and mixed with the proxy; it makes messages up to three times as large, and under DP it has the
proxy's epsilon, since it depends on noised gradients and on what arrived. With reset it is fresh every round. A private
model may train alone for some passes first, with the proxy that arrived as its teacher (private-epochs); this costs no
privacy. With listen=pool it learns from labels alone and is tested together with the proxy, as a pool of both answers
with weights that fit held-out examples (`flwr_replay/learning/pooling.py`); none of these leave. With dp=proxy a
private model that diverges returns to its state before the round, and no message says so. With fraction= only those
drawn for a round train, and P(t) is over them; the paper has all.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flwr_replay.errors import refuse_each
from flwr_replay.movements.gossip import Gossip, GossipConfig
from flwr_replay.movements.mutual import MutualConfig, check_pair, first_state
from flwr_replay.payloads.mutual import EvaluatePair, PairEvaluation, ReleasedProxy, TrainProxy
from flwr_replay.rng import derived_seed
from flwr_replay.server.members import Member
from flwr_replay.server.settings import Settings
from flwr_replay.wire.records import StateDict, Weights, opened
from flwr_replay.wire.weights import form_of, joined, to_arrays

__all__ = ["ProxyFL", "ProxyFLConfig"]


@dataclass(frozen=True, kw_only=True)
class ProxyFLConfig(MutualConfig, GossipConfig):
    """Options of ProxyFL."""

    name = "proxyfl"
    traits = replace(MutualConfig.traits, relayed=True, begins_at_server=False, global_model=False)

    def __post_init__(self) -> None:
        MutualConfig.__post_init__(self)
        GossipConfig.__post_init__(self)


class ProxyFL(Gossip):
    """Private models learn from proxies that institutions exchange."""

    config_type = ProxyFLConfig
    config: ProxyFLConfig
    stages = ("train-proxy", "deliver", "evaluate-pair")
    evaluated = PairEvaluation
    answer = ReleasedProxy
    seed_of = "proxy"  # not "model", the private models' seed: two equal models would teach each other nothing

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first_state = first_state(self.config, self.settings)
        if self.first_state:
            self.released_form = form_of(self.with_state(to_arrays(self.settings.model(0))))

    @classmethod
    def check(cls, config: Any, settings: Settings, names: Sequence[str] = ()) -> None:
        """Refuse private models that cannot be built."""
        refuse_each(partial(super().check, config, settings, names), partial(check_pair, config, settings))

    def train_request(self, exchange: int, member: Member) -> TrainProxy:
        """Ask for one pass of both models."""
        return TrainProxy(
            **self.instructions(exchange, member),
            **self.config.instructions(self.settings.training, self.lr(exchange)),
            private_seed=derived_seed(self.settings.seed, "model"),
            optimizer_state=self.config.optimizer_state,
        )

    def with_state(self, theta: StateDict) -> StateDict:
        """Add to a proxy the state of its optimizer, where that travels, as zeros."""
        return opened(joined(theta, self.first_state))

    def travelling(self, arrays: Weights) -> Weights:
        """Return proxies as they travel: perhaps with the state of their optimizer."""
        return super().travelling(self.with_state(opened(arrays)))

    def evaluation(self, exchange: int, arrays: Weights) -> EvaluatePair:
        """Each institution tests its private model and, after mixing, its proxy."""
        return EvaluatePair(exchange=exchange, run=self.settings.run, **self.config.listening)
