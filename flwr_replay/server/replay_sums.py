"""Replay of drawn features: the server's half; the institution's half is in `clients/fedstats.py`.

Before a method's first round every institution sends sums, once, of what a frozen encoder makes of its images
(`strategies/fedstats.py`). What they say together goes to all: a Gaussian for each class. Batches then hold an
institution's own features, and features that it draws.

    every institution k: S_k, G_k ← sums by class, and of products                 up, once
    μ_c, W ← Σ_k S_k, Σ_k G_k                                                       down, to all

Failures: Who fails is asked again before the next exchange. Who comes late is added, and all get new Gaussians.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from flwr_replay.files.tensors import OF_RUN, read_own, write_tensors
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.learning.draws import frozen_features
from flwr_replay.payloads.fedstats import PRODUCTS, SUMS, ClassSums, KeepDraws, Summarise, pairs_of
from flwr_replay.payloads.replay import Kept
from flwr_replay.privacy.plan import STATISTICS
from flwr_replay.server.exchange import Exchange, Exchanger
from flwr_replay.server.members import Member
from flwr_replay.server.replay_base import Replay
from flwr_replay.server.sums import Moments
from flwr_replay.wire.records import StateDict, opened

__all__ = ["StatisticsReplay"]

KEPT = ("summed", "held", "variance")


class StatisticsReplay(Replay):
    """Has every institution send sums of features, and sends all what these are drawn from."""

    def __init__(self, exchanger: Exchanger, plan: ReplayPlan) -> None:
        super().__init__(exchanger, plan.replay)
        self.stages, self.classes, self.run = plan.stages, plan.classes, exchanger.settings.run
        self.summed: list[str] = []  # names of those whose sums are there
        self.held: dict[str, list[int]] = {}  # by institution: of how many sums its Gaussians are, how many it draws
        self.variance = 0.0  # of the noise in all sums together, in units of the clip
        self.current = [0, 0]  # as in `held`, of the newest

    @property
    def features(self) -> int:
        """F, of the frozen encoder."""
        assert self.exchanger.settings.model is not None
        return frozen_features(self.exchanger.settings.model(0))

    @property
    def begun(self) -> bool:
        """Whether anybody's sums are there."""
        return bool(self.summed)

    def complete(self, arrays: StateDict) -> None:
        """Ask who has not sent sums; send Gaussians to all that lack the newest."""
        members = self.exchanger.members
        if lacking := [member for member in members if member.name not in self.summed]:
            messages = [self.exchanger.message(member, self.request, self.extra) for member in lacking]
            replies = self.exchanger(self.grid, self.exchange, messages, needed=False)
            self.add({m: ClassSums.decode(reply.content) for m, reply in self.exchanger.answers(replies)})
        if self.summed and (lacking := [member for member in members if self.lacks(member.name)]):
            keep = self.keep(self.gaussians())
            messages = [self.exchanger.message(member, keep, self.extra) for member in lacking]
            replies = self.exchanger(self.grid, self.exchange, messages, needed=False)
            self.held |= {member.name: self.current for member, _ in self.exchanger.answers(replies)}

    def add(self, answers: dict[Member, ClassSums]) -> None:
        """Add sums to those before, in a new file: the last checkpoint still refers to the old one."""
        plan = self.exchanger.settings.privacy
        total = self.sums
        for member, answer in answers.items():
            for name, array in opened(answer.arrays).items():
                total[name] = total.get(name, 0.0) + member.num_examples * array.astype(np.float64)
            if plan and plan.covers(STATISTICS):
                self.variance += plan.share(STATISTICS, member.num_examples) ** 2
            self.summed.append(member.name)
        if answers:
            write_tensors(self.path, total, {OF_RUN: self.run})

    @property
    def path(self) -> Any:
        """Where the sums of these institutions lie."""
        return self.exchanger.recorder.folder("replay") / f"sums-{len(self.summed):05d}.safetensors"

    @property
    def sums(self) -> StateDict:
        """Σ_k n_k times what institution k has sent."""
        return dict(read_own(self.path, self.run)) if self.summed else {}

    def gaussians(self) -> StateDict:
        """Return what all institutions' sums say."""
        sums, clip = self.sums, self.options.clip
        by = Moments.of(sums[SUMS].reshape(self.classes, -1), sums[PRODUCTS], clip, self.variance**0.5)
        return by.gaussians(clip)

    def keep(self, gaussians: StateDict) -> KeepDraws:
        """Send Gaussians, and note how many features are drawn from them."""
        self.current = [len(self.summed), int(gaussians["counts"].sum())]
        return KeepDraws(run=self.run, exchange=self.exchange, arrays=gaussians)

    @property
    def request(self) -> Summarise:
        """Ask for sums; nothing but its digest names the encoder."""
        sums, products = self.classes * (1 + self.features), pairs_of(self.features)
        clip = self.options.clip
        return Summarise(run=self.run, exchange=self.exchange, arrays={}, clip=clip, products=products, sums=sums)

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
        return {name: getattr(self, name) for name in KEPT}

    def restore(self, values: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        vars(self).update({name: values[name] for name in KEPT})

    def forecast(self, members: Sequence[Member]) -> list[Exchange]:
        """Every institution sends sums once, and receives Gaussians once."""
        self.exchange, F, C = 0, self.features, self.classes
        form = Summarise.added({"sums": C * (1 + F), "products": pairs_of(F)})
        blank: StateDict = {"means": np.zeros((C, F), np.float32), "factor": np.zeros((F, F), np.float32)}
        blank["counts"] = np.zeros(C, np.int64)
        keep, kept = self.keep(blank), Kept.blank()
        self.held = {member.name: [1, sum(m.num_examples for m in members)] for member in members}
        sums = [(member, self.request, ClassSums.blank(form), 1) for member in members]
        return [*sums, *((member, keep, kept, 1) for member in members)]
