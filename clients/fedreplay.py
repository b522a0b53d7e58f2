"""FedReplay: the institution's half; the server's half is `strategies/fedreplay.py`.

Source: Qu et al. 2022, section 3.2, Algorithm 2, lines 1-3; section 4.1 for the encoder's training.
"""

from collections.abc import Iterator
from dataclasses import replace
from logging import WARNING

import numpy as np
import torch
from flwr.common.logger import log
from torch import Tensor, nn
from torch.optim import Optimizer

from flwr_replay.clients.fedstats import ONCE, FedStatsClient
from flwr_replay.errors import DivergedError, PrivacyError, WireError
from flwr_replay.files.tensors import nested, unnested
from flwr_replay.institution.budget import DPTraining
from flwr_replay.institution.listening import ListeningClient
from flwr_replay.institution.noisy import NoisyUpload
from flwr_replay.institution.owner import Shard
from flwr_replay.learning.augment import changed
from flwr_replay.learning.latents import ROWS_TOGETHER, pack, rows_per_chunk, shift_each
from flwr_replay.learning.training import (
    batches,
    held_out,
    learning_rate,
    make_optimizer,
    mean_loss,
    refuse_single_batches,
)
from flwr_replay.models import split
from flwr_replay.models.layers import as_input, step
from flwr_replay.payloads.ditto import PersonalEvaluation
from flwr_replay.payloads.fedreplay import Encode, Encoder, EvaluatePooled, Extract, Latents
from flwr_replay.payloads.fedstats import ClassSums, Summarise
from flwr_replay.rng import derived_seed
from flwr_replay.wire.records import StateDict, opened
from flwr_replay.wire.weights import encoded, load_arrays, to_arrays

__all__ = ["FedReplayClient"]

OWN = "pair"  # key of the state, as of all that pool a private model


