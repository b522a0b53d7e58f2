"""How much a release says about canaries that are images: a number for each, of which a larger one means "in".

Models are scored by how much an image's loss falls from the weights before a training to those released after it. A
part of a network is put into the network that the request brought. Drawn images have no weights before them: the score
is how near the nearest of them is.

`m` canaries.
"""

from __future__ import annotations

from collections.abc import Callable
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
from flwr_replay.files.tensors import unnested
from flwr_replay.generators.base import ReplayGenerator
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.learning.training import torch_rng
from flwr_replay.models.layers import as_input
from flwr_replay.models.zoo import backbone
from flwr_replay.wire.records import StateDict, arrays_in, config_in
from flwr_replay.wire.weights import load_arrays, to_arrays

__all__ = ["Scorer", "scorers"]

Scorer = Callable[[RecordDict, RecordDict], NDArray[np.float64] | None]  # of a request and its answer


def scorers(config: RunConfig, images_m: Tensor, labels_m: Tensor, noise: bool) -> list[Scorer]:
    """Return what scores the releases of a run: of classifiers, proxies and encoders, or with `noise` of generators."""
    canaries = as_input(images_m), labels_m
    if not noise:
        return [
            OfModel(
                lambda seed: backbone(config.model, config.task)(seed),
                lambda model: task_scores(model, config.task, *canaries),
            )
        ]
    if config.draws_images:
        return [partial(_of_drawn, canaries[0])]
    plan = ReplayPlan.of(config)
    assert plan is not None
    found: list[Scorer] = [OfModel(lambda _: plan.fresh_generator(), partial(_by_generator, config, canaries))]
    return [*found, partial(_of_prior, plan, canaries)] if config.replay.name == "pixelcnn" else found


class OfModel:
    """Scores a model, or a part of one, against the request's, or else the one released before.

    Parameters
    ----------
    fresh : callable
        From a seed to a model with fresh weights.
    scores : callable
        From a model in evaluation mode to every canary's score by loss, (m,).
    """

    def __init__(self, fresh: Callable[[int], nn.Module], scores: Callable[[Any], Tensor]) -> None:
        self.fresh, self.scores = fresh, scores
        self.model = fresh(0)
        self.names = to_arrays(self.model).keys()
        self._last: StateDict = {}

    def __call__(self, request: RecordDict, answer: RecordDict) -> NDArray[np.float64] | None:
        received, released = (arrays_in(content).state_dict() for content in (request, answer))
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


def _by_generator(config: RunConfig, canaries: tuple[Tensor, Tensor], model: ReplayGenerator) -> Tensor:
    rng = torch_rng(config.seed, "canary-losses")
    return loss_scores(lambda x, _: model.loss(x, rng)[0].view(1), *canaries, at_once=1)


def _of_prior(
    plan: ReplayPlan, canaries: tuple[Tensor, Tensor], request: RecordDict, answer: RecordDict
) -> NDArray[np.float64] | None:
    """Score a prior by how much likelier a canary's codes have become, nats."""
    sent, released = (unnested(arrays_in(content).state_dict()) for content in (request, answer))
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
    drawn = arrays_in(answer).state_dict()
    if config_in(request).get("stage") != "draw-buffer" or not drawn:
        return None
    return -distances(images_m, as_input(torch.tensor(drawn["images"]))).amin(1).numpy()
