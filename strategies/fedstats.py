"""FedStats: the server's half; the institution's half is `clients/fedstats.py`.

Source: Legate et al. 2023 (arXiv 2306.03937, FedNCM), nearest class means (Mensink et al. 2013) of all institutions on
fixed features. Noise on the sums is ours: the Gaussian mechanism, Balle and Wang 2018 (arXiv 1805.06530).
Idea: Every institution sums the features of its images, class by class, and sends the sums once. The means of all are a
classifier that does not depend on who has which images.
Travels: the weights, to every institution (`Summarise`); once from each the sums, of the size of a head (`ClassSums`).

    at institution k:  S_k,c ← Σ f_i over its examples of class c,  n_k,c ← their number        ‖f_i‖ ≤ C
    at the server:     μ_c ← Σ_k S_k,c / Σ_k n_k,c
                       an image with features f is of the class with the largest  μ_c·f − ‖μ_c‖²/2

What is protected: With dp=statistics the sums have Gaussian noise. All of an institution's one message but numbers of
examples is (ε, δ)-DP for one patient more or less, all of whose images there are clipped together, where the data name
patients; else for one image more or less. Without it nothing is: of a class with one image its features leave.

Deviations: The authors' code brings each μ_c to norm 1 and leaves the fresh biases; their fine-tuning is not here.
Where sums have noise, ‖μ_c‖² is corrected by what the noise adds on average, and no class counts as smaller than six
times the noise of its number. Logits are scaled to a fixed margin, which changes no decision. An institution that is
late sends its sums when it comes; later rounds ask nobody twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from flwr_replay.config.sections import Range, TaskConfig, require, within
from flwr_replay.config.strategy import StrategyConfig, Traits
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.learning.heads import linear_head
from flwr_replay.movements.base import Settings
from flwr_replay.movements.parallel import Parallel
from flwr_replay.payloads.common import Trained
from flwr_replay.payloads.fedstats import ClassSums, Summarise
from flwr_replay.privacy.plan import STATISTICS
from flwr_replay.privacy.sums import noises
from flwr_replay.server.members import Member
from flwr_replay.wire.records import StateDict, Weights, opened

__all__ = ["FedStats", "FedStatsConfig"]

NEVER = -1e3  # bias of a class of which nobody has an example
SURE = 6  # times the noise: a number of examples that divides; chosen on CIFAR-10's validation images, seeds 0 to 2
MARGIN = 4  # by which, on average, a class mean's own logit is above another


@dataclass(frozen=True, kw_only=True)
class FedStatsConfig(StrategyConfig):
    """Options of FedStats."""

    name = "fedstats"
    traits = Traits(summed=True, dp_mechanisms=(STATISTICS,))
    clip: float = 10.0  # C, the largest L2 norm of an image's features

    def __post_init__(self) -> None:
        within("strategy.", self, clip=Range(1e-6, 1e6, "lies in [1e-6, 1e6]"))

    def check_task(self, task: TaskConfig) -> None:
        """Refuse a task without classes."""
        require(
            task.kind == "classification",
            f"strategy=fedstats sums features class by class; task={task.name} is a {task.kind}, which has none: "
            "choose a classification, or another strategy",
        )

    def dp_passes(self, rounds: int) -> Mapping[str, int]:
        """One message, however many rounds there are."""
        return {STATISTICS: 1}


class FedStats(Parallel):
    """Every institution sends sums once; the server makes a classifier of them."""

    config_type = FedStatsConfig
    config: FedStatsConfig
    stages = ("summarise", "evaluate")
    answer = ClassSums

    sums: StateDict  # Σ_k n_k times what institution k has sent: S and n
    held: tuple[str, ...] = ()  # whose sums these are
    variance: float = 0.0  # Σ_k σ_k², of the noise in units of the clip

    @classmethod
    def check(cls, config: FedStatsConfig, settings: Settings, names: Sequence[str] = ()) -> None:
        """Refuse changed images, and a model without a linear head."""
        super().check(config, settings, names)
        require(
            not settings.training.changes,
            "strategy=fedstats takes each image once, as it is: set training.augment=none",
        )
        if settings.model is not None:
            linear_head(settings.model(0))

    @cached_property
    def head(self) -> tuple[str, str]:
        """Names of the head's weights, (C, F), and biases, (C,)."""
        if self.settings.model is None:
            raise ConfigError("FedStats makes the head at the server and needs the model: give Settings(model=...)")
        name, _ = linear_head(self.settings.model(0))
        return f"{name}.weight", f"{name}.bias"

    @property
    def numbers(self) -> int:
        """Those of the head."""
        assert self.settings.model is not None
        _, head = linear_head(self.settings.model(0))
        return head.weight.numel() + head.bias.numel()

    def trainers(self, exchange: int) -> list[Member]:
        """Ask those whose sums are not there yet; of sums under masks, all at once."""
        if self.held and self.settings.hiding.sums_only:
            return []
        return [member for member in self.members if member.name not in self.held]

    def trains_in(self, num_rounds: int) -> Mapping[str, Sequence[int]]:
        """Each institution is asked once, in the first round if it is there."""
        return dict.fromkeys(self.members.names, (1,))

    def train_request(self, exchange: int, arrays: Weights) -> Summarise:
        """Send θ, whose features are summed."""
        return Summarise(server_round=exchange, arrays=arrays, run=self.settings.run, clip=self.config.clip)

    def lose(self, lost: Sequence[str]) -> None:
        """Stop: the others' sums are made for just these institutions, and nobody makes others."""
        raise RunError(
            f"sums are made once, to be added to those of the same institutions; {', '.join(lost)} did not answer; "
            f"{self.recorder.failures_line()}: resume the run when all that were asked at first are there, and nobody "
            "else, or begin a new run"
        )

    def combine(self, answers: Sequence[Trained]) -> StateDict:
        """Add the sums to those before; return θ with the head that they make."""
        sizes = {member.name: member.num_examples for member in self.members.known}
        plan, names = self.settings.privacy, self.exchanger.answered
        if plan:
            self.variance += sum(plan.share(STATISTICS, sizes[name]) ** 2 for name in names)
        before = self.sums if self.held else dict.fromkeys(self.head, np.float64(0))
        sent = [(answer.num_examples, opened(answer.arrays)) for answer in answers]
        self.sums = {name: before[name] + sum(n * of[name].astype(np.float64) for n, of in sent) for name in self.head}
        self.held = (*self.held, *names)
        weight, bias = self.head
        of_number, of_sums = noises(self.config.clip)
        made = self.classifier(self.sums[weight] * of_sums, self.sums[bias] * of_number)
        return {**self.sent, **{name: made[i].astype(self.sent[name].dtype) for i, name in enumerate(self.head)}}

    def classifier(self, sums_CF: Any, numbers_C: Any) -> tuple[Any, Any]:
        """Return weights and biases of the nearest class mean."""
        of_number, of_sums = (noise * self.variance**0.5 for noise in noises(self.config.clip))
        n_C = np.maximum(numbers_C, max(1.0, SURE * of_number))
        mu_CF = sums_CF / n_C[:, None]
        by_noise_C = mu_CF.shape[1] * (of_sums / n_C) ** 2  # of ‖μ‖², on average
        squares_C = np.square(mu_CF).sum(1) - by_noise_C
        apart = (squares_C - np.square(mu_CF.mean(0)).sum() + by_noise_C.mean() / len(n_C)).mean()
        scale = max(apart, 0.01 * self.config.clip**2) / MARGIN
        nobody_C = (numbers_C <= 0) & (self.variance == 0)
        return mu_CF / scale, np.where(nobody_C, NEVER, -squares_C / 2 / scale)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return the sums, and whose they are."""
        return (self.sums if self.held else {}), {"held": list(self.held), "variance": self.variance}

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Restore the sums."""
        self.sums, self.held, self.variance = arrays, tuple(values["held"]), values["variance"]
