"""Canaries that are images, scored on the models that an institution releases.

They are images with a wrong label, scored on classifiers, proxies and encoders, or images of noise, unlike all others,
scored on generators, priors and drawn images. Scores are added up over all releases.

Models are scored by how much an image's loss falls from the weights before a training to those released after it. A
part of a network is put into the network that the request brought. Drawn images have no weights before them: the score
is how near the nearest of them is. A larger score means "in".

Under DP an image that is out is taken out of every batch for which its row is drawn, so that it adds nothing. Without
DP another example's copy stands in its row.

`m` canaries.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_replay.attacks.distances import distances
from flwr_replay.attacks.membership import likelihood_scores, loss_scores, task_scores
from flwr_replay.config.run import RunConfig
from flwr_replay.data import Dataset, Examples
from flwr_replay.files.tensors import unnested
from flwr_replay.generators.autoencoder import VQVAE2
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.institution.budget import DPTraining
from flwr_replay.lab.canaries import Canaries
from flwr_replay.learning.training import torch_rng
from flwr_replay.models.layers import as_input
from flwr_replay.models.zoo import backbone
from flwr_replay.privacy.accounting import SampledGaussian
from flwr_replay.privacy.secret import Stream
from flwr_replay.rng import derived_rng
from flwr_replay.wire.records import StateDict, arrays_in, config_in
from flwr_replay.wire.weights import load_arrays, to_arrays

__all__ = ["ImageCanaries"]

Scorer = Callable[[RecordDict, RecordDict], NDArray[np.float64] | None]  # of a request and its answer


class ImageCanaries:
    """Canaries that are images of one institution's, of a classification: of noise, or else with a wrong label.

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


def scorers(config: RunConfig, images_m: Tensor, labels_m: Tensor, noise: bool) -> list[Scorer]:
    """Return what scores the releases of a run: of classifiers, proxies and encoders, or with `noise` of generators."""
    canaries = as_input(images_m), labels_m
    if not noise:
        return [OfModel(backbone(config.model, config.task), lambda model: task_scores(model, config.task, *canaries))]
    if config.draws_images:
        return [partial(_of_drawn, canaries[0])]
    plan = ReplayPlan.of(config)
    assert plan is not None
    scorers: list[Scorer] = [OfModel(lambda _: plan.fresh_generator(), partial(_by_generator, config, canaries))]
    return [*scorers, partial(_of_prior, plan, canaries)] if config.replay.name == "pixelcnn" else scorers


class OfModel:
    """Scores a model, or a part of one, against the request's, or else the one released before.

    `fresh` is from a seed to a model with fresh weights, `scores` from a model in evaluation mode to every canary's
    score by loss, (m,).
    """

    def __init__(self, fresh: Callable[[int], nn.Module], scores: Callable[[Any], Tensor]) -> None:
        self.fresh, self.scores = fresh, scores
        self.model = fresh(0)
        self.names = to_arrays(self.model).keys()
        self._last: StateDict = {}

    def __call__(self, request: RecordDict, answer: RecordDict) -> NDArray[np.float64] | None:
        received, released = (arrays_in(content) for content in (request, answer))
        whole = self.names <= released.keys()
        if not whole and not (released and released.keys() <= self.names <= received.keys()):
            return None
        before = received if self.names <= received.keys() else self._last
        if not before:  # an institution of a gossip begins with fresh weights
            before = to_arrays(self.fresh(int(config_in(request)["init-seed"])))
        after = {name: released.get(name, before[name]) for name in self.names}
        self._last = after
        return self._scores(after) - self._scores({name: before[name] for name in self.names})

    def _scores(self, weights: StateDict) -> NDArray[np.float64]:
        load_arrays(self.model, weights)
        return self.scores(self.model.eval()).double().numpy()


def _by_generator(config: RunConfig, canaries: tuple[Tensor, Tensor], model: VQVAE2) -> Tensor:
    rng = torch_rng(config.seed, "canary-losses")
    return loss_scores(lambda x, _: model.loss(x, rng)[0].view(1), *canaries, at_once=1)


def _of_prior(
    plan: ReplayPlan, canaries: tuple[Tensor, Tensor], request: RecordDict, answer: RecordDict
) -> NDArray[np.float64] | None:
    """Score a prior by how much likelier a canary's codes have become, nats."""
    sent, released = (unnested(arrays_in(content)) for content in (request, answer))
    if config_in(request).get("stage") != "train-prior" or not released:
        return None
    generator = plan.fresh_generator().eval()
    load_arrays(generator, sent["generator"])
    prior = plan.fresh_prior(generator).eval()

    def scores(weights: StateDict) -> Tensor:
        load_arrays(prior, weights)
        return likelihood_scores(prior, generator, plan, *canaries, at_once=1)

    return (scores(released["prior"]) - scores(sent["prior"])).double().numpy()


def _of_drawn(images_m: Tensor, request: RecordDict, answer: RecordDict) -> NDArray[np.float64] | None:
    """Score drawn images by the distance to the nearest one."""
    drawn = arrays_in(answer)
    if config_in(request).get("stage") != "draw-buffer" or not drawn:
        return None
    return -distances(images_m, as_input(torch.tensor(drawn["images"]))).amin(1).numpy()
