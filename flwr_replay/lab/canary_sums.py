"""Canaries in sums: what an institution's gradients or statistics add up to, and what the server reads of them.

A canary that is in adds a vector of norm 1, in units of the sensitivity, to the sums of one institution, as a patient
more would; numbers of examples stay. The auditor is the server with t institutions that help it. It knows all sums
without noise, and its helpers' shares, which it takes off: what is left has the noise that the account charges for.
With noise of each institution's own it reads the audited one's messages.

Tested are whole numbers, steps, noise, shares, masks and charges, of all that leaves, by `flwr_replay.lab.seen_steps`
and by guesses. Not tested: clipping, which comes before, and whether an example's features depend on others.

`m` canaries, `d` numbers of an answer, `D` examples of the institution.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor

from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.lab.canaries import Canaries, GradientCanaries, flat
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.privacy.secret import Stream
from flwr_replay.wire.masked import add, is_masked, sums_of
from flwr_replay.wire.records import StateDict, opened

__all__ = ["SumCanaries"]


class SumCanaries(GradientCanaries):
    """Canaries in the sums of one institution, `name` of `names`, and a record of every sum that is read."""

    def __init__(self, canaries: Canaries, seed: int, plan: PrivacyPlan, name: str, names: Sequence[str]) -> None:
        super().__init__(canaries, seed)
        self.plan, self.name = plan, name
        self.summed = names if plan.institutions else [name]
        self.helpers = [other for other in self.summed if other != name][: plan.colluders]
        self.made: dict[str, tuple[Mapping[str, Tensor], Tensor, float, StateDict]] = {}  # by name, in this exchange
        self.total: StateDict = {}
        self.heard: set[str] = set()

    def join(self, name: str, budget: PrivacyBudget) -> None:
        """Note an institution's sums before they get noise; in the audited one's are canaries."""
        noisy = budget.noisy

        def noted(mechanism: str, sums: Mapping[str, Tensor], step: float, stream: Stream) -> StateDict:
            added_d, tensors = torch.zeros(0), list(sums.values())
            if name == self.name:
                directions = self.directions(tensors)
                in_d = torch.tensor([*self.canaries.was_in_m, False])[directions.owner_d]
                added_d = directions.values_d.double() * in_d
                pieces = torch.split(added_d, [tensor.numel() for tensor in tensors])
                sums = {key: of + new.view(of.shape) for (key, of), new in zip(sums.items(), pieces, strict=True)}
            noise = noisy(mechanism, sums, step, stream)
            if name in self.summed:
                self.made[name] = sums, added_d, step, noise
            return noise

        budget.noisy = noted  # type: ignore[method-assign]

    def saw_answer(self, name: str, answer: RecordDict) -> None:
        """Add what an institution has sent to the sum; read it when all have answered."""
        record: Any = answer.get("arrays", {})
        if name not in self.made or not (is_masked(record) if self.plan.institutions else record):
            return
        add(opened(record), to=self.total)
        self.heard.add(name)
        if len(self.heard) == len(self.summed):
            self.read()
            self.made, self.total, self.heard = {}, {}, set()

    def read(self) -> None:
        """Compare the sum that was read with what was added up."""
        [mechanism], examples = self.plan.mechanisms, len(self.canaries.number_D)
        own, added_d, step, _ = self.made[self.name]
        trusted = [name for name in self.summed if name not in self.helpers]
        sums_d = torch.stack([flat(list(self.made[name][0].values())) for name in trusted]).sum(0)
        if step:
            whole = sums_of(self.total, own)
            for name in self.helpers:
                whole = {key: of - self.made[name][3][key] for key, of in whole.items()}
            read, worth = whole, step
        else:
            read, worth = {key: self.total[key] for key in own}, examples / self.plan.config.sensitivity(mechanism)
        moved_d = flat([torch.from_numpy(of.astype(np.float64)) for of in read.values()]) * worth
        cost, tensors = self.plan.cost(mechanism, examples, 1), list(own.values())
        self.seen_steps(cost, tensors).saw(torch.arange(examples), examples, moved_d, sums_d, most=1.0)
        self.saw(self.directions(tensors).products(moved_d - sums_d + added_d), cost)
