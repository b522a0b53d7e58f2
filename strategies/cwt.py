"""Cyclic weight transfer: the server's half; the institution's half is `clients/cwt.py`.

Source: Chang et al. 2018 (doi:10.1093/jamia/ocy017); Qu et al. 2022, section 4.1. With replay: Qu et al. 2022,
Algorithm 1, whose generator is trained by `flwr_replay/server/replay_codes.py` before the first cycle.
Idea: One model visits the institutions in turn. Each trains it for max(1, ⌊|D_k|/b⌋) iterations and hands it on.
Travels: the weights, to the visited institution (`Train`) and back (`Trained`, with counts and a loss).

    for each cycle n:
        for each institution k of this cycle, in its order:
            θ ← train θ at k

Deviations: The model goes from one institution to the next through the server, as Flower's messages require. The
optimizer's state does not travel with it (see optimizer-state); the running statistics of batch norm do.

Failures: An institution that is absent or fails is passed over. The run stops, and can be resumed, once visits to all
have failed since the last that succeeded (`flwr_replay/movements/serial.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flwr_replay.config.sections import one_of
from flwr_replay.config.strategy import StrategyConfig, Traits
from flwr_replay.movements.serial import Serial
from flwr_replay.payloads.common import Train
from flwr_replay.rng import derived_rng
from flwr_replay.wire.records import Weights

__all__ = ["CWT", "CWTConfig"]


@dataclass(frozen=True, kw_only=True)
class CWTConfig(StrategyConfig):
    """Options of CWT."""

    name = "cwt"
    traits = Traits(
        relayed=True,
        supports_replay=True,
        supports_draws=True,
        takes_fraction=True,
        own_batches=True,
        dp_mechanisms=("generator", "prior", "classifier", "statistics"),
    )
    order: str = "fixed"  # fixed: by name | shuffled: a new order in every cycle
    optimizer_state: str = "reset"  # reset: fresh momentum at every visit | keep: each institution keeps its own

    def __post_init__(self) -> None:
        one_of("strategy.order", self.order, ("fixed", "shuffled"))
        one_of("strategy.optimizer-state", self.optimizer_state, ("keep", "reset"))

    def dp_passes(self, rounds: int) -> Mapping[str, int]:
        """One pass a cycle."""
        return {"classifier": rounds}


class CWT(Serial):
    """One model visits the institutions in turn."""

    config_type = CWTConfig
    config: CWTConfig

    def order(self, cycle: int, names: list[str]) -> list[str]:
        """Return this cycle's order of visits."""
        if self.config.order == "fixed":
            return names
        shuffle = derived_rng(self.settings.seed, "order", cycle)
        return [names[i] for i in shuffle.permutation(len(names))]

    def train_request(self, exchange: int, arrays: Weights) -> Train:
        """Hand θ on unchanged."""
        return Train(
            exchange=exchange,
            arrays=arrays,
            run=self.settings.run,
            lr=self.lr(exchange),
            optimizer_state=self.config.optimizer_state,
        )
