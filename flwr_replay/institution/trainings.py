"""The trainings of generative replay, step by step: Qu et al. 2022, Algorithm 1, lines 9-18, and footnote 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from flwr_replay.files.tensors import unnested
from flwr_replay.generators.autoencoder import summed_loss
from flwr_replay.generators.base import ReplayGenerator
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.generators.priors import CodePrior, summed_nats
from flwr_replay.generators.sampler import ReplaySampler, Rows
from flwr_replay.institution.budget import DPTraining
from flwr_replay.institution.owner import Shard
from flwr_replay.institution.pieces import StepwiseTraining
from flwr_replay.learning.training import batches, iterations, step
from flwr_replay.privacy.plan import COUNTS
from flwr_replay.wire.records import StateDict
from flwr_replay.wire.weights import load_arrays

__all__ = ["GeneratorTraining", "PriorTraining"]

Rngs = Callable[..., torch.Generator]  # from a purpose to an rng


class GeneratorTraining(StepwiseTraining):
    """Trains a generator on real images and on replays.

    Parameters
    ----------
    replay_plan : ReplayPlan
        The options of replay.
    model : ReplayGenerator
        In training mode.
    data : Shard
        The institution's images.
    old : ReplaySampler | None
        Replays; None: there are none.
    rngs : callable
        Gives an rng of the institution's own for a purpose.
    """

    releases = ("generator",)
    model: ReplayGenerator

    def __init__(
        self, replay_plan: ReplayPlan, model: ReplayGenerator, data: Shard, old: ReplaySampler | None, rngs: Rngs
    ) -> None:
        config = replay_plan.generator
        super().__init__("generator", model, config.lr, config.epochs, iterations(len(data), config.batch_size))
        self.replay_plan, self.config, self.data, self.old, self.rngs = replay_plan, config, data, old, rngs
        self.num_replayed = old.beside(config.batch_size) if old else 0
        self.perplexity: list[Tensor] = []  # of the last batch, by level

    def begin(self, given: StateDict) -> None:
        """Load the weights."""
        load_arrays(self.model, given)

    def begin_epoch(self, epoch: int) -> None:
        """Halve the learning rate every `lr_halving` epochs."""
        halving = self.config.lr_halving
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * 0.5 ** (epoch // halving if halving else 0)
        self.rng = self.rngs("generator", epoch)
        self.replayed = Rows(len(self.old), self.rng) if self.old else None

    def kept(self) -> StateDict:
        """Return the state of the epoch's rng, and the order of the replays."""
        order = self.replayed.order.numpy() if self.replayed else np.zeros(0, np.int64)
        return {"rng": self.rng.get_state().numpy(), "replayed": order}

    def load_kept(self, kept: StateDict) -> None:
        """Restore both; the next epoch begins with others."""
        self.rng.set_state(torch.from_numpy(kept["rng"]))
        if self.replayed:
            self.replayed.order = torch.from_numpy(kept["replayed"])

    def steps(self, epoch: int, places: range, dp: DPTraining | None) -> Iterator[tuple[Tensor | None, int]]:
        """Train on batches of real images, each with replayed ones."""
        model, b = self.model, self.config.batch_size
        shuffle = self.rngs("generator", epoch) if places.start else self.rng  # later batches of the same order
        own = slice(places.start, places.stop)
        real = dp.batches(self.data) if dp else batches(self.data.x, self.data.y, b, shuffle, own)
        # under DP how often the model draws depends on secret batches, so replayed examples have another rng
        model_rng = self.rngs("generator", epoch, "private", places.start) if dp else self.rng
        for x_B, y_B in real:  # line 10
            x_k = self.replay_plan.generator_input(x_B, y_B)
            x_U = torch.cat([self.replays(), x_k]) if self.old else x_k  # lines 11-12
            if dp:  # Algorithm 3, noise once on the sum
                example_losses = partial(summed_loss, model, model_rng)
                dp.step(model, self.optimizer, example_losses, (x_U,), b, self.num_replayed)
                yield None, b + self.num_replayed
            else:
                loss, parts = model.loss(x_U, model_rng)  # lines 13-17
                loss = step(model, self.optimizer, loss)  # line 18
                self.perplexity = [parts[f"perplexity-{level}"] for level in ("top", "bottom")]
                yield loss, len(x_U)

    def replays(self) -> Tensor:
        """Draw a batch of replayed images, masks included."""
        assert self.old is not None
        assert self.replayed is not None
        return self.old.take(self.replayed.draw(self.num_replayed))[0]

    def result(self) -> StateDict:
        """Return the perplexity of the codes in the last batch, top and bottom; none under DP."""
        return {"perplexity": np.array([float(level) for level in self.perplexity])}


