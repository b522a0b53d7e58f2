"""FedER: the institution's half; the server's half is `strategies/feder.py`.

Source: Pennisi et al. 2023, section III-C, eq. 4: the loss on private examples plus the loss on the buffer's.
"""

import numpy as np

from flwr_replay.errors import ConfigError, RefusedError
from flwr_replay.institution.client import InstitutionClient
from flwr_replay.institution.learner import Learner
from flwr_replay.institution.owner import Shard
from flwr_replay.institution.synthesis import SynthesisStages
from flwr_replay.learning.training import refuse_single_batches
from flwr_replay.payloads.common import Evaluation, Trained
from flwr_replay.payloads.feder import TrainOwnWithBuffers, TrainWithBuffers
from flwr_replay.payloads.local import EvaluateOwn, TrainedOwn
from flwr_replay.wire.records import Weights
from flwr_replay.wire.weights import encoded, to_arrays

__all__ = ["FedERClient"]

OWN_MODEL = "private"  # a model that stays; its architecture may be the institution's own
OWN = "own-synthetic"  # mode=synthetic-only: what stands for the institution's real images


class FedERClient(InstitutionClient):
    """Trains the models that come by on its own examples and on buffers of others."""

    def train_with_buffers(self, request: TrainWithBuffers) -> Trained:
        """Train a received model and return it."""
        self.check_mode(request, stays=False)
        learner, examples = self.trained_model(request, request.arrays)
        return Trained(
            arrays=encoded(learner.model),
            num_examples=examples,
            **learner.counts,
            train_loss=learner.train_loss(),
            **self.spent(request.run),
        )

    def train_own_with_buffers(self, request: TrainOwnWithBuffers) -> TrainedOwn:
        """Train the institution's own model, which stays.

        With dp=end-to-end nobody is told of this training, not even that it diverged: the model is then what it was
        before, with a fresh optimizer.
        """
        self.check_mode(request, stays=True)
        model = self.kept("model", request) or to_arrays(self.fresh_private(request.init_seed))
        learner, examples = self.trained_model(request, model, role=OWN_MODEL)
        trained = to_arrays(learner.model)
        if self.budget and self.budget.plan.config.end_to_end:
            loss, finite = None, all(np.isfinite(array).all() for array in trained.values())
        else:
            loss, finite = learner.train_loss(), True
        self.save("model", request, trained if finite else model, give=True)
        self.suspend(request, learner.optimizer)
        spent = self.spent(request.run)
        return TrainedOwn(num_examples=examples, **learner.counts, train_loss=loss, **spent)

    def check_mode(self, request: TrainWithBuffers | TrainOwnWithBuffers, stays: bool) -> None:
        """Refuse to return a model in a run in which models stay, and to keep one in a run in which they hop."""
        if (request.mode == "buffer-only") != stays:
            raise RefusedError(
                f"models {'stay' if not stays else 'hop'} with mode={request.mode}; the server asks for the stage of "
                "another mode: refused"
            )

    def trained_model(
        self, request: TrainWithBuffers | TrainOwnWithBuffers, arrays: Weights, role: str = ""
    ) -> tuple[Learner, int]:
        """Train a model for E passes on D_i and B: eq. 4."""
        b, model = self.batch_size, self.scratch_model(arrays, role)
        data = self.examples(request)
        refuse_single_batches(model, len(data), b)
        sampler = self.images.sampler(request.run, request.exchange, request.buffers, request.buffered)
        learner = self.learner_of(model, self.resume_optimizer(model, request), request, request.local_epochs)
        replayed = sampler.batches(b, self.shuffle(request.exchange, "buffer")) if sampler else None
        shuffle = self.shuffle(request.exchange)
        for _ in range(request.local_epochs):
            for x_B, y_B in learner.batches(data, shuffle):
                penalty = None
                if replayed:
                    x_R, y_R = next(replayed)
                    x_R, y_R = learner.augment(x_R, y_R) if learner.augment else (x_R, y_R)
                    penalty = self.task.loss(model(x_R), y_R)  # L(θ; B)
                    learner.seen += len(y_R)
                learner.step(x_B, y_B, penalty)  # θ ← θ − η ∇(L(θ; D_i) + L(θ; B))
        return learner, len(self.institution.train)

    def examples(self, request: TrainWithBuffers | TrainOwnWithBuffers) -> Shard:
        """Return D_i; with mode=synthetic-only as many images that the institution's generator has drawn."""
        if request.mode != "synthetic-only":
            return self.training_data()
        kept = self.state.load(OWN, request.run, request.exchange + 1)
        if kept is None:
            kept = self.images.drawn(request.run, len(self.institution.train), "own")
            self.save(OWN, request, kept)
        return self.images.shard([kept])

    def evaluate_own(self, request: EvaluateOwn) -> Evaluation:
        """Test the institution's own model after this round's training."""
        return self.evaluated(self.latest("model", request), request.split, role=OWN_MODEL)

    @property
    def images(self) -> SynthesisStages:
        """The institution's generator and the buffers that it keeps."""
        if self.synthesis is None:
            raise ConfigError("FedER needs a generator; its options declare draws_images")
        return self.synthesis
