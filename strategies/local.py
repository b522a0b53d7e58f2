"""Local: the server's half; the institution's half is `clients/local.py`.

Source: "Regular" in Kalra et al. 2023 (ProxyFL), section 4: every institution trains alone (there with DP-SGD).
Idea: Every institution trains alone. This is what it reaches without collaboration.
Travels: nothing of the model; requests to train or evaluate (`TrainOwn`, `EvaluateOwn`), counts and losses back.

    for each round: every institution k trains its own θ_k for max(1, ⌊n_k/b⌋) iterations

Deviations: The labels of a regression are standardised with one mean and one standard deviation for all institutions,
from the sums that they report at the roll call. The pooled metric is over the institutions' own models, each on its own
test shard. With the default `partition.test=iid` a shard is a sample of all patients; with `mirror` it has the
institution's own mix of labels. With fraction= only those drawn for a round train; the paper has all.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flwr_replay.config.sections import one_of
from flwr_replay.config.strategy import StrategyConfig, Traits
from flwr_replay.movements.relay import Relay
from flwr_replay.payloads.local import EvaluateOwn, TrainedOwn, TrainOwn
from flwr_replay.rng import derived_seed
from flwr_replay.server.members import Member
from flwr_replay.wire.records import Weights

__all__ = ["Local", "LocalConfig"]


@dataclass(frozen=True, kw_only=True)
class LocalConfig(StrategyConfig):
    """Options of Local."""

    name = "local"
    traits = Traits(
        takes_fraction=True,
        needs_roll_call=True,
        own_models=True,
        begins_at_server=False,
        global_model=False,
        private_key="model",
        own_batches=True,
        dp_mechanisms=("classifier",),
        metrics_note="local is each institution's own model, tested on that institution's test examples only",
    )
    optimizer_state: str = "keep"  # keep: one uninterrupted training | reset: fresh momentum every round

    def __post_init__(self) -> None:
        one_of("strategy.optimizer-state", self.optimizer_state, ("keep", "reset"))

    def dp_passes(self, rounds: int) -> Mapping[str, int]:
        """One pass a round."""
        return {"classifier": rounds}


class Local(Relay):
    """Every institution trains alone."""

    config_type = LocalConfig
    config: LocalConfig
    stages = ("train-own", "evaluate-own")
    answer = TrainedOwn

    def train_request(self, exchange: int, member: Member) -> TrainOwn:
        """Ask for one pass."""
        return TrainOwn(
            exchange=exchange,
            run=self.settings.run,
            lr=self.lr(exchange),
            init_seed=derived_seed(self.settings.seed, "model"),  # the same fresh weights as in every other method
            optimizer_state=self.config.optimizer_state,
        )

    def evaluation(self, exchange: int, arrays: Weights) -> EvaluateOwn:
        """Each institution tests its own model."""
        return EvaluateOwn(exchange=exchange, run=self.settings.run)