class PriorTraining(StepwiseTraining):
    """Trains a prior on the codes of an institution's images, which do not leave.

    Parameters
    ----------
    replay_plan : ReplayPlan
        The options of replay.
    generator : ReplayGenerator
        In evaluation mode; it gets the received weights.
    prior : CodePrior
        Over its codes, on the institution's device.
    codes_of : callable
        Encodes all images of the institution by this generator: (n, N), on the CPU.
    classes : Tensor
        Of the images' labels, (n,), int64, on the CPU.
    counts : callable
        From the number of images of each class to the numbers that leave.
    rngs : callable
        Gives an rng of the institution's own for a purpose.
    in_epoch : int
        Steps of an epoch.
    """

    releases = ("prior", COUNTS)
    model: CodePrior

    def __init__(
        self,
        replay_plan: ReplayPlan,
        generator: ReplayGenerator,
        prior: CodePrior,
        codes_of: Callable[[ReplayGenerator], Tensor],
        classes: Tensor,
        counts: Callable[[Tensor], Tensor],
        rngs: Rngs,
        in_epoch: int,
    ) -> None:
        config = replay_plan.prior
        super().__init__("prior", prior, config.lr, config.epochs, in_epoch)
        self.config, self.generator, self.codes_of = config, generator, codes_of
        self.y, self.counts, self.rngs = classes, counts, rngs
        self.device = next(prior.parameters()).device

    def begin(self, given: StateDict) -> None:
        """Load generator and prior, and encode the images."""
        parts = unnested(given, only=("generator", "prior"))
        load_arrays(self.generator, parts["generator"])
        load_arrays(self.model, parts["prior"])
        self.codes = self.codes_of(self.generator)

    def kept(self) -> StateDict:
        """Return the codes: encoding all images again would cost every piece time."""
        return {"codes": self.codes.to(torch.int32).numpy()}

    def load_kept(self, kept: StateDict) -> None:
        """Restore them."""
        self.codes = torch.from_numpy(kept["codes"]).long()

    def begin_epoch(self, epoch: int) -> None:
        """Nothing changes from epoch to epoch but the order, which `steps` draws."""

    def steps(self, epoch: int, places: range, dp: DPTraining | None) -> Iterator[tuple[Tensor | None, int]]:
        """Train on batches of codes."""
        b = self.config.batch_size
        order = torch.split(torch.randperm(len(self.y), generator=self.rngs("prior", epoch)), b)
        for place, rows in enumerate(dp.rows(len(self.y)) if dp else order[places.start : places.stop], places.start):
            rng = self.rngs("prior", epoch, "draws", place)
            draws = dp.uniform(len(rows), self.model.draws) if dp else self.model.uniform(len(rows), rng)
            batch = tuple(part.to(self.device) for part in (self.codes[rows], self.y[rows], draws))
            if dp:
                dp.step(self.model, self.optimizer, partial(summed_nats, self.model), batch, b)
                yield None, b
            else:
                yield step(self.model, self.optimizer, self.model.loss(*batch)), len(rows)

    def result(self) -> StateDict:
        """Return the number of examples of each class, under DP with noise."""
        return {"label_counts": self.counts(torch.bincount(self.y, minlength=self.model.classes)).numpy()}
