"""SCAFFOLD: the server's half; the institution's half is `clients/scaffold.py`.

Source: Karimireddy et al. 2020 (arXiv 1910.06378), Algorithm 1, option II.
Idea: FedAvg, whose institutions correct each step by how their gradients differ from everybody's.
Travels: the weights and a control of their size, to every institution and back (`TrainControlled`).

    c ← 0, c_k ← 0
    for each round:
        for each institution k in parallel:
            θ_k ← E passes at k from θ, by the gradients g - c_k + c
            c_k⁺ ← c_k - c + (θ - θ_k) / (K η),  after K steps;  Δ_k ← c_k⁺ - c_k,  c_k ← c_k⁺
        θ ← Σ_k (n_k / n) θ_k
        c ← c + Σ_k (n_k / n) Δ_k

What is protected: Nothing. A control is a mean gradient of one institution, and shows about as much as its weights.

Deviations: The paper weighs all institutions alike and lets all take K steps; here n_k counts, and K is that of E
passes over n_k examples, as in our FedAvg. The global step size is 1, as in the paper's experiments. With momentum, K η
is the sum of all steps that a gradient makes (`travelled` in the other half); weight decay is in g. With fraction= the
sums for c leave out those that were not drawn; who joins later counts in n from then on. An answer that is lost is lost
on both sides: its institution goes on from the control that the server knows of. Batch norm's running statistics have
no control, and are averaged as in FedAvg. The server cuts c back to what institutions accept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from flwr_replay.config.sections import PASSES, require, within
from flwr_replay.config.strategy import StrategyConfig, Traits
from flwr_replay.errors import refuse_each
from flwr_replay.movements.base import Settings
from flwr_replay.movements.parallel import Parallel, weighted_mean
from flwr_replay.payloads.common import Trained
from flwr_replay.payloads.scaffold import CONTROL, TrainControlled, zeros
from flwr_replay.wire.bounds import cut_back
from flwr_replay.wire.records import StateDict, Weights, opened
from flwr_replay.wire.weights import joined, parted

__all__ = ["Scaffold", "ScaffoldConfig"]


@dataclass(frozen=True, kw_only=True)
class ScaffoldConfig(StrategyConfig):
    """Options of SCAFFOLD."""

    name = "scaffold"
    traits = Traits(mixes=True, summed=True, takes_fraction=True, needs_roll_call=True, own_batches=True)
    local_epochs: int = 1  # E, passes over an institution's data per round

    def __post_init__(self) -> None:
        within("strategy.", self, local_epochs=(1, PASSES))


class Scaffold(Parallel):
    """All train at once, each corrected by its control; the server averages weights and controls."""

    config_type = ScaffoldConfig
    config: ScaffoldConfig
    stages = ("train-controlled", "evaluate")

    total_control: StateDict  # Σ_k n_k c_k, by the names of the weights; empty before the first answers

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.total_control = {}

    @property
    def control(self) -> StateDict:
        """Control c, a mean over all that have ever been here; within what institutions accept."""
        n = sum(member.num_examples for member in self.members.known)
        mean = {name: array / n for name, array in self.total_control.items()}
        return {**mean, **cut_back(mean)}

    @classmethod
    def check(cls, config: ScaffoldConfig, settings: Settings, names: Sequence[str] = ()) -> None:
        """Refuse Adam, whose steps are no sums of gradients."""
        optimizer = settings.training.optimizer
        refuse_each(
            partial(super().check, config, settings, names),
            lambda: require(
                optimizer == "sgd",
                f"strategy=scaffold makes gradients of what SGD has changed; got training.optimizer={optimizer}: set "
                "training.optimizer=sgd",
            ),
        )

    def train_request(self, exchange: int, arrays: Weights) -> TrainControlled:
        """Send θ and c."""
        return TrainControlled(
            exchange=exchange,
            arrays=self.with_control(arrays),
            run=self.settings.run,
            lr=self.lr(max(1, exchange)),
            local_epochs=self.config.local_epochs,
        )

    def with_control(self, arrays: Weights) -> Weights:
        """Return θ, and c beside it."""
        return joined(arrays, self.control or zeros(parted(arrays, CONTROL)[0]), CONTROL)

    def combine(self, answers: Sequence[Trained]) -> StateDict:
        """Average θ_k, and add n_k Δ_k to the sum of n_k c_k."""
        sizes = [answer.num_examples for answer in answers]
        theta, change = parted(weighted_mean([opened(answer.arrays) for answer in answers], sizes), CONTROL)
        before = self.total_control or zeros(theta)
        self.total_control = {name: before[name] + sum(sizes) * delta for name, delta in change.items()}
        return theta

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return the sum of n_k c_k."""
        return self.total_control, {}

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Restore it."""
        self.total_control = dict(arrays)