class FedReplayClient(FedStatsClient, ListeningClient):
    """Trains the encoder if asked to, and uploads latent variables, or sums of them."""

    def summarise(self, request: Summarise) -> ClassSums:
        """Return sums of a frozen encoder's latents, for latents=drawn; of nothing else."""
        if not request.sums:
            raise WireError("sums of FedReplay are of a frozen encoder's latents; the server asks for others: refused")
        return super().summarise(request)

    def encode(self, request: Encode) -> Encoder:
        """Stage 1: train the whole backbone until the validation loss stops falling; return the encoder only."""
        if self.budget and self.budget.plan.local and not self.budget.plan.local.encoder_trained:
            raise PrivacyError("with these options no institution trains the encoder; the server asks for it: refused")
        model = self.scratch_model(request.arrays)
        encoder, _ = split(model, request.cut)
        self.institution.policy.check_upload(encoded(encoder).count_bytes(), "the encoder")
        optimizer = make_optimizer(model, self.training, request.lr)
        if dp := self.budget.begin("encoder", request.max_epochs, request) if self.budget else None:
            return self.encode_by_dpsgd(request, dp, model, optimizer, encoder)
        train, (kept, held_out) = self.institution.train, self.validation_split()
        refuse_single_batches(model, len(kept), self.batch_size)
        best, best_arrays, best_loss, seen, epoch = float("inf"), to_arrays(model), 0.0, 0, 0
        since_best = 0
        while epoch < request.max_epochs and since_best < request.patience:
            losses = self.one_pass(model.train(), optimizer, request.lr, kept, "encoder", epoch)
            seen += len(losses) * min(self.batch_size, len(kept))
            train_loss = mean_loss(losses)
            epoch, since_best = epoch + 1, since_best + 1
            validation = self.task.evaluate(model, held_out.x, held_out.y).loss
            if validation is not None and validation < best:
                best, best_loss, since_best, best_arrays = validation, train_loss, 0, to_arrays(model)
        if best == float("inf"):
            raise DivergedError("the encoder's validation loss must become finite: lower training.lr and run anew")
        load_arrays(model, best_arrays)
        return Encoder(
            arrays=encoded(encoder),
            num_examples=len(train),
            examples_seen=seen,
            train_loss=best_loss,
            validation_loss=best,
            epochs=epoch,
        )

    def one_pass(
        self, model: nn.Module, optimizer: Optimizer, lr: float, rows: Tensor, purpose: str, epoch: int
    ) -> list[Tensor]:
        """Train one pass over some of the own examples; return the loss of each batch."""
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(replace(self.training, lr=lr), epoch)
        train = self.institution.train
        drawn = batches(train.x, train.y, self.batch_size, self.shuffle(purpose, epoch), among=rows)
        changing = changed(drawn, self.augmentation(None, purpose, epoch))
        return [step(model, optimizer, self.task.loss(model(x_B), y_B)) for x_B, y_B in changing]

    def evaluate_pooled(self, request: EvaluatePooled) -> PersonalEvaluation:
        """Test the received model pooled with the institution's own, and alone."""
        if request.listen != "pool":
            raise WireError(f"models are pooled with listen=pool; the server asks for {request.listen}: refused")
        theta, shard = opened(request.arrays), self.institution.shard(request.split)
        if not len(shard):
            return PersonalEvaluation.empty(self.task)
        alone = self.evaluated(theta, request.split)
        return PersonalEvaluation.of_pair(self.tested_pool(self.own_model(request), theta, request, shard), alone)

    def own_model(self, request: EvaluatePooled) -> StateDict:
        """Return φ, which learns once in a run from all own examples that are not held out."""
        if kept := self.state.at(OWN, request.run, ONCE):
            return unnested(kept)["model"]
        fresh, rows = to_arrays(self.fresh_private(derived_seed(self.seed, "own"))), self.lessons(request)
        model, lr = self.scratch_model(fresh, "private"), self.training.lr
        refuse_single_batches(model, len(rows), self.batch_size)
        optimizer = make_optimizer(model, self.training, lr)
        for epoch in range(request.own_epochs):
            self.one_pass(model, optimizer, lr, rows, "own", epoch)
        phi = to_arrays(model)
        if not all(np.isfinite(array).all() for array in phi.values()):
            log(WARNING, "the own model has diverged, and stays as it was before: lower training.lr")
            phi = fresh
        self.state.save(OWN, request.run, ONCE, nested({"model": phi}), self.institution.durable)
        return phi

    def encode_by_dpsgd(
        self, request: Encode, dp: DPTraining, model: nn.Module, optimizer: Optimizer, encoder: nn.Module
    ) -> Encoder:
        """Stage 1 by DP-SGD, for all epochs: stopping early would reveal something about the examples."""
        train, augment = self.institution.train, self.augmentation(dp, "encoder")
        for epoch in range(request.max_epochs):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(replace(self.training, lr=request.lr), epoch)
            for batch in changed(dp.batches(train), augment):
                dp.step(model, optimizer, lambda x, y: self.task.losses(model(x), y), batch, self.batch_size)
        seen = request.max_epochs * (len(train) // self.batch_size) * self.batch_size
        return Encoder(
            arrays=encoded(encoder),
            num_examples=len(train),
            examples_seen=seen,
            epochs=request.max_epochs,
            **self.spent(request.run),
        )

    def validation_split(self) -> tuple[Tensor, Shard]:
        """Return the rows to train the encoder on, and what validates it: the data set's split, or a tenth held out."""
        train = self.institution.train
        if self.institution.validation is not None:
            return torch.arange(len(train)), self.institution.validation
        kept, held = held_out(len(train), self.shuffle("held out"))
        held = held.to(train.y.device)
        return kept, Shard(train.x[held], train.y[held], 0)

    def extract(self, request: Extract) -> Latents:
        """Stage 2: e_k ← E(x_k), the rows from `first` on that fit one message."""  # Alg. 2, lines 1-3
        train = self.institution.train
        encoder, _ = split(self.scratch_model(), request.cut)
        load_arrays(encoder, request.arrays)
        encoder.eval()  # norm layers use their running statistics
        views = self.view_offsets(request.views)
        total = len(train) * request.views
        row_values = self.encode_rows(encoder, views, torch.zeros(1, dtype=torch.int64))[0].numel()
        label_bytes = train.y[0].numel() * train.y.element_size()
        fit = rows_per_chunk(row_values, label_bytes, request.latent_dtype, request.chunk_bytes)
        first, stop = request.first, min(total, request.first + fit)
        if not 0 <= first < stop:
            raise WireError(f"an upload has rows 0 to {total}; the server asks for those from {first} on")
        stated = {}
        if self.budget and self.budget.plan.local:
            groups = self.groups(encoder, views, 0, total)
            rows = NoisyUpload(self.budget, self.budget.plan.local, request).rows(groups, total, first, stop)
            stated = self.spent(request.run)
        else:
            packed = [pack(group, request.latent_dtype) for group in self.groups(encoder, views, first, stop)]
            codes, scales = zip(*packed, strict=True)
            own = (torch.arange(first, stop) % len(train)).to(train.y.device)
            rows = {"latents": np.concatenate(codes), "labels": train.y[own].cpu().numpy()}
            rows |= {} if scales[0] is None else {"scales": np.concatenate(scales)}

        def raw_bytes(examples: int) -> int:
            return train.raw_bytes * examples // len(train)

        return Latents(
            **rows,
            num_examples=len(train),
            first=first,
            total=total,
            raw_bytes=raw_bytes(min(stop, len(train))) - raw_bytes(min(first, len(train))),
            **stated,
        )

    def groups(self, encoder: nn.Module, views: Tensor | None, first: int, stop: int) -> Iterator[Tensor]:
        """Encode rows `first` to `stop` of the upload, together in groups that are always the same."""
        total = len(self.institution.train) if views is None else len(views)
        for begin in range(first - first % ROWS_TOGETHER, stop, ROWS_TOGETHER):
            group = self.encode_rows(encoder, views, torch.arange(begin, min(begin + ROWS_TOGETHER, total)))
            yield group[max(0, first - begin) : stop - begin]

    def encode_rows(self, encoder: nn.Module, views: Tensor | None, rows: Tensor) -> Tensor:
        """Encode rows of the upload: row r is view r // n of example r mod n."""
        train = self.institution.train
        images = as_input(train.x[(rows % len(train)).to(train.x.device)])
        if views is not None:
            shift = images.shape[-1] // 8
            images = shift_each(images, shift, views[rows])
        with torch.inference_mode():
            latents: Tensor = encoder(images)
        return latents

    def view_offsets(self, views: int) -> Tensor | None:
        """Draw the shift of every row, none for the first view: shape (views * n, 2), pixels; None if views = 1."""
        if views == 1:
            return None
        n, shift = len(self.institution.train), self.institution.train.x.shape[-1] // 8
        drawn = torch.randint(0, 2 * shift + 1, ((views - 1) * n, 2), generator=self.shuffle("views"))
        return torch.cat([torch.full((n, 2), shift), drawn])
