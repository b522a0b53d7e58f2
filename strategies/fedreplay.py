"""FedReplay: the server's half; the institution's half is `clients/fedreplay.py`.

Source: Qu et al. 2022 (doi:10.1016/j.media.2022.102424), section 3.2, Algorithm 2; section 4.1 for the encoder.
Idea: A shared encoder turns every institution's images into latent variables. These are uploaded once, with their
labels, and the server trains the rest of the network on their union. No averaging, no forgetting.
Travels: the encoder, from one institution to all (`Encode`, `Encoder`, `Extract`); latents and labels, once, from all
(`Latents`): functions of single patients, with noise by dp=latents only; E and θ_C, as one model, to be tested by all.

    stage 1  E ← the part before the cut of a backbone trained at one institution until it stops improving
    stage 2  for each institution k: e_k ← E(x_k), uploaded with its labels                  # lines 1-6
    stage 3  e ← {e_1, …, e_K}                                                               # line 7
             θ_C ← fresh weights                                                             # line 8
             for each round: for each batch of e: θ_C ← θ_C − η ∇L(θ_C; e)                   # lines 9-10

Not in the paper: latents=drawn, where only FedStats' sums travel, and e ~ N(μ_c, W) (`strategies/fedstats.py`);
listen=pool (`flwr_replay/movements/listening.py`).
What is protected: With dp=encoder the encoder's weights, with dp=latents latents and labels, with dp=statistics sums.

Deviations: Stage 1 stops early on the institution's validation split, else on a tenth of its training examples, and
keeps the best epoch. The encoder may also be random, come from a file or never train: then it carries nothing of these
institutions' data; the latents still do. A random encoder's batch norm keeps mean 0 and variance 1. Latents may be
quantised. With upload-views=n a round has n rows for each example. An institution that is late uploads when it comes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor, nn

from flwr_replay.config.sections import PASSES, THREADS, VIEWS, Range, one_of, require, within
from flwr_replay.config.strategy import Traits
from flwr_replay.errors import DivergedError, RunError, refuse_each
from flwr_replay.files.tensors import nested, unnested
from flwr_replay.learning.latents import LatentStore, bytes_by_cut, check_chunk, check_reach, rows_per_chunk
from flwr_replay.learning.ranks import Loss, Ranks
from flwr_replay.learning.training import make_optimizer, mean_loss, refuse_single_batches, torch_rng
from flwr_replay.models import Part, placed, split
from flwr_replay.models.layers import step
from flwr_replay.models.pretrained import read_encoder
from flwr_replay.movements.base import Exchange, Settings
from flwr_replay.movements.listening import Listens, ListensConfig
from flwr_replay.movements.one_shot import OneShot
from flwr_replay.payloads.fedreplay import Encode, Encoder, Extract, Latents
from flwr_replay.privacy.plan import STATISTICS
from flwr_replay.report.summary import upload_advice
from flwr_replay.rng import derived_seed
from flwr_replay.server.asking import stopped
from flwr_replay.server.members import Member
from flwr_replay.strategies.fedstats import CLIPS, FedStats, FedStatsConfig
from flwr_replay.wire.records import StateDict, opened
from flwr_replay.wire.weights import load_arrays, load_optimizer_arrays, optimizer_arrays, to_arrays

__all__ = ["FedReplay", "FedReplayConfig"]

UNDER_WAY_MB = 128  # of uploads in memory at a time (at least one chunk), however many institutions there are


@dataclass(frozen=True, kw_only=True)
class FedReplayConfig(ListensConfig):
    """Options of FedReplay; the paper's encoder is trained at an institution and cut at conv1."""

    name = "fedreplay"
    traits = Traits(dp_mechanisms=("encoder", "latents", STATISTICS))
    files = ("encoder_file",)
    latents: str = "sent"  # sent | drawn: what θ_C learns from; sums of latents are then all that is sent
    clip: float = 10.0  # latents=drawn: C, the largest L2 norm of an image's latents
    encoder: str = "institution"  # institution: trained at one of them | random | file: trained elsewhere
    encoder_institution: str = "largest"  # or a name
    encoder_file: str = ""  # encoder=file: a .safetensors file with the weights before the cut
    encoder_epochs: int = 50  # at most
    patience: int = 3  # epochs without a better validation loss before the encoder's training stops
    cut: str = ""  # the last stage of the encoder; empty: the model's first stage, the paper's conv1 and enc1
    latent_dtype: str = "float32"  # float32 | float16 | int8 (with one scale per example)
    chunk_mb: float = 64.0  # no message holds more latents than this, 10^6 bytes
    upload_views: int = 1  # n: the image as it is and n - 1 randomly shifted views of it
    server_processes: int = 1  # that train the primary together, each on its share of every batch; on GPUs one each

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("strategy.latents", self.latents, ("sent", "drawn"))
        one_of("strategy.encoder", self.encoder, ("institution", "random", "file"))
        one_of("strategy.latent-dtype", self.latent_dtype, ("float32", "float16", "int8"))
        within("strategy.", self, chunk_mb=Range(0, 1000, "lies in (0, 1000]", "(]"), clip=CLIPS)
        require(
            (self.encoder == "file") == bool(self.encoder_file),
            "strategy.encoder=file and strategy.encoder-file=PATH go together; "
            f"got encoder={self.encoder} and encoder-file={self.encoder_file!r}",
        )
        require(
            self.encoder == "institution" or self.encoder_institution == "largest",
            "strategy.encoder-institution needs strategy.encoder=institution; "
            f"got encoder={self.encoder} and encoder-institution={self.encoder_institution!r}",
        )
        within("strategy.", self, encoder_epochs=(1, PASSES), patience=(1, PASSES))
        within("strategy.", self, upload_views=(1, VIEWS), server_processes=(1, THREADS))

    def dp_passes(self, rounds: int) -> Mapping[str, int]:
        """The most epochs of the encoder's one training, if an institution trains it; all views of the one upload."""
        trained = {"encoder": self.encoder_epochs} if self.encoder == "institution" else {}
        return {STATISTICS: 1} if self.latents == "drawn" else {**trained, "latents": self.upload_views}

    @property
    def own_images(self) -> bool:
        """Views are changed images."""
        return self.upload_views == 1

    @property
    def instructed(self) -> Mapping[str, object]:
        """The views of an upload, as many as the options say; nothing of what the options do not need."""
        return {"views": 0, "max_epochs": 0} if self.latents == "drawn" else {"views": self.upload_views, "sums": 0}

    @property
    def sends_sums(self) -> bool:
        """Sums of latents are enough to draw from."""
        return self.latents == "drawn"


