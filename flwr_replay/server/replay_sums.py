"""Replay of drawn features: the server's half; the institution's half is in `clients/fedstats.py`.

Before a method's first round every institution sends sums, once, of what a frozen encoder makes of its images
(`strategies/fedstats.py`). What they say together goes to all: a Gaussian for each class. Batches then hold an
institution's own features, and features that it draws.

    every institution k: S_k, G_k ← sums by class, and of products                 up, once
    μ_c, W ← Σ_k S_k, Σ_k G_k                                                       down, to all

Failures: Who fails is asked again before the next exchange. Who comes late is added, and all get new Gaussians.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from flwr_replay.config.halves import load_strategy
from flwr_replay.files.tensors import OF_RUN, read_own, write_tensors
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.payloads.fedstats import KeepDraws
from flwr_replay.payloads.replay import Kept
from flwr_replay.server.exchange import Exchange, Exchanger
from flwr_replay.server.members import Member
from flwr_replay.server.replay_base import Replay
from flwr_replay.wire.records import StateDict

__all__ = ["StatisticsReplay"]


class StatisticsReplay(Replay):
    """Has every institution send sums of features, and sends all what these are drawn from."""

    def __init__(self, exchanger: Exchanger, plan: ReplayPlan) -> None:
        super().__init__(exchanger, plan.replay)
        method, options = load_strategy("fedstats")
        settings = replace(exchanger.settings, replay_plan=None, fraction=1.0)
        of_sums = options(head="mlp", clip=plan.replay.clip)  # type: ignore[call-arg]
        self.statistics: Any = method(of_sums, settings, exchanger.recorder, exchanger)  # the exchange of sums
        self.stages, self.run = plan.stages, exchanger.settings.run
        self.held: dict[str, list[int]] = {}  # by institution: of how many sums its Gaussians are, how many it draws
        self.current = [0, 0]  # as in `held`, of the newest

    def begin_run(self) -> None:
        """Say how large the sums' noise will be; refuse what hides every class."""
        self.statistics.begin_run()

    @property
    def summed(self) -> list[str]:
        """Names of those whose sums are there."""
        return [*self.statistics.held]

    @property
    def begun(self) -> bool:
        """Whether anybody's sums are there."""
        return bool(self.summed)

    def complete(self, arrays: StateDict) -> None:
        """Ask who has not sent sums; send Gaussians to all that lack the newest."""
        members, before = self.exchanger.members, self.summed
        if self.statistics.trainers(self.exchange):
            self.statistics.exchange_round(self.grid, self.exchange, ArrayRecord(), self.extra, needed=False)
        if self.summed != before:  # a new file: the last checkpoint still refers to the old one
            write_tensors(self.path, self.statistics.sums, {OF_RUN: self.run})
        if self.summed and (lacking := [member for member in members if self.lacks(member.name)]):
            keep = self.keep(self.statistics.gaussians)
            messages = [self.exchanger.message(member, keep, self.extra) for member in lacking]
            replies = self.exchanger(self.grid, self.exchange, messages, needed=False)
            self.held |= {member.name: self.current for member, _ in self.exchanger.answers(replies)}

    @property
    def path(self) -> Any:
        """Where the sums of these institutions lie."""
        return self.exchanger.recorder.folder("replay") / f"sums-{len(self.summed):05d}.safetensors"

    def keep(self, gaussians: StateDict) -> KeepDraws:
        """Send Gaussians, and note how many features are drawn from them."""
        self.current = [len(self.summed), int(gaussians["counts"].sum())]
        return KeepDraws(run=self.run, exchange=self.exchange, arrays=gaussians)

    def lacks(self, name: str) -> bool:
        """Return whether an institution has no Gaussians of all sums."""
        return self.held.get(name, [0])[0] < len(self.summed)

    def lacking(self) -> dict[str, str]:
        """Return, by institution, what is incomplete."""
        members = self.exchanger.members
        reasons = {member.name: "has received no draws" for member in members if self.lacks(member.name)}
        silent = {member.name for member in members.known if member.ours} - {*self.summed}
        return dict(sorted((reasons | dict.fromkeys(silent, "is not replayed")).items()))

    def holding(self, name: str) -> int:
        """Return how many features an institution draws in a pass."""
        return self.held.get(name, [0, 0])[1]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold; sums are in a file."""
        return {"summed": self.summed, "held": self.held, "variance": self.statistics.variance}

    def restore(self, values: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        self.held, self.statistics.held = values["held"], tuple(values["summed"])
        sums = dict(read_own(self.path, self.run)) if self.summed else {}
        self.statistics.restore(sums, {"held": self.summed, "variance": values["variance"]})

    def forecast(self, members: Sequence[Member]) -> list[Exchange]:
        """Every institution sends sums once, and receives Gaussians once."""
        _, _, C, F = self.statistics.head
        blank: StateDict = {"means": np.zeros((C, F), np.float32), "factor": np.zeros((F, F), np.float32)}
        blank["counts"] = np.zeros(C, np.int64)
        keep, kept = self.keep(blank), Kept.blank()
        self.held = {member.name: [1, sum(m.num_examples for m in members)] for member in members}
        return [*self.statistics.forecast({}, 1), *((member, keep, kept, 1) for member in members)]
