"""Canaries that are images, scored on the models that an institution releases.

They are images with a wrong label, scored on classifiers, proxies and encoders, or images of noise, unlike all others,
scored on generators, priors and drawn images (`canary_scores`). Scores are added up over all releases.

Under DP an image that is out is taken out of every batch for which its row is drawn, so that it adds nothing. Without
DP another example's copy stands in its row.

`m` canaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor

from flwr_replay.config.run import RunConfig
from flwr_replay.data import Dataset, Examples
from flwr_replay.institution.budget import DPTraining
from flwr_replay.lab.canaries import Canaries
from flwr_replay.lab.canary_scores import scorers
from flwr_replay.privacy.accounting import SampledGaussian
from flwr_replay.privacy.secret import Stream
from flwr_replay.rng import derived_rng
from flwr_replay.wire.records import config_in

__all__ = ["ImageCanaries"]


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
        Whether they are images of noise; otherwise they have a wrong label.

    Attributes
    ----------
    data : Dataset
        The institution's, with the canaries.
    scores_m : NDArray
        Larger means in, (m,).
    releases : int
        How many releases were scored.
    """

    def __init__(self, canaries: Canaries, data: Dataset, config: RunConfig, noise: bool) -> None:
        self.canaries = canaries
        self.scores_m, self.releases = np.zeros(len(canaries.rows_m)), 0
        self.begun: dict[str, RecordDict] = {}  # by stage: the last request with weights
        rng, rows_m, train = derived_rng(config.seed, "canary-images"), canaries.rows_m, data.train
        x, y, rows = train.x.copy(), train.y.copy(), np.arange(len(train.y))
        if noise:
            bits = rng.random((len(rows_m), *x.shape[1:])) < 0.5
            x[rows_m] = bits * (255 if x.dtype == np.uint8 else 1)
        else:
            y[rows_m] = (y[rows_m] + rng.integers(1, config.task.classes, len(rows_m))) % config.task.classes
        self.scorers = scorers(config, torch.from_numpy(x[rows_m]), torch.from_numpy(y[rows_m]), noise)
        if config.privacy.dp == "none":
            out = rows_m[~canaries.was_in_m]
            rows[out] = rng.choice(np.delete(rows, rows_m), len(out))
        self.data = replace(data, train=Examples(x[rows], y[rows]))

    def training(self, clip: float, epoch_cost: SampledGaussian, stream: Stream, epochs: int = 1) -> DPTraining:
        """Return the DP-SGD of a charged training, without the canaries that are out."""
        return _WithoutThoseOut(self.canaries, clip, epoch_cost, stream, epochs)

    def saw(self, request: RecordDict, answer: RecordDict) -> None:
        """Score what an answer releases."""
        stage = str(config_in(request).get("stage", ""))
        request = self.begun[stage] if stage in self.begun and "arrays" not in request else request
        self.begun[stage] = request  # a training may take several messages, of which the first brings the weights
        for score in self.scorers:
            found_m = score(request, answer)
            if found_m is not None:
                self.scores_m += found_m
                self.releases += 1


class _WithoutThoseOut(DPTraining):
    """A training in which the canaries that are out are in no batch."""

    def __init__(self, canaries: Canaries, *charged: object) -> None:
        super().__init__(*charged)  # type: ignore[arg-type]
        self.out_D = torch.zeros(len(canaries.number_D), dtype=torch.bool)
        self.out_D[torch.from_numpy(canaries.rows_m[~canaries.was_in_m])] = True

    def rows(self, examples: int) -> Iterator[Tensor]:
        return (rows[~self.out_D[rows]] for rows in super().rows(examples))
