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
listen=pool, where an institution pools the model with one of its own, which never leaves. Such a pool is never worse
than its better half on the held-out examples that weigh it (`flwr_replay/learning/pooling.py`). Its metrics are those
of its institution's own test examples; the global model's have the prefix global-.
What is protected: With dp=encoder the encoder's weights, with dp=latents latents and labels, with dp=statistics sums.

Deviations: Stage 1 stops early on the institution's validation split, else on a tenth of its training examples, and
keeps the best epoch. The encoder may also be random, come from a file or never train: then it carries nothing of these
institutions' data; the latents still do. A random encoder's batch norm keeps mean 0 and variance 1. Latents may be
quantised. With upload-views=n a round has n rows for each example. An institution that is late uploads when it comes.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor, nn

from flwr_replay.config.sections import PASSES, THREADS, VIEWS, Range, TaskConfig, one_of, require, within
from flwr_replay.config.strategy import StrategyConfig, Traits
from flwr_replay.errors import DivergedError, RunError, refuse_each
from flwr_replay.files.tensors import nested, unnested
from flwr_replay.learning.latents import check_reach
from flwr_replay.learning.ranks import Loss, Ranks
from flwr_replay.learning.training import make_optimizer, mean_loss, refuse_single_batches, torch_rng
from flwr_replay.models import Part, placed, split
from flwr_replay.models.layers import step
from flwr_replay.models.pretrained import read_encoder
from flwr_replay.movements.base import Exchange, Outcome, Settings
from flwr_replay.movements.one_shot import OneShot
from flwr_replay.payloads.ditto import PersonalEvaluation
from flwr_replay.payloads.fedreplay import Encode, Encoder, EvaluatePooled
from flwr_replay.privacy.plan import STATISTICS
from flwr_replay.rng import derived_seed
from flwr_replay.server.asking import stopped
from flwr_replay.server.members import Member
from flwr_replay.server.uploads import Uploads
from flwr_replay.strategies.fedstats import CLIPS, FedStats, FedStatsConfig
from flwr_replay.wire.payload import Request
from flwr_replay.wire.records import StateDict, Weights, array_record, opened
from flwr_replay.wire.weights import load_arrays, load_optimizer_arrays, optimizer_arrays, to_arrays

__all__ = ["FedReplay", "FedReplayConfig"]


@dataclass(frozen=True, kw_only=True)
class FedReplayConfig(StrategyConfig):
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
    listen: str = "none"  # none | pool: institutions pool the model with one of their own, by held-out examples
    own_epochs: int = 10  # listen=pool: passes of the own model over an institution's examples, once in a run
    holdout: float = 0.1  # listen=pool: share of these that are held out where there is no validation split

    def __post_init__(self) -> None:
        one_of("strategy.listen", self.listen, ("none", "pool"))
        one_of("strategy.latents", self.latents, ("sent", "drawn"))
        one_of("strategy.encoder", self.encoder, ("institution", "random", "file"))
        one_of("strategy.latent-dtype", self.latent_dtype, ("float32", "float16", "int8"))
        within("strategy.", self, chunk_mb=Range(0, 1000, "lies in (0, 1000]", "(]"), clip=CLIPS)
        require(
            (self.encoder == "file") == bool(self.encoder_file),
            "strategy.encoder=file and strategy.encoder-file=PATH go together; "
            f"got encoder={self.encoder} and encoder-file={self.encoder_file!r}",
        )
        within("strategy.", self, own_epochs=(1, PASSES), holdout=Range(0, 1, "is a share between 0 and 1", "()"))
        within("strategy.", self, encoder_epochs=(1, PASSES), patience=(1, PASSES))
        within("strategy.", self, upload_views=(1, VIEWS), server_processes=(1, THREADS))

    def check_task(self, task: TaskConfig) -> None:
        """Refuse to pool answers that are no classes."""
        require(
            self.listen == "none" or task.kind == "classification",
            f"listen=pool pools probabilities of classes; got task={task.name}: set listen=none",
        )

    def dp_passes(self, rounds: int) -> Mapping[str, int]:
        """The most epochs of the encoder's one training, if an institution trains it; all views of the one upload."""
        trained = {"encoder": self.encoder_epochs} if self.encoder == "institution" else {}
        return {STATISTICS: 1} if self.latents == "drawn" else {**trained, "latents": self.upload_views}

    @property
    def classifiers(self) -> str:
        """Those that institutions train alone stay there, and are tested."""
        return "kept" if self.listen == "pool" else "none"

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


