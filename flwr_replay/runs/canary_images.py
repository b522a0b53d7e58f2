"""Canaries that are images, scored on the models that an institution releases.

They are images with a wrong label, scored on classifiers and proxies, or images of noise, unlike all others, scored on
generators that leave as weights. The score is by how much an image's loss falls from the weights before a training to
those released after it, added up over all releases.

Under DP an image that is out is taken out of every batch for which its row is drawn, so that it adds nothing. Without
DP another example's copy stands in its row.

`m` canaries, `B` batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_replay.config.run import RunConfig
from flwr_replay.data import Dataset, Examples
from flwr_replay.generators.base import ReplayGenerator
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.institution.budget import DPTraining
from flwr_replay.learning.tasks import make_task
from flwr_replay.learning.training import torch_rng
from flwr_replay.models.layers import as_input
from flwr_replay.models.zoo import backbone
from flwr_replay.privacy.accounting import SampledGaussian
from flwr_replay.privacy.secret import Stream
from flwr_replay.rng import derived_rng
from flwr_replay.runs.canaries import Canaries
from flwr_replay.wire.records import StateDict, arrays_in, config_in
from flwr_replay.wire.weights import load_arrays, to_arrays

__all__ = ["ImageCanaries"]

AT_ONCE = 256  # images of a forward pass


class ImageCanaries:
    """Canaries that are images of one institution.

    Parameters
    ----------
    canaries : Canaries
        Their rows and coins.
    data : Dataset
        The institution's; a classification.
    config : RunConfig
        Of the run.
    noise : bool
        Whether they are images of noise, scored on generators; otherwise they have a wrong label.

    Attributes
    ----------
    data : Dataset
        The institution's, with the canaries.
    scores_m : NDArray
        Larger means in, (m,).
    releases : int
        How many models were scored.
    """

    def __init__(self, canaries: Canaries, data: Dataset, config: RunConfig, noise: bool) -> None:
        self.canaries, self.config, self.noise = canaries, config, noise
        self.scores_m, self.releases = np.zeros(len(canaries.rows_m)), 0
        self.model = self._fresh(0)
        self._last: StateDict = {}
        rng, rows_m, train = derived_rng(config.seed, "canary-images"), canaries.rows_m, data.train
        x, y, rows = train.x.copy(), train.y.copy(), np.arange(len(train.y))
        if noise:
            bits = rng.random((len(rows_m), *x.shape[1:])) < 0.5
            x[rows_m] = bits * (255 if x.dtype == np.uint8 else 1)
        else:
            y[rows_m] = (y[rows_m] + rng.integers(1, config.task.classes, len(rows_m))) % config.task.classes
        self.examples = torch.from_numpy(x[rows_m]), torch.from_numpy(y[rows_m])
        if config.privacy.dp == "none":
            out = rows_m[~canaries.was_in_m]
            rows[out] = rng.choice(np.delete(rows, rows_m), len(out))
        self.data = replace(data, train=Examples(x[rows], y[rows]))

    def _fresh(self, seed: int) -> nn.Module:
        """Build the model that is scored, with fresh weights."""
        if not self.noise:
            return backbone(self.config.model, self.config.task)(seed)
        plan = ReplayPlan.of(self.config)
        assert plan is not None
        return plan.fresh_generator()

    def training(self, clip: float, epoch_cost: SampledGaussian, stream: Stream, epochs: int = 1) -> DPTraining:
        """Return the DP-SGD of a charged training, without the canaries that are out."""
        return _WithoutThoseOut(self.canaries, clip, epoch_cost, stream, epochs)

    def saw(self, request: RecordDict, answer: RecordDict) -> None:
        """Score the model in an answer, if there is one, against the request's, or else the one released before."""
        names = to_arrays(self.model)
        received, released = (arrays_in(content).state_dict() for content in (request, answer))
        if not names.keys() <= released.keys():
            return
        after = {name: released[name] for name in names}
        before = received if names.keys() <= received.keys() else self._last
        if not before:  # an institution of a gossip begins with fresh weights
            seed = int(config_in(request)["init-seed"])
            before = to_arrays(self._fresh(seed))
        self.scores_m += self._losses({name: before[name] for name in names}) - self._losses(after)
        self._last, self.releases = after, self.releases + 1

    def _losses(self, weights: StateDict) -> NDArray[np.float64]:
        """Return every canary's loss, nats, (m,)."""
        load_arrays(self.model, weights)
        self.model.eval()
        images, labels = self.examples
        with torch.inference_mode():
            if isinstance(self.model, ReplayGenerator):
                rng = torch_rng(self.config.seed, "canary-losses")
                found_m = torch.cat([self.model.loss(x, rng)[0].view(1) for x in torch.split(as_input(images), 1)])
            else:
                task, parts = make_task(self.config.task), (torch.split(part, AT_ONCE) for part in (images, labels))
                found_m = torch.cat([task.losses(self.model(as_input(x)), y) for x, y in zip(*parts, strict=True)])
        found: NDArray[np.float64] = found_m.double().numpy()
        return found


class _WithoutThoseOut(DPTraining):
    """A training in which the canaries that are out are in no batch."""

    def __init__(self, canaries: Canaries, *charged: object) -> None:
        super().__init__(*charged)  # type: ignore[arg-type]
        self.out_D = torch.zeros(len(canaries.number_D), dtype=torch.bool)
        self.out_D[torch.from_numpy(canaries.rows_m[~canaries.was_in_m])] = True

    def rows(self, examples: int) -> Iterator[Tensor]:
        return (rows[~self.out_D[rows]] for rows in super().rows(examples))
