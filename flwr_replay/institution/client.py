"""The institution's half of every method: a Flower `NumPyClient` with one method for each stage.

The server names a stage in the config record; the method of that name (`extract`, `train_own`) receives the decoded
request and returns the payload that the request's declaration promises.
"""

from collections.abc import Callable
from typing import Any

import torch
from flwr.client import NumPyClient
from torch import nn
from torch.optim import Optimizer

from flwr_replay.config.binding import digest_of
from flwr_replay.config.sections import TrainingConfig
from flwr_replay.errors import ConfigError, TrainingError, WireError
from flwr_replay.files.tensors import digest
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.generators.sampler import ReplaySampler
from flwr_replay.generators.synthesis import SynthesisPlan
from flwr_replay.institution.budget import DPTraining, PrivacyBudget
from flwr_replay.institution.learner import Learner
from flwr_replay.institution.owner import Institution, Shard
from flwr_replay.institution.policy import ENCODING
from flwr_replay.institution.replay import GenerativeStages
from flwr_replay.institution.synthesis import SynthesisStages
from flwr_replay.learning.augment import Augment, augment_of
from flwr_replay.learning.tasks import Task
from flwr_replay.learning.training import finite, make_optimizer, refuse_single_batches, torch_rng
from flwr_replay.memory import remembered
from flwr_replay.models import placed
from flwr_replay.models.seeding import builder_of
from flwr_replay.payloads.common import (
    DPRequest,
    Evaluate,
    Evaluation,
    ExpectsReplay,
    LabelScale,
    Present,
    ResumeRequest,
    RollCall,
    RunRequest,
    SuspendRequest,
    Train,
    Trained,
)
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.rng import derived_seed
from flwr_replay.state.store import StateStore, proof_of
from flwr_replay.wire.payload import REQUESTS, Payload
from flwr_replay.wire.records import StateDict, Weights
from flwr_replay.wire.weights import (
    check_weights,
    encoded,
    form_of,
    load_arrays,
    load_optimizer_arrays,
    optimizer_arrays,
    to_arrays,
)

__all__ = ["InstitutionClient"]


