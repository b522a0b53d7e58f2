"""Generative replay: the institution's half; the server's half is `flwr_replay/server/replay_codes.py`.

Source: Qu et al. 2022, Algorithm 1, lines 7-20, and footnote 1. Lines 1-6 train the classifier: the methods' own files
have the loop (`clients/cwt.py`), and `flwr_replay/institution/learner.py` puts replayed examples into its batches.
"""

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flwr_replay.errors import TrainingError, WireError
from flwr_replay.files.tensors import digest, nested, unnested
from flwr_replay.generators.autoencoder import VQVAE2
from flwr_replay.generators.codes import pack_codes, unpack_codes
from flwr_replay.generators.pictures import SHOWN, draw_grid
from flwr_replay.generators.plan import ReplayPlan
from flwr_replay.generators.sampler import CodeSource, ReplaySampler, sampler_of
from flwr_replay.institution.budget import PrivacyBudget
from flwr_replay.institution.owner import Institution
from flwr_replay.institution.pieces import Pieces
from flwr_replay.institution.trainings import GeneratorTraining, PriorTraining, Surroundings
from flwr_replay.learning.training import torch_rng
from flwr_replay.memory import remembered
from flwr_replay.payloads.common import RunRequest
from flwr_replay.payloads.replay import (
    Codes,
    EncodeImages,
    Generated,
    KeepCodes,
    KeepDecoder,
    KeepPrior,
    Kept,
    TrainedPrior,
    TrainGenerator,
    TrainPrior,
)
from flwr_replay.state.store import StateStore
from flwr_replay.wire.records import StateDict, Weights, opened
from flwr_replay.wire.weights import encoded, load_arrays, to_arrays

__all__ = ["GenerativeStages"]

TRAINING = "training"  # a run's folder, which one process at a time has


