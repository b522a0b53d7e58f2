"""FedStats: the institution's half; the server's half is `strategies/fedstats.py`.

Under DP the sums are made once in a run: who asks again gets the same bytes, since fresh noise would average out. They
are on the disk before they are charged, and charged before they leave.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from flwr_replay.config.sections import ReplayConfig
from flwr_replay.errors import PrivacyError, TrainingError, WireError
from flwr_replay.files.atomic import alone
from flwr_replay.files.tensors import digest
from flwr_replay.generators.sampler import ReplaySampler
from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.institution.client import InstitutionClient
from flwr_replay.learning.draws import Draws, frozen_features
from flwr_replay.learning.heads import features_of, linear_head
from flwr_replay.learning.tasks import Regression
from flwr_replay.learning.training import at_once
from flwr_replay.models.layers import as_input
from flwr_replay.payloads.common import ExpectsReplay, RunRequest
from flwr_replay.payloads.fedstats import (
    DRAWS,
    MOST_FEATURES,
    PRODUCTS,
    SUMS,
    ClassSums,
    KeepDraws,
    Summarise,
    pairs_of,
)
from flwr_replay.payloads.replay import Kept
from flwr_replay.privacy.places import at_places, drawn_places, places_for
from flwr_replay.privacy.plan import STATISTICS
from flwr_replay.privacy.shares import beside
from flwr_replay.privacy.sums import WITH_LABEL, class_sums, labelled, packed
from flwr_replay.wire.records import StateDict, opened

__all__ = ["DrawsClient", "FedStatsClient"]

ROWS_AT_ONCE = 256  # examples whose features are clipped at once
KEPT, MADE_BY, ONCE = "class-sums", "made-by", 1  # key of the state, of the encoder in it, and its only number


class FedStatsClient(InstitutionClient):
    """Sums the features of the institution's training examples, class by class, and their products."""

    def summarise(self, request: Summarise) -> ClassSums:
        """Return sums of features and numbers of examples, in the place of the head's weights."""
        if not request.clip > 0:
            raise WireError(f"features are clipped to a norm above 0; the server asks for {request.clip}: refused")
        covered = self.budget if self.budget and self.budget.plan.covers(STATISTICS) else None
        made = self.once(request, covered) if covered else self.summed(request, None)
        n = len(self.institution.train)
        return ClassSums(
            arrays=beside(opened(request.arrays), made),
            num_examples=n,
            examples_seen=n,
            num_steps=0,
            **self.spent(request.run),
        )

    def brought(self, stage: str, arrays: StateDict) -> StateDict:
        """Return the weights in a request that a policy pins; of a sum all but the head, which it does not need."""
        if stage != Summarise.stage_name:
            return super().brought(stage, arrays)
        head, _ = linear_head(self.scratch_model())
        return {name: array for name, array in arrays.items() if not name.startswith(f"{head}.")}

    def once(self, request: Summarise, budget: PrivacyBudget) -> StateDict:
        """Return the run's noisy sums, which are made and charged at the first request.

        Raises
        ------
        PrivacyError
            If the run's sums were made by another encoder or for another cohort, or are lost, or the budget does not
            allow them.
        """
        with alone(self.state.of_run(request.run).parent, wait=True):
            encoder = self.brought(request.stage_name, opened(request.arrays))
            added_to = np.frombuffer(repr(list(request.cohort)).encode(), np.uint8)  # names have spaces
            asked = {"clip": np.array(request.clip), "products": np.array(request.products), "cohort": added_to}
            asked["sums"] = np.array(request.sums)
            about = digest({**encoder, **asked})
            made_by = np.frombuffer(about.encode(), np.uint8)
            kept, charged = self.state.at(KEPT, request.run, ONCE), STATISTICS in budget.charged(request.run)
            if not np.array_equal(kept[MADE_BY], made_by) if kept else charged:
                raise PrivacyError(
                    "under dp=statistics an institution makes its sums once in a run, by one encoder, to be added to "
                    "those of the same institutions; in this run it made others, or they are gone; fresh noise would "
                    "cost as much again: begin a new run"
                )
            if not kept:
                kept = {**self.summed(request, budget), MADE_BY: made_by}
                self.state.save(KEPT, request.run, ONCE, kept, self.institution.durable)
            if charged:
                budget.rest(STATISTICS, request)
            else:
                budget.charge(STATISTICS, budget.plan.cost(STATISTICS, budget.examples, 1), request)
        return {name: array for name, array in kept.items() if name != MADE_BY}

    def summed(self, request: Summarise, budget: PrivacyBudget | None) -> StateDict:
        """Sum the features of all training examples, and their products if asked for; with a budget, add noise."""
        train, model = self.institution.train, self.scratch_model(None if request.sums else request.arrays)
        name, head = linear_head(model)
        width = frozen_features(model) if request.sums else head.in_features
        if request.sums not in (0, head.out_features * (1 + width)):
            raise WireError(
                f"sums of {head.out_features} classes of {width:,} features are other than {request.sums:,}"
            )
        task = self.task if isinstance(self.task, Regression) else None
        if task and (not task.bounded or not request.products or request.sums):
            raise WireError(
                "labels of a regression are clipped to task.label-range, and products are asked for: refused"
            )
        features = width + bool(task)  # the label is one more
        if request.products and (request.products != pairs_of(features) or features > MOST_FEATURES):
            raise WireError(
                f"{features:,} features have {pairs_of(features):,} products, and of at most {MOST_FEATURES:,} these "
                f"leave; the server asks for {request.products:,}: refused"
            )
        form = {**opened(request.arrays), **request.added({"products": request.products, "sums": request.sums})}
        step = budget.step(STATISTICS, form) if budget else 0.0
        stream, size = budget and budget.stream(STATISTICS, request), at_once(train.x, places_for(train.x), model)
        in_order = torch.split(torch.arange(len(train)), size)
        features_NF = torch.zeros(len(train), width)
        for place_B in drawn_places(len(train), size, stream) if stream else in_order:
            taken_BF = features_of(model, as_input(at_places(train.x, place_B)), first=bool(request.sums))
            features_NF[place_B[place_B >= 0]] = taken_BF.cpu().float()[place_B >= 0]
        patients = budget and self.institution.data.train.patients
        of_N = np.arange(len(train)) if patients is None else np.unique(patients, return_inverse=True)[1]
        clip = request.clip * (WITH_LABEL if task else 1)
        sums = torch.zeros(head.out_features, 1 + features, dtype=torch.float64)
        products_FF = sums.new_zeros(*(features,) * 2 if request.products else (0, 0))
        for rows_B in map(torch.from_numpy, groups(of_N, ROWS_AT_ONCE)):
            labels_B, of_B = train.y[rows_B].cpu(), torch.from_numpy(of_N)[rows_B]
            features_BF = features_NF[rows_B]
            if task:
                features_BF, labels_B = labelled(features_BF, task.learned(labels_B), request.clip), labels_B.long() * 0
            about_B = features_BF, labels_B, of_B, head.out_features, clip, bool(request.products)
            for total, of_group in zip((sums, products_FF), class_sums(*about_B), strict=True):
                total += of_group
        arrays = {f"{name}.weight": sums[:, 1 : 1 + width], f"{name}.bias": sums[:, 0]}
        if request.sums:
            arrays = {SUMS: sums.flatten()}
        if request.products:
            arrays[PRODUCTS] = packed(products_FF)
        if task:
            arrays[PRODUCTS][-1] = sums[0, -1]
        if budget and stream:
            return budget.noisy(STATISTICS, arrays, step, stream)
        return {name: (array / len(train)).float().numpy() for name, array in arrays.items()}


