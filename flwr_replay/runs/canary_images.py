"""Canaries that are images with a wrong label, scored on the classifiers and proxies that an institution releases.

The score of an image is by how much its loss falls from the weights before a training to those released after it, added
up over all releases. Under DP an image that is out is taken out of every batch for which its row is drawn, so that it
adds nothing. Without DP another example's copy stands in its row.

`m` canaries, `B` batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from flwr.app import Message
from numpy.typing import NDArray
from torch import Tensor

from flwr_replay.config.run import RunConfig
from flwr_replay.data import Dataset, Examples
from flwr_replay.institution.budget import DPTraining
from flwr_replay.learning.tasks import make_task
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
    """Canaries that are mislabelled images of one institution.

    Parameters
    ----------
    canaries : Canaries
        Their rows and coins.
    data : Dataset
        The institution's.
    config : RunConfig
        Of the run; a classification.

    Attributes
    ----------
    scores_m : NDArray
        Larger means in, (m,).
    releases : int
        How many models were scored.
    """

    def __init__(self, canaries: Canaries, data: Dataset, config: RunConfig) -> None:
        self.canaries, self.config, self.task = canaries, config, make_task(config.task)
        self.scores_m, self.releases = np.zeros(len(canaries.rows_m)), 0
        self.model = backbone(config.model, config.task)(0)
        self._last: StateDict = {}
        rng, train = derived_rng(config.seed, "canary-labels"), data.train
        labels = train.y.copy()
        shift_m = rng.integers(1, config.task.classes, len(canaries.rows_m))
        labels[canaries.rows_m] = (labels[canaries.rows_m] + shift_m) % config.task.classes
        images_m = torch.from_numpy(np.ascontiguousarray(train.x[canaries.rows_m]))
        self.examples = images_m, torch.from_numpy(labels[canaries.rows_m])
        self.data = replace(data, train=Examples(train.x, labels))
        if config.privacy.dp == "none":
            out = canaries.rows_m[~canaries.was_in_m]
            rows = np.arange(len(labels))
            rows[out] = rng.choice(np.delete(rows, canaries.rows_m), len(out))
            self.data = replace(data, train=Examples(train.x[rows], labels[rows]))

    def training(self, clip: float, epoch_cost: SampledGaussian, stream: Stream, epochs: int = 1) -> DPTraining:
        """Return the DP-SGD of a charged training, without the canaries that are out."""
        return _WithoutThoseOut(self.canaries, clip, epoch_cost, stream, epochs)

    def saw(self, request: Message, answer: Message) -> None:
        """Score the model in an answer, if there is one, against the request's, or else the one released before."""
        names = to_arrays(self.model)
        received, released = (arrays_in(message.content).state_dict() for message in (request, answer))
        if not names.keys() <= released.keys():
            return
        after = {name: released[name] for name in names}
        before = received if names.keys() <= received.keys() else self._last
        if not before:  # an institution of a gossip begins with fresh weights
            seed = int(config_in(request.content)["init-seed"])
            before = to_arrays(backbone(self.config.model, self.config.task)(seed))
        self.scores_m += self._losses({name: before[name] for name in names}) - self._losses(after)
        self._last, self.releases = after, self.releases + 1

    def _losses(self, weights: StateDict) -> NDArray[np.float64]:
        """Return every canary's loss, nats, (m,)."""
        load_arrays(self.model, weights)
        self.model.eval()
        with torch.inference_mode():
            parts = [
                self.task.losses(self.model(as_input(x_B)), y_B)
                for x_B, y_B in zip(*(torch.split(part, AT_ONCE) for part in self.examples), strict=True)
            ]
        found: NDArray[np.float64] = torch.cat(parts).double().numpy()
        return found


class _WithoutThoseOut(DPTraining):
    """A training in which the canaries that are out are in no batch."""

    def __init__(self, canaries: Canaries, *charged: object) -> None:
        super().__init__(*charged)  # type: ignore[arg-type]
        self.out_D = torch.zeros(len(canaries.number_D), dtype=torch.bool)
        self.out_D[torch.from_numpy(canaries.rows_m[~canaries.was_in_m])] = True

    def rows(self, examples: int) -> Iterator[Tensor]:
        return (rows[~self.out_D[rows]] for rows in super().rows(examples))