class InstitutionClient(NumPyClient):
    """Base of the clients of all methods.

    `model` builds the backbone with fresh weights, without arguments or from a seed. `private_model` builds the private
    model φ, which never leaves, for methods that have one; None: `model` does. Shuffles derive from the run's seed and
    the institution's name. Without `replay_plan` there is no replay, without `privacy` no DP, and without `synthesis`
    no synthetic image.
    `bound` is what a run is bound to, from `flwr_replay.config.binding.binding`.
    """

    def __init__(
        self,
        institution: Institution,
        model: Callable[..., nn.Module],
        task: Task,
        training: TrainingConfig | None = None,
        seed: int = 0,
        replay_plan: ReplayPlan | None = None,
        privacy: PrivacyPlan | None = None,
        private_model: Callable[..., nn.Module] | None = None,
        bound: str = "",
        synthesis: SynthesisPlan | None = None,
    ) -> None:
        self.institution = institution
        self.fresh = builder_of(model)
        self.fresh_private = builder_of(private_model or model)
        self.task = task
        self.training = training or TrainingConfig()
        self.seed = seed
        self.state, self.bound = StateStore(institution, bound), bound
        self.budget = PrivacyBudget(privacy, institution, self.state, seed) if privacy else None
        self.replay = GenerativeStages(institution, self.state, replay_plan, self.budget) if replay_plan else None
        self.synthesis = SynthesisStages(institution, self.state, synthesis, self.budget) if synthesis else None
        buffered = synthesis.replay if synthesis and synthesis.replays else None
        self.replay_options = replay_plan.replay if replay_plan else buffered  # None: nothing is replayed

    def answer(self, arrays: StateDict, config: dict[str, Any]) -> Payload:
        """Decode a request, call the method of its stage, and check that its answer is the declared payload.

        Refused are a stage that this method lacks, a run that began under other options, weights that the policy does
        not accept, that are not finite or absurdly large, and another payload than the request's declaration promises.
        """
        stage = str(config.get("stage", ""))
        request = REQUESTS.get(stage)
        name = stage.replace("-", "_") if stage != "evaluate" else "evaluate_model"
        method = getattr(self, name, None)
        if self.replay and stage in self.replay.replay_plan.stages:
            method = getattr(self.replay, name, method)
        if self.synthesis and stage in self.synthesis.stages:
            method = getattr(self.synthesis, name)
        if request is None or method is None:
            raise ConfigError(
                f"{type(self).__name__} has no stage {stage!r}: take the client of the server's strategy and version"
            )
        if any(field.shape == "state dict" for field in request.declared().values()):
            check_weights(arrays)
        if stage in dict((policy := self.institution.policy).weights):
            pinned = self.brought(stage, arrays)
            if pinned or (stage in ENCODING and not self.institution.frozen()):
                policy.check_weights(stage, digest(pinned) if pinned else "", lambda: digest(self.random_like(pinned)))
        decoded = request.of(arrays, config)
        if isinstance(decoded, LabelScale) and decoded.label_mean is not None and decoded.label_scale is not None:
            self.task = self.task.scaled(decoded.label_mean, decoded.label_scale)
        if "split" in request.declared():
            self.institution.check_split(getattr(decoded, "split", ""))
        if (run := getattr(decoded, "run", "")) or self.budget:
            self.state.bind(run, self.bound)
            self.state.check_encoder(run, self.institution.frozen())
        answer = method(decoded)
        if self.budget:
            self.budget.check_steps()
        if type(answer) is not request.answer:
            raise WireError(
                f"stage {stage!r} declares the answer {request.answer.__name__}; got {type(answer).__name__}"
            )
        return answer

    # --- stages that all methods share ------------------------------------------------------------------------------

    def roll_call(self, request: RollCall) -> Present:
        """Say who this institution is and how many examples it has.

        A model of another form than those that institutions exchange is a WireError, and so is a training with other
        options than the server's.
        """
        if request.frozen != (own := self.institution.frozen()):
            raise WireError(
                f"server and institutions must have one encoder; the server's is {request.frozen or 'none'}, this "
                f"institution's {own or 'none'}: use one model, and copies of one file of weights, everywhere"
            )
        train = self.institution.train
        if request.form and form_of(to_arrays(self.fresh(0))) != request.form:
            raise WireError(
                "institutions exchange models of one form; this one's has other names or shapes than the server's: use "
                "one model, for examples of one form and one number of classes, everywhere"
            )
        if request.training and request.training != digest_of(repr(self.training)):
            raise WireError(
                f"server and institution must have the same training; this institution's is {self.training}, the "
                "server's another: give the same TrainingConfig to both"
            )
        if self.budget:
            self.budget.plan.check_first_passes(self.budget.examples)
        self.state.check_data(request.run, dp=self.budget is not None)
        if self.institution.tests_external:
            _ = self.institution.external  # if they are missing, the error comes before anyone trains
        proof = proof_of(self.institution.state, request.run, self.institution.durable)
        return Present(
            name=self.institution.name,
            num_examples=len(train),
            raw_bytes=train.raw_bytes,
            proof=proof,
            pins=self.institution.seal.digest if self.institution.seal else "",
            **self.task.label_sums(train.y),
        )

    def evaluate_model(self, request: Evaluate) -> Evaluation:
        """Test the received weights on the split that the request names."""
        return self.evaluated(request.arrays, request.split)

    def brought(self, stage: str, arrays: StateDict) -> StateDict:
        """Return the weights in a request that a policy pins: all of them, unless what leaves does not need them."""
        return arrays

    def random_like(self, arrays: StateDict) -> StateDict:
        """Return, for these names, the weights of a model or a generator that is fresh from the run's seed."""
        fresh = to_arrays(self.fresh(derived_seed(self.seed, "model")))
        if self.replay and not arrays.keys() <= fresh.keys():
            fresh = to_arrays(self.replay.replay_plan.fresh_generator())
        return {name: fresh[name] for name in arrays if name in fresh}

    # --- helpers of the methods' loops ------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """b, the number of examples in a batch, which may be the institution's own."""
        return self.institution.batch_size or self.training.batch_size

    def training_data(self, pooled: bool = False) -> Shard:
        """Return the institution's training examples, or in a simulation the union of all institutions'."""
        return self.institution.pooled if pooled else self.institution.train

    def shuffle(self, *purpose: object) -> torch.Generator:
        """Return a random stream of this institution's own for one purpose, such as a round."""
        return torch_rng(self.seed, self.institution.name, *purpose)

    def scratch_model(self, arrays: Weights | None = None, role: str = "") -> nn.Module:
        """Return this process's shared backbone on the institution's device, in training mode, with the given weights.

        It is shared because building a model costs more than loading weights. Nothing may be kept in it between
        messages. A method that needs two models at once gives the second one a role: private, φ, which may be another
        network; personal.
        """
        model = self._loaded(arrays, role).train()
        model.zero_grad()  # an interrupted training may have left gradients
        return model

    def _loaded(self, arrays: Weights | None, role: str = "") -> nn.Module:
        fresh = self.fresh_private if role == "private" else self.fresh
        model = _scratch(fresh, self.institution.device, role)
        if arrays is not None:
            load_arrays(model, arrays)
        return model

    def evaluated(self, arrays: Weights, split: str, role: str = "") -> Evaluation:
        """Test weights on one of the institution's shards; `role` as for `scratch_model`."""
        shard = self.institution.shard(split)
        return self.task.evaluate(self._loaded(arrays, role), shard.x, shard.y) if len(shard) else self.task.empty()

    def resume(self, request: Train) -> tuple[nn.Module, Optimizer]:
        """Return the model with the received weights, ready to train, and its optimizer.

        Between trainings the optimizer's state has one rule. `reset` begins every training with a fresh optimizer.
        `keep` goes on with the state that this institution saved at the end of its previous training. The state never
        travels.
        """
        model = self.scratch_model(request.arrays)
        refuse_single_batches(model, len(self.training_data(request.pooled)), self.batch_size)
        return model, self.resume_optimizer(model, request)

    def learner(self, request: Train) -> Learner:
        """Return a learner of the received weights."""
        return self.learner_of(*self.resume(request), request, request.local_epochs)

    def learner_of(self, model: nn.Module, optimizer: Optimizer, request: DPRequest, epochs: int = 1) -> Learner:
        """Return a learner of a model. Under DP its steps are charged first."""
        sampler, rng = self.replay_sampler(request), self.shuffle(request.exchange, "replay")
        dp = self.budget.begin("classifier", epochs, request) if self.budget else None
        augment = self.augmentation(dp, request.exchange)
        balanced = self.training.batches == "balanced"
        return Learner(model, optimizer, self.task, self.batch_size, sampler, rng, dp, augment, balanced)

    def augmentation(self, dp: DPTraining | None, *purpose: object) -> Augment | None:
        """Return what changes the images of a training at random; under DP its draws are as secret as the masks."""
        return augment_of(self.training.changes, lambda: dp.uniform if dp else self.shuffle(*purpose, "augment"))

    def replay_sampler(self, request: RunRequest) -> ReplaySampler | None:
        """Return a sampler of the replayed examples in every batch; None without replay.

        Raises
        ------
        TrainingError
            If the run replays, and the request cannot say how many examples are kept for it.
        """
        if self.replay_options is None:
            return None
        if not isinstance(request, ExpectsReplay):
            raise TrainingError(
                f"the run has replay={self.replay_options.name}; {type(request).__name__} trains without it: choose "
                "replay=none, or a method that replays"
            )
        run, exchange, replayed = request.run, request.exchange, request.replayed or 0
        if self.replay:
            return self.replay.sampler(run, exchange, replayed)
        return self.synthesis.sampler(run, exchange, request.buffers or (), replayed) if self.synthesis else None

    def spent(self, run: str) -> dict[str, Any]:
        """Return the epsilon and delta that an answer states; none without DP."""
        return self.budget.spent(run) if self.budget else {}

    def trained(self, request: Train, learner: Learner, num_examples: int) -> Trained:
        """Save the optimizer's state; return the weights, counts and the loss."""
        loss = learner.train_loss() if self.institution.reports_losses else None  # raises before anything is saved
        self.suspend(request, learner.optimizer)
        return Trained(
            arrays=encoded(learner.model),
            num_examples=num_examples,
            **learner.counts,
            train_loss=loss,
            **self.spent(request.run),
        )

    def resume_optimizer(self, model: nn.Module, request: ResumeRequest) -> Optimizer:
        """Build the optimizer and, under `keep`, load its saved state."""
        optimizer = make_optimizer(model, self.training, request.lr)
        if request.optimizer_state == "keep" and (slots := self.kept("optimizer", request, take=True)):
            load_optimizer_arrays(optimizer, slots)
        return optimizer

    def kept(self, key: str, request: ResumeRequest, take: bool = False, known: bool = False) -> StateDict | None:
        """Return the arrays that this institution saved at the end of its previous training; None before the first.

        A method saves them at the end of every training. Arrays may be written to only with `take`. With `known` they
        are those of the last training whose answer the server has; later ones are removed.

        Raises
        ------
        TrainingError
            If they are gone, or older than the training that the server knows of, as after a restored backup. Fresh or
            older arrays would silently give other results.
        """
        if known:  # later ones would take the place of it, of which the last three files are kept
            self.state.forget_after(key, request.run, request.continues)
        newest = self.state.newest(key, request.run, request.exchange)
        if newest < request.continues:
            instead = f"that of exchange {newest}" if newest else "gone"
            raise TrainingError(
                f"an institution goes on from the state that its last training saved, in exchange {request.continues}; "
                f"the {key} of run {request.run!r} is {instead}: restore the newest state directory, or begin a new run"
            )
        read = self.state.take if take else self.state.load
        return read(key, request.run, request.exchange)

    def latest(self, key: str, request: RunRequest) -> StateDict:
        """Return the newest state of one of the institution's own models, up to and including this exchange.

        Before its first training there is none, which is an error.
        """
        arrays = self.state.load(key, request.run, request.exchange + 1)
        if arrays is None:
            raise TrainingError(
                f"institution {self.institution.name!r} has no model yet: its training has failed so far"
            )
        return arrays

    def suspend(self, request: SuspendRequest, optimizer: Optimizer) -> None:
        """Save the optimizer's state under `keep`; of a training that diverged none, so the next has a fresh one."""
        if request.optimizer_state == "keep":
            self.save("optimizer", request, optimizer_arrays(optimizer) if finite(optimizer) else {}, give=True)

    def save(self, key: str, request: RunRequest, arrays: StateDict, give: bool = False) -> None:
        """Save arrays after a training. In a simulation a power failure may lose them.

        With `give` nobody may write to them any more. Of a `scratch_model` give copies: the next training changes its
        weights.
        """
        self.state.save(key, request.run, request.exchange, arrays, self.institution.durable, give)


@remembered(maxsize=8)
def _scratch(fresh: Callable[[int], nn.Module], device: torch.device, role: str) -> nn.Module:
    return placed(fresh(0), device)
