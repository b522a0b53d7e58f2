"""SplitNN, peer-to-peer mode: the institution's half; the server's half is `strategies/splitnn.py`.

Source: Vepakomma et al. 2018; Qu et al. 2022, section 4.1. A visit is max(1, ⌊|D_k|/b⌋) SGD iterations, as in CWT.

Between two messages the institution saves its part of the model: weights, norm statistics, optimizer. It saves them as
they were before the batches whose activations it has just sent. When the gradients arrive, it computes the activations
once more, and only then updates norm statistics and weights. So a repeated message gives the same bits.
"""

from collections import OrderedDict
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from flwr_replay.errors import DivergedError, TrainingError
from flwr_replay.files.tensors import nested, unnested
from flwr_replay.institution.client import InstitutionClient
from flwr_replay.institution.learner import mixed_batches
from flwr_replay.learning.training import batches, late_steps, make_optimizer, mean_loss, refuse_single_batches
from flwr_replay.models import StagedModel, split, split_before_head
from flwr_replay.models.layers import step
from flwr_replay.payloads.splitnn import (
    Activations,
    Enter,
    EnterUnlabelled,
    Half,
    HeadGradients,
    HeadLoss,
    LabelledActivations,
    Leave,
    NextBatch,
    NextBatchUnlabelled,
)
from flwr_replay.wire.weights import encoded, load_arrays, load_optimizer_arrays, optimizer_arrays, to_arrays

__all__ = ["SplitNNClient"]

AnyRequest = Enter | NextBatch | HeadLoss | Leave


