"""The trainings of generative replay, step by step: Qu et al. 2022, Algorithm 1, lines 9-18, and footnote 1.

What a complete training has found is kept, too: a message that is sent once more is answered with it.

A training goes on only with what it began with: the run and its options, the weights, the examples, what is replayed.
Requests that bring weights begin it anew where anything differs. Requests without weights are refused then.

Under DP nothing that was trained leaves before the last message. Until then only numbers of steps do, which follow from
public numbers and the clock.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from flwr_replay.config.sections import PriorConfig
from flwr_replay.errors import TrainingError
from flwr_replay.files.tensors import digest, nested, unnested
from flwr_replay.generators.autoencoder import VQVAE2
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.generators.priors import CodePrior
from flwr_replay.generators.sampler import ReplaySampler, Rows
from flwr_replay.generators.synthesis import TrainingProgress
from flwr_replay.generators.vqvae2 import VQVAE2Config, generator_steps, prior_steps
from flwr_replay.institution.budget import DPTraining, PrivacyBudget
from flwr_replay.institution.owner import Shard
from flwr_replay.institution.pieces import Training
from flwr_replay.learning.training import batches, iterations, mean_loss
from flwr_replay.payloads.common import ChargedRequest
from flwr_replay.privacy.plan import COUNTS
from flwr_replay.state.store import StateStore
from flwr_replay.wire.records import StateDict
from flwr_replay.wire.weights import load_arrays, load_optimizer_arrays, optimizer_arrays, to_arrays

__all__ = ["GeneratorTraining", "PriorTraining", "Surroundings"]

CHARGED_AT_ONCE = 10  # steps of a block, which is charged as a whole; an image may take a second


@dataclass(frozen=True)
class Surroundings:
    """What a training of replay has around it at its institution."""

    weights: StateDict  # that the request has brought; none: it asks to go on
    depends_on: str  # a digest of all that the training depends on beside options and weights
    state: StateStore  # where it is kept
    rngs: Callable[..., torch.Generator]  # from a purpose to an rng of the institution's own
    budget: PrivacyBudget | None  # if it is under DP


class ReplayTraining(Training):
    """The training of one network by Adam, in epochs of `in_epoch` steps; `model` has fresh weights."""

    mechanism: ClassVar[str]

    def __init__(
        self, config: VQVAE2Config | PriorConfig, model: nn.Module, in_epoch: int, around: Surroundings
    ) -> None:
        self.model, self.batch_size, self.in_epoch, self.rngs = model, config.batch_size, in_epoch, around.rngs
        self.around, self.key = around, f"training-{self.mechanism}"
        self.given = digest(around.weights) if around.weights else ""  # of the weights with which it began
        self.optimizer = torch.optim.Adam(model.parameters(), lr=config.lr)
        self.mechanisms = {self.mechanism: config.epochs * in_epoch}
        self.done, self.losses = TrainingProgress(steps_left=self.mechanisms[self.mechanism]), np.zeros(0, np.float32)
        self.found: StateDict = {}  # of a complete training: what the last answer says beside weights and losses

    def block(self, step: int, charged: bool) -> int:
        """Take the rest of the epoch together."""
        return min(self.in_epoch - step % self.in_epoch, CHARGED_AT_ONCE if charged else self.in_epoch)

    @property
    def told(self) -> dict[str, Any]:
        """What an answer says of it beside weights; only the last one has losses, the mean of each epoch."""
        steps = {"steps": self.done.steps, "steps_left": self.done.steps_left, "examples_seen": self.seen}
        if self.done.steps_left:
            return steps
        epochs = torch.split(torch.from_numpy(self.losses), self.in_epoch)
        losses = [mean_loss([*epoch]) for epoch in epochs if len(epoch)]
        return {**steps, "losses": losses} | {name: array.tolist() for name, array in self.found.items()}

    @property
    @abstractmethod
    def seen(self) -> int:
        """The examples that were trained on, replayed ones included."""

    def resume(self, request: ChargedRequest) -> None:
        """Go on with what these weights began; without weights, with what this exchange began.

        Raises
        ------
        TrainingError
            If the request has brought no weights, and nothing that fits was begun in its exchange.
        PrivacyError
            If the budget does not allow the whole training, before anything is charged.
        """
        run, state, weights = request.run, self.around.state, self.around.weights
        # With weights, an earlier exchange may have begun it.
        load, exchange = (state.load, request.exchange + 1) if weights else (state.at, request.exchange)
        kept = unnested(load(self.key, run, exchange) or {})
        bound = {name: array.tobytes().decode() for name, array in kept.get("bound", {}).items()}
        if kept and bound["around"] == self.around.depends_on and self.given in ("", bound["given"]):
            self.given = bound["given"]
            self.load(kept)
        elif weights:
            self.begin(weights)
            if budget := self.around.budget:
                budget.check_room(self.mechanisms, run)
            state.forget(self.key, run)
        else:
            raise TrainingError(
                "a training goes on in the exchange in which it began, with the same examples and replays; this "
                f"institution has begun none such of a {self.mechanism} in exchange {request.exchange} of run {run!r}: "
                "send the weights"
            )

    def keep(self, request: ChargedRequest) -> None:
        """Keep it under the request's exchange."""
        bound, state = {"given": self.given, "around": self.around.depends_on}, self.around.state
        texts = {name: np.frombuffer(text.encode(), np.uint8) for name, text in bound.items()}
        arrays = nested({"bound": texts, **self.kept()})
        state.save(self.key, request.run, request.exchange, arrays, state.institution.durable)

    def begin(self, weights: StateDict) -> None:
        """Load the weights that a request has brought."""
        load_arrays(self.model, weights)

    def kept(self) -> dict[str, StateDict]:
        """Return all that was trained; once it is complete, without what only further steps need."""
        numbers = {"steps": np.array([self.done.steps, self.done.steps_left]), "losses": self.losses}
        arrays = {"model": to_arrays(self.model), "numbers": numbers, "found": self.found}
        return arrays | ({"optimizer": optimizer_arrays(self.optimizer)} if self.done.steps_left else {})

    def load(self, kept: dict[str, StateDict]) -> None:
        """Restore what `kept` returned."""
        self.done, self.losses = TrainingProgress(*map(int, kept["numbers"]["steps"])), kept["numbers"]["losses"]
        load_arrays(self.model, kept["model"])
        if self.done.steps_left:
            load_optimizer_arrays(self.optimizer, kept["optimizer"])
        else:
            self.found = kept["found"]


