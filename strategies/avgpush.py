"""AvgPush: the server's half; the institution's half is `clients/avgpush.py`.

Source: Kalra et al. 2023 (ProxyFL), section 4.1: "a decentralized version of FedAvg using PushSum for aggregation".
Idea: Every institution trains its own model for one pass. Models then pass over a graph, and each institution mixes
its own with those that it receives.
Travels: θ_k up, once a round (`Push`, `Released`); the senders' models down, with the share of each (`Deliver`,
`Committed`).

    for each round t:
        every institution k: θ_k ← train θ_k for max(1, ⌊n_k/b⌋) iterations
        z_k ← Σ_k' P(t)[k, k'] w_k' θ_k',   w_k ← Σ_k' P(t)[k, k'] w_k',   θ_k ← z_k / w_k      # `movements/gossip.py`

Deviations: Models pass through the server, which forwards them and averages nothing. As in PushSum, all institutions
have the same weight, whatever their numbers of examples. With the complete graph and equal sizes this is FedAvg.
With fraction= only those drawn for a round train, and the graph is over them; the paper has all.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flwr_replay.config.strategy import Traits
from flwr_replay.movements.gossip import Gossip, GossipConfig
from flwr_replay.payloads.avgpush import EvaluatePeer, Push
from flwr_replay.payloads.relay import Released
from flwr_replay.server.members import Member
from flwr_replay.wire.records import Weights

__all__ = ["AvgPush", "AvgPushConfig"]


@dataclass(frozen=True, kw_only=True)
class AvgPushConfig(GossipConfig):
    """Options of AvgPush."""

    name = "avgpush"
    traits = Traits(
        mixes=True,
        relayed=True,
        takes_fraction=True,
        needs_roll_call=True,
        one_form=True,
        own_models=True,
        begins_at_server=False,
        global_model=False,
        own_batches=True,
        dp_mechanisms=("classifier",),
    )

    def dp_passes(self, rounds: int) -> Mapping[str, int]:
        """One pass a round."""
        return {"classifier": rounds}


class AvgPush(Gossip):
    """Every institution trains its own model and mixes it with those of its senders."""

    config_type = AvgPushConfig
    config: AvgPushConfig
    stages = ("push", "deliver", "evaluate-peer")
    answer = Released

    def train_request(self, exchange: int, member: Member) -> Push:
        """Ask for one pass."""
        return Push(**self.instructions(exchange, member), optimizer_state=self.config.optimizer_state)

    def evaluation(self, exchange: int, arrays: Weights) -> EvaluatePeer:
        """Each institution tests its own model, after mixing."""
        return EvaluatePeer(exchange=exchange, run=self.settings.run)