class SplitNNClient(InstitutionClient):
    """Trains the part before the cut, and with share-labels=false the head."""

    # --- stages -------------------------------------------------------------------------------------------------------

    def enter(self, request: Enter) -> LabelledActivations:
        """θ_E ← the weights received; a ← E(x) of the first group."""
        part = self.part(request)
        load_arrays(part, request.arrays)
        self.state.forget("part", request.run)  # parts of earlier visits, failed ones included
        self.save_part(request, part, self.resume_optimizer(part, request))
        return self.upload(request, part)

    def next_batch(self, request: NextBatch) -> LabelledActivations:
        """θ_E ← θ_E − η g · ∂E(x)/∂θ_E; a ← E(x) of the next group."""
        part, optimizer = self.load_part(request)
        self.learn(request, part, optimizer)
        self.save_part(request, part, optimizer)
        return self.upload(request, part)

    def leave(self, request: Leave) -> Half:
        """Step on the gradients of the last group; return θ_E."""
        part, optimizer = self.load_part(request)
        self.learn(request, part, optimizer)
        self.suspend(request, optimizer)
        return Half(arrays=encoded(part), num_examples=len(self.training_data()))

    def enter_unlabelled(self, request: EnterUnlabelled) -> Activations:
        """Do as `enter`, without labels."""
        return _unlabelled(self.enter(request))

    def next_batch_unlabelled(self, request: NextBatchUnlabelled) -> Activations:
        """Do as `next_batch`, without labels."""
        return _unlabelled(self.next_batch(request))

    def head_loss(self, request: HeadLoss) -> HeadGradients:
        """θ_H ← θ_H − η ∇L(H(s), y), batch by batch; return ∂L/∂s, where s is the output of the server's part."""
        part, optimizer = self.load_part(request)
        s, losses = [s_B.requires_grad_() for s_B in self.arrived(request.outputs, request)], []
        for s_B, (_, y_B) in zip(s, self.group(request, request.group), strict=True):
            losses.append(step(part, optimizer, self.task.loss(part[-1](s_B), y_B)))
        mean_loss(losses)  # raises if a loss is not finite
        self.save_part(request, part, optimizer)
        return HeadGradients(
            gradients=_joined([s_B.grad for s_B in s if s_B.grad is not None]),
            losses=torch.stack(losses).tolist(),
            num_examples=len(self.training_data()),
        )

    # --- batches ------------------------------------------------------------------------------------------------------

    def learn(self, request: NextBatch | Leave, part: StagedModel, optimizer: torch.optim.Optimizer) -> None:
        """Compute the activations of the previous group once more, then step on their gradients."""
        encoder = self.encoder(request, part)
        activations = [encoder(x_B) for x_B, _ in self.group(request, request.group - 1)]
        late_steps(encoder, optimizer, activations, self.arrived(request.gradients, request))

    def upload(self, request: AnyRequest, part: StagedModel) -> LabelledActivations:
        """Return the activations of a group; norm statistics that change here are not saved."""
        encoder, group = self.encoder(request, part), self.group(request, request.group)
        with torch.no_grad():
            activations = _joined([encoder(x_B) for x_B, _ in group])
        if not np.isfinite(activations).all():
            raise DivergedError("activations must stay finite: lower training.lr and run anew")
        return LabelledActivations(
            activations=activations,
            labels=_joined([y_B for _, y_B in group]),
            num_examples=len(self.training_data()),
        )

    def group(self, request: AnyRequest, group: int) -> list[tuple[Tensor, Tensor]]:
        """Return a group of the visit's batches; they depend on the seed and the round only."""
        data, m = self.training_data(), request.micro_batches
        shuffle = self.shuffle(request.exchange)
        real = batches(data.x, data.y, self.batch_size, shuffle, only=slice(group * m, (group + 1) * m))
        if sampler := self.replay_sampler(request):
            draws = self.shuffle(request.exchange, "replay")
            real = mixed_batches(real, sampler, self.batch_size, draws, first=group * m)
        of_group = []
        for number, batch in enumerate(real, start=group * m):  # draws of its own: a batch is made twice
            augment = self.augmentation(None, request.exchange, number)
            of_group.append(augment(*batch) if augment else batch)
        return of_group

    def arrived(self, array: NDArray[Any], request: AnyRequest) -> tuple[Tensor, ...]:
        """Split an array that the server sent for a group into batches."""
        replay = self.replay_options
        num_replayed = replay.num_replayed(self.batch_size, request.replayed) if replay else 0
        return torch.split(torch.tensor(array, device=self.institution.device), self.batch_size + num_replayed)

    # --- the institution's part ---------------------------------------------------------------------------------------

    def part(self, request: AnyRequest) -> StagedModel:
        """Return the stages that train here, of the one backbone that this process keeps."""
        model = self.scratch_model()
        refuse_single_batches(model, len(self.training_data()), self.batch_size)
        parts = (split_before_head if request.with_head else split)(model, request.cut)
        return StagedModel(OrderedDict(chain.from_iterable(part.named_children() for part in parts[::2])))

    def encoder(self, request: AnyRequest, part: StagedModel) -> nn.Sequential:
        """Return the stages before the cut."""
        return part[: part.stages.index(request.cut) + 1]

    def save_part(self, request: AnyRequest, part: StagedModel, optimizer: torch.optim.Optimizer) -> None:
        """Save the part and its optimizer for the next message of this visit, which another process may receive."""
        arrays = nested({"weights": to_arrays(part), "optimizer": optimizer_arrays(optimizer)}, mark="/")
        key = f"part-{request.exchange:06d}"
        # Not flushed to the disk: after a power cut the visit has failed anyway.
        self.state.save(key, request.run, request.message, arrays, to_disk=False)

    def load_part(self, request: AnyRequest) -> tuple[StagedModel, torch.optim.Optimizer]:
        """Return the part and its optimizer as saved at the previous message; an error if they are gone."""
        kept = self.state.take(f"part-{request.exchange:06d}", request.run, request.message)
        if kept is None:
            raise TrainingError(
                "an institution continues with the part of the model that it kept after the previous message; that of "
                f"run {request.run!r} is gone: do not change the state directory during a run"
            )
        part = self.part(request)
        arrays = unnested(kept, mark="/")
        load_arrays(part, arrays["weights"])
        optimizer = make_optimizer(part, self.training, request.lr)
        load_optimizer_arrays(optimizer, arrays["optimizer"])
        return part, optimizer


def _joined(tensors: list[Tensor]) -> NDArray[Any]:
    return torch.cat(tensors).cpu().numpy()


def _unlabelled(upload: LabelledActivations) -> Activations:
    return Activations(activations=upload.activations, num_examples=upload.num_examples)