class GeneratorTraining(ReplayTraining):
    """Trains a generator, in training mode, on an institution's images, and on replays if there is a `sampler`."""

    mechanism, releases = "generator", ("generator",)
    model: VQVAE2

    def __init__(
        self, replay_plan: ReplayPlan, model: VQVAE2, data: Shard, sampler: ReplaySampler | None, around: Surroundings
    ) -> None:
        config = replay_plan.generator
        super().__init__(config, model, iterations(len(data), config.batch_size), around)
        self.replay_plan, self.data, self.sampler = replay_plan, data, sampler
        self.num_replayed = sampler.beside(self.batch_size) if sampler else 0
        self.terms: dict[str, Tensor] = {}  # of the last step's loss

    @property
    def seen(self) -> int:
        """Real images, and those replayed beside them."""
        return self.done.steps * (min(self.batch_size, len(self.data)) + self.num_replayed)

    def begin_epoch(self, epoch: int) -> None:
        """Set the epoch's random numbers."""
        self.rng = self.rngs("generator", epoch)
        self.replayed = Rows(len(self.sampler), self.rng) if self.sampler else None

    def kept(self) -> dict[str, StateDict]:
        """Add the state of the epoch's rng, and the order of the replays."""
        if not self.done.steps_left:
            return super().kept()
        order = self.replayed.order.numpy() if self.replayed else np.zeros(0, np.int64)
        return super().kept() | {"kept": {"rng": self.rng.get_state().numpy(), "replayed": order}}

    def load(self, kept: dict[str, StateDict]) -> None:
        """Restore them too; the next epoch begins with others."""
        super().load(kept)
        if self.done.steps_left:
            self.begin_epoch(self.done.steps // self.in_epoch)
            self.rng.set_state(torch.from_numpy(kept["kept"]["rng"]))
            if self.replayed:
                self.replayed.order = torch.from_numpy(kept["kept"]["replayed"])

    def take(self, steps: range, dp: DPTraining | None) -> Iterator[tuple[int, Tensor | None]]:
        """Train on batches of real images, each with replayed ones."""
        epoch, place = divmod(steps.start, self.in_epoch)
        if not place:
            self.begin_epoch(epoch)
        shuffle = self.rngs("generator", epoch) if place else self.rng  # later batches of the same order
        numbers = slice(place, place + len(steps))
        real = dp.batches(self.data) if dp else batches(self.data.x, self.data.y, self.batch_size, shuffle, numbers)
        # under DP how often the model draws depends on secret batches, so replayed examples have another rng
        model_rng = self.rngs("generator", epoch, "private", place) if dp else self.rng
        plan, sampler = self.replay_plan, self.sampler
        inputs = (plan.generator_input(*batch) for batch in real)  # line 10: x_k
        batches_U = ((torch.cat([self.replays(), x_k]) if sampler else x_k, model_rng) for x_k in inputs)  # lines 11-12
        trained = generator_steps(  # lines 13-18; Algorithm 3, noise once on the sum
            plan.generator, self.model, self.optimizer, batches_U, steps.start, self.in_epoch, dp, self.num_replayed
        )
        for loss, terms in trained:
            self.terms = terms
            yield 1, loss

    def replays(self) -> Tensor:
        """Draw a batch of replayed images, masks included."""
        assert self.sampler is not None
        assert self.replayed is not None
        return self.sampler.take(self.replayed.draw(self.num_replayed))[0]

    def end(self, request: ChargedRequest) -> None:
        """Find the perplexity of the codes in the last batch, top and bottom; none under DP."""
        levels = ("top", "bottom") if self.terms else ()
        self.found = {"perplexity": np.array([float(self.terms[f"perplexity-{level}"]) for level in levels])}


class PriorTraining(ReplayTraining):
    """Trains a prior on the codes of an institution's images, which do not leave.

    `encode` makes of a generator's weights its codes of all images: (n, N), on the CPU. `classes` are those of the
    images' labels: (n,), int64, on the CPU.
    """

    mechanism, releases = "prior", ("prior", COUNTS)
    model: CodePrior

    def __init__(
        self,
        config: PriorConfig,
        prior: CodePrior,
        encode: Callable[[StateDict], Tensor],
        classes: Tensor,
        in_epoch: int,
        around: Surroundings,
    ) -> None:
        super().__init__(config, prior, in_epoch, around)
        self.config, self.encode, self.y = config, encode, classes

    @property
    def seen(self) -> int:
        """All images in every epoch, under DP those of its full batches."""
        epochs, place = divmod(self.done.steps, self.in_epoch)
        return sum(min(len(self.y), steps * self.batch_size) for steps in [self.in_epoch] * epochs + [place])

    def begin(self, weights: StateDict) -> None:
        """Load the prior's, and encode the images by the generator's."""
        groups = unnested(weights, only=("generator", "prior"))
        super().begin(groups["prior"])
        self.codes = self.encode(groups["generator"])

    def kept(self) -> dict[str, StateDict]:
        """Add the codes: encoding all images again would cost every piece time."""
        codes = {"kept": {"codes": self.codes.to(torch.int32).numpy()}} if self.done.steps_left else {}
        return super().kept() | codes

    def load(self, kept: dict[str, StateDict]) -> None:
        """Restore them too."""
        super().load(kept)
        if self.done.steps_left:
            self.codes = torch.from_numpy(kept["kept"]["codes"]).long()

    def take(self, steps: range, dp: DPTraining | None) -> Iterator[tuple[int, Tensor | None]]:
        """Train on batches of codes."""
        epoch, place = divmod(steps.start, self.in_epoch)
        order = torch.split(torch.randperm(len(self.y), generator=self.rngs("prior", epoch)), self.batch_size)
        rows = enumerate(dp.rows(len(self.y)) if dp else order[place : place + len(steps)], place)
        batches_B = ((self.codes[of], self.y[of], self.rngs("prior", epoch, "draws", at)) for at, of in rows)
        for loss in prior_steps(self.config, self.model, self.optimizer, batches_B, dp):
            yield 1, loss

    def end(self, request: ChargedRequest) -> None:
        """Count the examples of each class, under DP with noise."""
        budget, counts = self.around.budget, torch.bincount(self.y, minlength=self.model.classes)
        self.found = {"label_counts": (budget.noisy_counts(counts, request) if budget else counts).numpy()}