class DrawsClient(FedStatsClient):
    """Has a method's client train on its own features and on drawn ones, replay=statistics.

    Its server's half is `flwr_replay.server.replay_sums`; `flwr_replay.config.halves.load_client` puts it before the
    method's own.
    """

    @property
    def options(self) -> ReplayConfig:
        """The run's options of the replay."""
        assert self.replay_options
        return self.replay_options

    def summarise(self, request: Summarise) -> ClassSums:
        """Return sums of a frozen encoder's features, and of nothing else."""
        if not request.sums or request.clip != self.options.clip:
            raise WireError(
                "with replay=statistics sums of a frozen encoder's features leave, clipped to replay.clip; the server "
                f"asks for {request.sums:,} numbers, clipped to {request.clip:g}: refused"
            )
        return super().summarise(request)

    def keep_draws(self, request: KeepDraws) -> Kept:
        """Keep what features are drawn from, if features of this model can be drawn from it."""
        arrays = opened(request.arrays)
        drawn = self.drawn(arrays, request)
        self.state.save(DRAWS, request.run, request.exchange, arrays)
        return Kept(num_examples=len(drawn))

    def drawn(self, arrays: StateDict, request: RunRequest) -> Draws:
        """Return what draws features for an exchange; a WireError if they are not of this model's form."""
        model, purpose = self.scratch_model(), (self.seed, self.institution.name, request.exchange)
        drawn = Draws.of(arrays, self.options.clip, self.options, *purpose)
        wanted, got = (linear_head(model)[1].out_features, frozen_features(model)), tuple(drawn.means_CF.shape)
        if got != wanted:
            raise WireError(f"draws are of {wanted} classes and features; the server sends {got}: refused")
        return drawn

    def replay_sampler(self, request: RunRequest) -> ReplaySampler | None:
        """Return what draws features beside the own ones."""
        if not isinstance(request, ExpectsReplay):
            return super().replay_sampler(request)
        kept = self.state.load(DRAWS, request.run, request.exchange + 1)
        drawn = self.drawn(kept, request) if kept else ()
        if len(drawn) != (request.replayed or 0):
            raise TrainingError(
                f"an institution draws as many features as it was told, {request.replayed}; what it keeps draws "
                f"{len(drawn)}: restore the state directory, or begin a new run"
            )
        return drawn or None


def groups(of_N: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """Return row numbers in groups of about this size, larger where the examples of one patient need it."""
    order_N = np.argsort(of_N, kind="stable")
    first_P = np.flatnonzero(np.diff(of_N[order_N], prepend=-1))
    return np.split(order_N, first_P[np.flatnonzero(np.diff(first_P // size)) + 1])