class FedReplay(OneShot):
    """Latent variables are uploaded once; the server trains on their union.

    Its base says only that a round asks nobody to train.
    """

    config_type = FedReplayConfig
    config: FedReplayConfig
    needs = ("model", "task")
    stages = ("extract", "evaluate")

    encoder: StateDict | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.config.listen == "pool":
            self.evaluated, self.stages = PersonalEvaluation, (*self.stages[:-1], EvaluatePooled.stage_name)

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
            self.uploads.fitting_rows,
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
        if self.settings.input_shape:
            self.uploads.advise()

    @cached_property
    def statistics(self) -> FedStats | None:
        """The exchange of sums from which latents are drawn, with this run's institutions and ledger; else None."""
        of_sums = FedStatsConfig(head="mlp", clip=self.config.clip)
        return FedStats(of_sums, self.settings, self.recorder, self.exchanger) if self.config.sends_sums else None

    def all_stages(self) -> list[str]:
        """Return those of the sums where latents are drawn, and the evaluation's."""
        own, sums = super().all_stages(), self.statistics
        return [*(stage for stage in sums.all_stages() if stage != "evaluate"), own[-1]] if sums else own

    def exchange_round(self, grid: Grid, exchange: int, arrays: ArrayRecord, config: ConfigRecord) -> Outcome:
        """Make stages 1 and 2 as far as they are missing, then one epoch of stage 3."""
        weights = opened(arrays)
        if self.statistics:
            self.statistics.exchange_round(grid, exchange, ArrayRecord(), config, needed=False)
        else:
            if self.encoder is None:
                self.encoder = self.obtained(grid, exchange, weights, config)  # stage 1
                self.uploads.open(fresh=True)
                self.checkpoint(exchange - 1, weights)
            self.uploads.collect(grid, exchange, self.encoder, config)  # stage 2
        trained, loss = self.learn(exchange, weights)  # stage 3
        return array_record(trained), MetricRecord({"train-loss": loss})

    def evaluation(self, exchange: int, arrays: Weights) -> Request:
        """Each institution tests the model, with listen=pool also together with its own."""
        test, config = super().evaluation(exchange, arrays), self.config
        if config.listen == "none":
            return test
        how = {"listen": config.listen, "holdout": config.holdout, "own_epochs": config.own_epochs}
        return EvaluatePooled(**vars(test), **how)

    # --- stage 1 ------------------------------------------------------------------------------------------------------

    def obtained(self, grid: Grid, exchange: int, arrays: StateDict, config: ConfigRecord) -> StateDict:
        """Return the encoder: from an institution, a file, or as it is; of a frozen one nothing is left to train."""
        if self.config.encoder == "institution" and self.encoder_shapes:
            return self.train_encoder(grid, exchange, arrays, config)
        weights = read_encoder(Path(file), self.encoder_shapes) if (file := self.config.encoder_file) else arrays
        return {name: weights[name] for name in self.encoder_shapes}

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
            self.exchanger(grid, exchange, [self.message(member, request, config)], needed=False, take=take)
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

    @cached_property
    def uploads(self) -> Uploads:
        """What institutions upload."""
        config = self.config
        asked = config.latent_dtype, int(config.chunk_mb * 1e6), config.upload_views
        return Uploads(self.exchanger, self.parts, *asked)

    def forecast(self, arrays: StateDict, num_rounds: int) -> list[Exchange]:
        """One encoder, if an institution trains it, and every institution's latents, chunk by chunk, once."""
        if self.statistics:
            return self.statistics.forecast({}, num_rounds)
        encoder, exchanges = {name: arrays[name] for name in self.encoder_shapes}, list[Exchange]()
        if self.config.encoder == "institution" and encoder:
            exchanges = [(self.encoder_candidates()[0], self.encode_request(0, arrays), Encoder.blank(encoder), 1)]
        return exchanges + self.uploads.forecast(encoder)

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
        if not (sums.held if sums else self.uploads.store.complete):
            raise RunError(f"no institution has uploaded its latents; {self.recorder.failures_line()}")
        e = sums.draws("primary", exchange) if sums else self.uploads.store
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
            raise DivergedError(str(error) if sums else f"{error}; {self.uploads.store.reaches()}") from None

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
        self.uploads.open()


def descend(
    primary: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, e: Iterable[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """Train θ_C for one epoch; return the loss of each batch. Of several processes, each has its share of a batch."""
    losses = []
    for e_B, y_B in e:  # Alg. 2, line 9
        losses.append(step(primary, optimizer, loss(primary(e_B), y_B)))  # line 10: θ_C ← θ_C − η ∇L(θ_C; e)
    return losses