class FedReplay(OneShot, Listens):
    """Latent variables are uploaded once; the server trains on their union."""

    config_type = FedReplayConfig
    config: FedReplayConfig
    needs = ("model", "task")
    stages = ("extract", "evaluate")

    encoder: StateDict | None = None

    @classmethod
    def check(cls, config: FedReplayConfig, settings: Settings, names: Sequence[str] = ()) -> None:
        """Refuse a cut that the model lacks, chunks too small, an encoder that does not fit, an unknown institution."""
        wanted = ("largest", *(names or [config.encoder_institution]))
        alone = replace(settings, fraction=1.0, replay_plan=None, synthesis=None)  # refused by the base class
        refuse_each(
            partial(super().check, config, settings, names),
            lambda: cls(config, alone).check_model(),
            partial(one_of, "strategy.encoder-institution", config.encoder_institution, wanted),
        )

    def check_model(self) -> None:
        """Refuse what does not fit the model."""
        config, settings = self.config, self.settings
        trained = config.encoder if self.encoder_shapes else "none that trains"
        idle = trained != config.encoder and (config.encoder, config.encoder_institution) != ("institution", "largest")
        refuse_each(
            self.fitting_rows,
            lambda: FedStats.check(self.statistics.config, settings) if self.statistics else None,
            lambda: require(
                config.upload_views == 1 or (self.blank_labels(1).ndim == 1 and not self.statistics),
                f"strategy.upload-views shifts images that are sent, no masks: set it to 1; got {config.upload_views}",
            ),
            lambda: require(
                not (self.statistics and self.encoder_shapes),
                f"latents are drawn where model.train ends what is frozen; got cut={config.cut}: leave cut out",
            ),
            lambda: require(not idle, "nothing before the cut trains: leave encoder and encoder-institution out"),
            lambda: require(
                trained == "institution" or not settings.training.changes,
                f"training.augment needs encoder=institution; got {trained}: set augment=none",
            ),
            lambda: self.ranks.check(self.primary, settings.training.batch_size),
            lambda: read_encoder(Path(config.encoder_file), self.encoder_shapes) if config.encoder == "file" else None,
        )

    def begin_run(self) -> None:
        """Compare what will be uploaded with the raw data, before anything is trained."""
        if self.statistics:
            return self.statistics.begin_run()
        if self.settings.input_shape is None:
            return
        rows = sum(member.num_examples for member in self.members) * self.config.upload_views
        raw = sum(member.raw_bytes for member in self.members)
        blank_1 = torch.zeros(1, *self.settings.input_shape, device=self.settings.device)
        sizes = bytes_by_cut(self.parts, blank_1, self.blank_labels(1).nbytes, self.config.latent_dtype)
        self.recorder.advised(upload_advice("uploads", sizes, self.cut, rows, raw, "freezes more of the network"))

    @cached_property
    def statistics(self) -> FedStats | None:
        """The exchange of sums from which latents are drawn, with this run's institutions and ledger; else None."""
        of_sums = FedStatsConfig(head="mlp", clip=self.config.clip)
        return FedStats(of_sums, self.settings, self.recorder, self.exchanger) if self.config.sends_sums else None

    def all_stages(self) -> list[str]:
        """Return those of the sums where latents are drawn, and the evaluation's."""
        own, sums = super().all_stages(), self.statistics
        return [*(stage for stage in sums.all_stages() if stage != "evaluate"), own[-1]] if sums else own

    # --- stage 1 ------------------------------------------------------------------------------------------------------

    def prepare(self, grid: Grid, exchange: int, arrays: StateDict, config: ConfigRecord) -> None:
        """Obtain the encoder, once; or the sums of all that are there."""
        if self.statistics:
            self.statistics.exchange_round(grid, exchange, ArrayRecord(), config)
            return
        self.at_once = max(1, int(UNDER_WAY_MB / self.config.chunk_mb))
        if self.encoder is not None:
            return
        if self.config.encoder == "institution" and self.encoder_shapes:  # of a frozen one nothing is left to train
            self.encoder = self.train_encoder(grid, exchange, arrays, config)
        else:
            weights = read_encoder(Path(file), self.encoder_shapes) if (file := self.config.encoder_file) else arrays
            self.encoder = {name: weights[name] for name in self.encoder_shapes}
        self.store = LatentStore(self.recorder.folder("latents", fresh=True), self.settings.run)
        self.checkpoint(exchange - 1, arrays)

    def train_encoder(self, grid: Grid, exchange: int, arrays: StateDict, config: ConfigRecord) -> StateDict:
        """Have one institution train the backbone; with `largest`, if it fails, the next largest is asked."""
        request = self.encode_request(exchange, arrays)
        encoders: list[Encoder] = []

        def take(member: Member, reply: Message) -> None:
            answer = Encoder.decode(reply.content)
            load_arrays(self.parts[0], answer.arrays)
            check_reach(self.parts[0], self.settings.input_shape, self.settings.device)
            encoders.append(answer)

        candidates, diverged = self.encoder_candidates(), list[str]()
        for member in candidates:
            self.exchanger(grid, exchange, [self.message(member, request, config)], take=take)
            diverged += self.exchanger.diverged
            for answer in encoders:
                self.recorder.saw(answer.examples_seen)
                loss = "" if answer.validation_loss is None else f", validation loss {answer.validation_loss:.4f}"
                self.recorder.log(f"encoder from {member.name}: {answer.epochs} epochs{loss}")
                return opened(answer.arrays)
        why = f"no institution could train the encoder; {self.recorder.failures_line()}"
        raise stopped(why, len(candidates), diverged)

    def encoder_candidates(self) -> list[Member]:
        """Return the institutions that may train the encoder, in the order in which they are asked."""
        wanted, by_size = self.config.encoder_institution, sorted(self.members, key=lambda m: (-m.num_examples, m.name))
        one_of("strategy.encoder-institution", wanted, ("largest", *(member.name for member in by_size)))
        return by_size if wanted == "largest" else [member for member in by_size if member.name == wanted]

    def encode_request(self, exchange: int, arrays: StateDict) -> Encode:
        """Ask to train the whole backbone and to return the part before the cut."""
        return Encode(
            exchange=exchange,
            arrays=arrays,
            run=self.settings.run,
            cut=self.cut,
            lr=self.settings.training.lr,
            max_epochs=self.config.encoder_epochs,
            patience=self.config.patience,
        )

    # --- stage 2 ------------------------------------------------------------------------------------------------------

    def missing(self, member: Member, exchange: int) -> Extract | None:
        """Ask for the first rows that an institution has not uploaded yet."""
        if self.statistics or self.encoder is None or (first := self.store.next_row(member.name)) is None:
            return None
        return self.extract_request(self.encoder, first, exchange)

    def extract_request(self, encoder: StateDict, first: int, exchange: int) -> Extract:
        """Ask for the rows from `first` on that fit one message."""
        return Extract(
            exchange=exchange,
            arrays=encoder,
            run=self.settings.run,
            cut=self.cut,
            latent_dtype=self.config.latent_dtype,
            first=first,
            chunk_bytes=int(self.config.chunk_mb * 1e6),
            views=self.config.upload_views,
        )

    def keep(self, member: Member, reply: Message) -> None:
        """Store a chunk: e ← e ∪ e_k."""  # Alg. 2, line 7
        chunk, config, shapes, fit = Latents.decode(reply.content), self.config, self.store.row_shapes, 0
        if self.settings.input_shape:
            shapes, fit = (self.latent_shape, self.blank_labels(1).shape[1:]), self.fitting_rows()
        asked = config.latent_dtype, config.upload_views, fit
        check_chunk(member.name, chunk, *asked, self.task, self.primary, shapes)
        self.store.add(member.name, chunk)

    def forecast(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """One encoder, if an institution trains it, and every institution's latents, chunk by chunk, once."""
        if self.statistics:
            return self.statistics.forecast({}, num_rounds)
        encoder, fit = {name: arrays[name] for name in self.encoder_shapes}, self.fitting_rows()
        dtype, exchanges = self.config.latent_dtype, list[Exchange]()
        if self.config.encoder == "institution" and encoder:
            exchanges = [(self.encoder_candidates()[0], self.encode_request(0, arrays), Encoder.blank(encoder), 1)]
        for member in self.members:
            total = member.num_examples * self.config.upload_views
            for first in range(0, total, fit):
                labels = self.blank_labels(min(fit, total - first))
                latents = np.broadcast_to(np.zeros((), dtype), (len(labels), *self.latent_shape))
                scales = np.zeros(len(labels), np.float32) if dtype == "int8" else None
                chunk = Latents.blank(latents=latents, labels=labels, scales=scales)
                exchanges.append((member, self.extract_request(encoder, first, 0), chunk, 1))
        return exchanges

    @cached_property
    def latent_shape(self) -> tuple[int, ...]:
        """The shape of one example's latents."""
        assert self.settings.input_shape is not None
        encoder = self.parts[0].eval()
        with torch.inference_mode():
            return tuple(encoder(torch.zeros(1, *self.settings.input_shape, device=self.settings.device)).shape[1:])

    def fitting_rows(self) -> int:
        """Return how many examples' latents and labels fit one message."""
        row = math.prod(self.latent_shape), self.blank_labels(1).nbytes, self.config.latent_dtype
        return rows_per_chunk(*row, int(self.config.chunk_mb * 1e6))

    # --- stage 3 ------------------------------------------------------------------------------------------------------

    @cached_property
    def parts(self) -> tuple[Part, Part]:
        """The backbone before and after the cut; θ_C, the part after it, has fresh weights."""  # Alg. 2, line 8
        assert self.settings.model is not None
        backbone = placed(self.settings.model(derived_seed(self.settings.seed, "primary")), self.settings.device)
        encoder, primary = split(backbone, self.config.cut)
        return encoder, primary.train()

    @property
    def primary(self) -> Part:
        """θ_C, the part after the cut, which the server trains."""
        return self.parts[1]

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of θ_C."""
        return make_optimizer(self.primary, self.settings.training, self.settings.training.lr)

    @property
    def cut(self) -> str:
        """The last stage of the encoder."""
        return self.parts[0].stages[-1]

    @property
    def encoder_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the encoder's weights, in the model's order."""
        return {name: tuple(tensor.shape) for name, tensor in self.parts[0].state_dict().items()}

    @cached_property
    def ranks(self) -> Ranks:
        """The processes that train θ_C: this one, or several."""
        return Ranks(self.config.server_processes, self.settings.device)

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Run the strategy, as `Movement.start` says; processes of the server end with it."""
        with closing(self.ranks):
            return super().start(*args, **kwargs)

    def learn(self, exchange: int, arrays: StateDict) -> tuple[StateDict, float]:
        """Train θ_C for one epoch on the union of the latents."""
        sums, training, task = self.statistics, self.settings.training, self.task
        if not (sums.held if sums else self.store.complete):
            raise RunError(f"no institution has uploaded its latents; {self.recorder.failures_line()}")
        e = sums.draws("primary", exchange) if sums else self.store
        refuse_single_batches(self.primary, len(e), training.batch_size)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr(exchange)
        shuffle = torch_rng(self.settings.seed, "primary", exchange)
        each, size = partial(e.epoch, training.batch_size, shuffle), min(training.batch_size, len(e))
        losses = self.ranks.train(descend, self.primary, self.optimizer, training, task.loss, each, size)
        self.recorder.saw(len(losses) * size)
        try:
            return {**(self.encoder or {}), **to_arrays(self.primary)}, mean_loss(losses)
        except DivergedError as error:
            raise DivergedError(str(error) if sums else f"{error}; {self.store.reaches()}") from None

    def state(self) -> tuple[StateDict, dict[str, Any]]:
        """Return the encoder, θ_C and its optimizer, and sums; the latents are on the disk already."""
        groups = {"encoder": self.encoder or {}, "primary": to_arrays(self.primary)}
        groups["optimizer"] = optimizer_arrays(self.optimizer)
        groups["sums"], values = self.statistics.state() if self.statistics else ({}, {})
        return nested(groups, mark="/"), values

    def restore(self, arrays: StateDict, values: dict[str, Any]) -> None:
        """Restore the encoder, θ_C and its optimizer, and open the latents on the disk."""
        groups = unnested(arrays, mark="/")
        self.encoder = {name: groups["encoder"][name] for name in self.encoder_shapes}  # the model's order
        load_arrays(self.primary, groups["primary"])
        load_optimizer_arrays(self.optimizer, groups["optimizer"])
        if self.statistics:
            return self.statistics.restore(groups["sums"], values)
        self.store = LatentStore(self.recorder.folder("latents"), self.settings.run)


def descend(
    primary: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, e: Iterable[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """Train θ_C for one epoch; return the loss of each batch. Of several processes, each has its share of a batch."""
    losses = []
    for e_B, y_B in e:  # Alg. 2, line 9
        losses.append(step(primary, optimizer, loss(primary(e_B), y_B)))  # line 10: θ_C ← θ_C − η ∇L(θ_C; e)
    return losses