class GenerativeStages:
    """The stages of replay at one institution. The client of any method hands these stages on to it."""

    def __init__(
        self, institution: Institution, state: StateStore, replay_plan: ReplayPlan, budget: PrivacyBudget | None = None
    ) -> None:
        self.institution, self.state, self.replay_plan, self.budget = institution, state, replay_plan, budget
        self.pieces = Pieces(budget, replay_plan.generator.piece_seconds)

    # --- Algorithm 1, lines 7-20 --------------------------------------------------------------------------------------

    def train_generator(self, request: TrainGenerator) -> Generated:
        """Update the generator on real images and on replays, for a piece of the training."""  # line 7
        weights, run = opened(request.arrays or {}), request.run
        with self.pieces.alone(self.state.of_run(run) / TRAINING):
            data, model = self.pieces.images(self.institution.train, "generator"), self.blank_generator().train()
            if weights and self.replay_plan.replay.name == "vqvae2":  # line 8: D_old ← D
                load_arrays(model, weights)
                decoder = {name: value.cpu().numpy() for name, value in model.decoder_state_dict().items()}
                self.state.save("decoder-00", run, request.exchange, decoder)
            sampler = self.sampler(run, request.exchange, request.replayed)
            sources = self.sources(run, request.exchange, request.replayed) if sampler else ()
            around = self.around("generator", weights, *(source.digest for source in sources))
            training = GeneratorTraining(self.replay_plan, model, data, sampler, around)
            self.pieces.train(training, request)  # lines 9-18
            complete = not training.done.steps_left
            if complete:
                self.draw("generator", request, model.eval(), sampler)
        arrays = encoded(model) if complete else None
        return Generated(arrays=arrays, num_examples=len(data), **training.told, **self.pieces.spent(run))

    def encode_images(self, request: EncodeImages) -> Codes:
        """Encode: e ← the codes of x_U, or without replay of x_k."""  # line 19
        model, data = self.generator(request.arrays).eval(), self.institution.train
        codes, labels = [self.codes_of(model)], [self.replay_plan.labels(data.y)]
        sampler = self.sampler(request.run, request.exchange, request.replayed)
        self.draw("codes", request, model, sampler)
        if sampler:
            all_rows = torch.split(torch.arange(len(sampler)), self.replay_plan.at_once)
            replayed_codes = [model.encode(sampler.take(rows)[0]) for rows in all_rows]
            codes, labels = [torch.cat(replayed_codes).cpu(), *codes], [sampler.labels.numpy(), *labels]
        return Codes(
            codes=pack_codes(torch.cat(codes).numpy(), model.codebook_size),
            labels=np.concatenate(labels),
            num_examples=len(data),
            raw_bytes=data.raw_bytes,
        )

    def train_prior(self, request: TrainPrior) -> TrainedPrior:
        """Train a prior on the codes of x_k, for a piece of the training. The codes do not leave."""  # footnote 1
        data, run = self.pieces.images(self.institution.train, "prior"), request.run
        generator, in_epoch = self.blank_generator(), -(-len(data) // self.replay_plan.prior.batch_size)
        if budget := self.pieces.budget_of("prior"):
            in_epoch = budget.plan.cost("prior", len(data), 1).steps
        with self.pieces.alone(self.state.of_run(run) / TRAINING):
            training = PriorTraining(
                self.replay_plan.prior,
                self.replay_plan.fresh_prior(generator).to(self.institution.device),
                lambda weights: self.codes_of(self.generator(weights).eval()),
                self.classes(data.y.cpu(), request),
                in_epoch,
                self.around("prior", opened(request.arrays or {}), f"{request.label_mean} {request.label_scale}"),
            )
            self.pieces.train(training, request)
        arrays = None if training.done.steps_left else nested({"prior": to_arrays(training.model)})
        return TrainedPrior(arrays=arrays, num_examples=len(data), **training.told, **self.pieces.spent(run))

    # --- what is kept for replay --------------------------------------------------------------------------------------

    def keep_codes(self, request: KeepCodes) -> Kept:
        """Keep the codes e."""
        return self.keep(request, 0, request.codes, request.labels)

    def keep_decoder(self, request: KeepDecoder) -> Kept:
        """Keep the decoder D."""
        self.state.save("decoder-00", request.run, request.exchange, opened(request.arrays))
        return Kept(num_examples=0)

    def keep_prior(self, request: KeepPrior) -> Kept:
        """Sample codes e from a prior and keep them with the decoder D."""
        groups = unnested(opened(request.arrays), only=("decoder", "prior"))
        decoder, prior = groups["decoder"], groups["prior"]
        counts = tuple(request.label_counts)
        packed = drawn(Drawing(digest(prior), counts, request.source, prior), self.replay_plan, self.institution.device)
        classes = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        bins = self.replay_plan.bins(request.label_mean, request.label_scale)
        labels = bins.centres(classes) if self.replay_plan.kind == "regression" else classes
        self.draw_prior(request, decoder, packed)
        self.state.save(f"decoder-{request.source:02d}", request.run, request.exchange, decoder)
        return self.keep(request, request.source, packed, labels.numpy())

    def keep(self, request: KeepCodes | KeepPrior, source: int, codes: NDArray[Any], labels: NDArray[Any]) -> Kept:
        """Keep a source's codes in the state directory; remove the next source's, left by an interrupted attempt."""
        if len(codes) != len(labels):  # an image without codes would be uninitialised memory
            raise WireError(
                f"a replayed example has codes and a label; got {len(codes)} codes and {len(labels)} labels: refused"
            )
        arrays = {"codes": codes, "labels": labels}
        self.state.save(f"codes-{source:02d}", request.run, request.exchange, arrays)
        self.state.forget(f"codes-{source + 1:02d}", request.run)
        return Kept(num_examples=len(labels))

    def sampler(self, run: str, exchange: int, replayed: int) -> ReplaySampler | None:
        """Return a sampler of the kept examples; None if the request replays none.

        It is an error if the server's number of them is not kept: going on would silently give other results.
        """
        if not replayed:
            return None
        sources = self.sources(run, exchange, replayed)
        if (have := sum(len(source.labels) for source in sources)) != replayed:
            raise TrainingError(
                f"an institution replays the {replayed} examples that it has received; it has codes and decoder of "
                f"{have}: restore the state directory, or begin a new run"
            )
        return sampler_of(sources, self.replay_plan, self.institution.device)

    def sources(self, run: str, exchange: int, replayed: int) -> tuple[CodeSource, ...]:
        """Return the first codes that are kept, with their decoders, up to so many examples.

        An interrupted attempt, or an exchange whose answer was lost, may have left further ones.
        """
        sources, have = list[CodeSource](), 0
        while (
            have < replayed
            and (codes := self.state.load(f"codes-{len(sources):02d}", run, exchange + 1))
            and (decoder := self.state.load(f"decoder-{len(sources):02d}", run, exchange + 1))
        ):
            sources.append(CodeSource(digest(codes) + digest(decoder), decoder, codes["codes"], codes["labels"]))
            have += len(codes["labels"])
        return tuple(sources)

    # --- helpers ------------------------------------------------------------------------------------------------------

    def generator(self, arrays: Weights) -> VQVAE2:
        """Return the generator with these weights, in training mode."""
        model = self.blank_generator()
        load_arrays(model, arrays)
        return model.train()

    def blank_generator(self) -> VQVAE2:
        """Return a generator with fresh weights on the institution's device."""
        return self.replay_plan.fresh_generator().to(self.institution.device)

    def around(self, mechanism: str, weights: StateDict, *further: str) -> Surroundings:
        """Return what a training has around it; it depends on the institution's examples, and on further texts."""
        depends_on = sha256(" ".join([self.institution.data.train.digest, *further]).encode()).hexdigest()
        return Surroundings(weights, depends_on, self.state, self.rng, self.pieces.budget_of(mechanism))

    def draw(self, stage: str, request: RunRequest, model: VQVAE2, sampler: ReplaySampler | None) -> None:
        """Draw a picture of real images, reconstructions and replayed examples, in the state directory."""
        data = self.institution.train
        real = self.replay_plan.generator_input(data.x[:SHOWN], data.y[:SHOWN])
        rows = {"real": real, "reconstruction": model.decode(model.encode(real))}
        if sampler:
            spread = torch.linspace(0, len(sampler) - 1, min(SHOWN, len(sampler))).long()
            rows["replay"] = sampler.take(spread)[0]
        name = f"{stage}-{request.exchange:06d}-{'-'.join(rows)}.png"
        draw_grid(self.state.of_run(request.run) / "pictures" / name, rows)

    def draw_prior(self, request: KeepPrior, decoder: StateDict, packed: NDArray[np.uint8]) -> None:
        """Draw a picture of images sampled from a prior, in the state directory."""
        model = self.replay_plan.fresh_generator()
        model.load_decoder({name: torch.tensor(array) for name, array in decoder.items()})
        spread = packed[np.linspace(0, len(packed) - 1, SHOWN).astype(int)]
        codes = unpack_codes(spread, model.codes_per_image, model.codebook_size)
        name = f"prior-{request.exchange:06d}-{request.source:02d}-replay.png"
        images = model.decode(torch.from_numpy(codes.astype(np.int64)))
        draw_grid(self.state.of_run(request.run) / "pictures" / name, {"replay": images})

    def codes_of(self, model: VQVAE2) -> Tensor:
        """Encode all of the institution's images: (n, N), on the CPU."""
        data = self.institution.train
        batches = zip(*(torch.split(tensor, self.replay_plan.at_once) for tensor in (data.x, data.y)), strict=True)
        return torch.cat([model.encode(self.replay_plan.generator_input(x_B, y_B)).cpu() for x_B, y_B in batches])

    def classes(self, y: Tensor, request: TrainPrior) -> Tensor:
        """Return each label's class for the prior; in a regression, its bin."""
        if self.replay_plan.kind == "classification":
            return y
        return self.replay_plan.bins(request.label_mean, request.label_scale).classes(y)

    def rng(self, *purpose: object) -> torch.Generator:
        """Return an rng of this institution's own for one purpose."""
        return torch_rng(self.replay_plan.seed, self.institution.name, *purpose)


@dataclass(frozen=True)
class Drawing:
    """What is sampled from a prior. Equal ones give the same codes."""

    digest: str
    counts: tuple[int, ...]  # for each label
    source: int
    prior: StateDict = field(compare=False)


@remembered(maxsize=64)  # institutions that share a process sample once
def drawn(drawing: Drawing, replay_plan: ReplayPlan, device: torch.device) -> NDArray[np.uint8]:
    """Sample codes; packed, (n, bytes)."""
    model = replay_plan.fresh_generator()
    prior = replay_plan.fresh_prior(model).to(device).eval()
    load_arrays(prior, drawing.prior)
    classes = torch.repeat_interleave(torch.arange(len(drawing.counts)), torch.tensor(drawing.counts))
    rng = torch_rng(replay_plan.seed, "drawn codes", drawing.source)
    labels = torch.split(classes.to(device), replay_plan.at_once)
    codes = [prior.sample(labels_B, rng).cpu() for labels_B in labels]
    return pack_codes(torch.cat(codes).numpy(), model.codebook_size)
