"""One run's configuration: its sections, its strategy's options, and all other options."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from math import inf
from typing import Any

from flwr_replay.config.catalogue import code_of
from flwr_replay.config.hiding import Hiding
from flwr_replay.config.model import ModelConfig
from flwr_replay.config.privacy import ON_SUMS, PrivacyConfig
from flwr_replay.config.sections import (
    NODES,
    NOT_NEGATIVE,
    ROUNDS,
    SECONDS,
    SHARE,
    THREADS,
    GeneratorConfig,
    PartitionConfig,
    PriorConfig,
    Range,
    ReplayConfig,
    TaskConfig,
    TrainingConfig,
    one_of,
    require,
    within,
)
from flwr_replay.config.strategy import StrategyConfig

__all__ = ["RECORD", "TRACKERS", "RunConfig", "check_numbers"]

RECORD = ("none", "up", "all")
TRACKERS = ("none", "tensorboard", "mlflow", "wandb")
IN_FILES = ("folder", "clinical", "bags")  # formats with a manifest
LEAST = 1e-4  # of a core or a GPU, that Ray counts


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run, fully resolved; `config.yaml` of the run directory holds exactly this."""

    strategy: StrategyConfig  # the <Name>Config of strategies/<name>.py
    task: TaskConfig
    partition: PartitionConfig
    model: ModelConfig
    training: TrainingConfig
    replay: ReplayConfig
    generator: GeneratorConfig
    prior: PriorConfig
    privacy: PrivacyConfig
    nodes: int  # institutions to wait for; 0: all of a simulation, four in process; a deployment must say it
    rounds: int  # passes over the institutions' data
    seed: int  # of weights, orders and partitions
    fraction: float  # of the institutions that train in a round, drawn anew from the seed; all evaluate
    evaluate_every: int  # rounds; the last round is always evaluated
    split: str  # by which rounds are judged: test | validation: the model of the last round is then tested, too
    external: bool  # also test every model on examples of institutions outside the run
    evaluate_before_mixing: bool  # also test every institution's model before it is averaged or mixed
    forgetting: bool  # after every exchange, test the model on each institution's own training examples too
    threads: int  # torch threads of every process; equal numbers of threads give equal bits
    device: str  # auto | cpu | cuda | cuda:N
    client_cpus: float  # on Ray, cores of a process that serves institutions, on a cluster also a share; 0: threads
    client_gpus: float  # on Ray, GPUs of such a process, a fraction shares one; 0: what there is, shared out
    sealed: bool  # what institutions send is encrypted for the other institutions: the server cannot read it
    masked: bool  # institutions add masks that cancel in their sum: the server reads the mean of weights, and no others
    record: str  # none | up | all: messages that the run directory keeps, so that attacks can be tried on them
    record_mb: float  # the most that these messages may take, in 10^6 bytes
    tracking: str  # none | tensorboard | mlflow | wandb: what else is told the metrics, by the server
    runs_dir: str  # empty: $FLWR_REPLAY_HOME/runs, else ~/.flwr-replay/runs
    run_name: str  # empty: <date>-<strategy>-<task>-<seed>
    resume: str  # the directory of a run to continue
    timeout: float  # seconds to wait for an institution's answer
    wait: float  # seconds to wait for `nodes` institutions to join
    clinics: tuple[str, ...] = ()  # names of those that may join, so that who is missing is named; empty: not known

    def __post_init__(self) -> None:
        check_numbers(self)
        if self.sealed:
            self._check_sealed()
        if self.masked:
            self._check_masked()
        if self.privacy.noise == "shared":
            self._check_shared()
        require(
            getattr(self.strategy, "proxy_optimizer", "") != "travels"
            or not (self.masked or self.privacy.dp == "update"),
            "what is summed is a model alone; got strategy.proxy-optimizer=travels: choose stays or reset",
        )
        require(
            (self.replay.name == "none" and not self.draws_images) or self.generator.piece_seconds < self.timeout,
            "generator.piece-seconds must be below timeout, since a message must be answered before that; got "
            f"{self.generator.piece_seconds:g} and {self.timeout:g}: choose fewer, or a longer timeout",
        )
        self.strategy.check_task(self.task)
        require(
            self.partition.name != "index" or self.task.format not in IN_FILES,
            f"partition=index counts the examples of arrays; task={self.task.name} lists files: give its manifest a "
            "column site, and choose partition=natural",
        )
        balanced = self.training.batches == "balanced"
        for option in ["batch-sizes"] * bool(self.training.batch_sizes) + ["batches=balanced"] * balanced:
            require(
                not self.privacy.mechanisms,
                f"training.{option} is not for training under DP: leave it out, or dp=none",
            )
        require(
            not balanced or self.task.kind == "classification",
            f"training.batches=balanced draws classes equally often; got task={self.task.name}: leave it out",
        )
        if self.training.changes:
            require(
                self.task.size > 1 and self.task.format != "bags",
                f"training.augment changes images; got task={self.task.name}: leave it out",
            )

    def _check_sealed(self) -> None:
        """Refuse what needs a server that can read."""
        name = self.strategy.name
        require(
            self.strategy.traits.relayed,
            f"sealed=true is for methods whose server only hands on what institutions send; that of strategy={name} "
            "(no relayed in its Traits) computes with it: leave sealed out, or choose another strategy",
        )
        unset = {
            "replay": (self.replay.name, "none"),
            "model.weights": ("" if self.model.everywhere else self.model.weights, ""),
        }
        _refuse_beside("with sealed=true the server has nothing but sealed parcels", unset)

    def _check_masked(self) -> None:
        """Refuse what needs more of an institution's weights than their share in a sum."""
        name = self.strategy.name
        equal = "; strategy=fml sums the proxies that proxyfl mixes by topology=complete" * (name == "proxyfl")
        require(
            self.strategy.sends_sums,
            "masked=true is for methods whose server averages weights and needs nothing else (summed in their Traits); "
            f"that of strategy={name} does not: leave masked out, or choose a strategy of docs/masked.md{equal}",
        )
        require(
            self.nodes not in (1, 2),
            f"masked=true needs at least three institutions; got nodes={self.nodes}: of two, each could compute the "
            "other's weights from the mean: add one, or set masked=false, and noise=secret where noise=shared",
        )
        require(
            getattr(self.strategy, "listen", "none") != "pool" or self.split == "validation",
            "listen=pool weighs models by examples that are held out, under masks by none of training; got "
            f"split={self.split}: set split=validation, or leave listen out",
        )
        unset = {
            "sealed": (self.sealed, False),
            "replay": (self.replay.name, self.replay.name if self.replay.name == "statistics" else "none"),
            "fraction": (self.fraction, 1.0),
            "evaluate-before-mixing": (self.evaluate_before_mixing, False),
            "forgetting": (self.forgetting, False),
        }
        _refuse_beside("with masked=true the server gets nothing but the mean of all", unset)

    def _check_shared(self) -> None:
        """Refuse shares of noise without masks, or that nobody makes up."""
        require(self.masked, "shares of noise protect a sum, and nothing less; got masked=false: set masked=true")
        require(self.nodes > 0, "noise=shared needs the number of institutions; got nodes=0: set nodes")
        within("privacy.", self.privacy, colluders=(-1, inf), dropouts=(0, inf))
        if self.replay.name != "none":  # weights beside the sums come from all
            _refuse_beside(f"replay={self.replay.name} needs all", {"privacy.dropouts": (self.privacy.dropouts, 0)})
        helping, missing = self.colluders, self.privacy.dropouts
        require(
            helping + missing <= self.nodes - 2 and missing <= self.nodes - 3,
            "a sum needs three institutions, two of which add their share and help nobody; got "
            f"nodes={self.nodes}, privacy.colluders={helping} and privacy.dropouts={missing}: choose fewer of the "
            "latter two, or more nodes",
        )
        require(
            not missing or self.nodes - helping > missing * (missing + 1),
            f"of sums from which d may be missing an honest majority tells one, if nodes - colluders > d (d + 1); got "
            f"nodes={self.nodes}, privacy.colluders={helping} and privacy.dropouts={missing}: choose fewer dropouts",
        )

    @property
    def end_to_end(self) -> bool:
        """Whether all that leaves and depends on training examples is under DP, but for metrics of tests."""
        tests_more = self.forgetting or self.external
        known = self.task.kind == "classification" or bool(self.task.label_range)  # else sums of labels leave
        alone = self.replay.name == "none"  # else weights leave, too
        sums = self.privacy.dp in ON_SUMS and known and alone and not tests_more
        return self.privacy.end_to_end or sums

    @property
    def colluders(self) -> int:
        """How many institutions may help the server without harm to shared noise."""
        return self.privacy.colluders if self.privacy.colluders >= 0 else (self.nodes - 1) // 3

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Of all values; each message asks some ten times."""
        return hash(tuple(getattr(self, option.name) for option in fields(self)))

    def __getstate__(self) -> dict[str, Any]:
        """Leave the hash out of a copy for another process, where texts have others."""
        return {option.name: getattr(self, option.name) for option in fields(self)}

    @property
    def hiding(self) -> Hiding:
        """What the run hides from its server."""
        return Hiding.of(self.sealed, self.masked)

    @property
    def own_code(self) -> tuple[str, ...]:
        """What the run imports that is not ours: functions of its models, data and partition, a package's strategy."""
        functions = [*filter(None, (self.model.build, self.task.load, self.partition.deal))]
        functions += [code for name in self.strategy.private_models for code in code_of(name, "model")]
        return (*dict.fromkeys(functions), *code_of(self.strategy.name))

    @property
    def features_once(self) -> bool:
        """Whether an institution's models need of its images only their features, which one frozen encoder computes."""
        return self.model.train != "all" and not self.features_anew

    @property
    def features_anew(self) -> str:
        """Why a frozen encoder computes features anew in every step, not once; empty: it need not."""
        if self.training.changes:
            return "training.augment changes the images"
        if self.replay.name not in ("none", "statistics"):
            return f"replay={self.replay.name} adds images"
        if self.draws_images or not self.strategy.own_images:
            return f"strategy={self.strategy.name} needs more than each institution's images as they are"
        return ""

    @property
    def draws_images(self) -> bool:
        """Whether each institution trains an image generator, from which it draws synthetic images."""
        return self.strategy.traits.draws_images or self.replay.name == "buffer"


def check_numbers(options: Any) -> None:
    """Refuse numbers and words that are wrong whatever the sections say, of a `RunConfig` or what has its options."""
    within("", options, rounds=(1, ROUNDS), threads=(1, THREADS), nodes=(0, NODES), evaluate_every=(1, inf))
    within("", options, seed=NOT_NEGATIVE, fraction=SHARE)
    within("", options, timeout=Range(0, SECONDS, "must be positive, in seconds, and at most a year", "(]"))
    within("", options, wait=Range(0, SECONDS, "must not be negative, in seconds, and at most a year"))
    within("", options, client_cpus=Range(0, inf, "must be finite and not negative", "[)"))
    for name, taken in (("client-cpus", options.client_cpus), ("client-gpus", options.client_gpus)):
        require(not 0 < taken < LEAST, f"{name} must be 0 or at least {LEAST}, the least of Ray's; got {taken}")
    require(
        options.client_gpus >= 0 and (options.client_gpus <= 1 or options.client_gpus.is_integer()),
        f"client-gpus is a share of one GPU in [0, 1], or a whole number of them; got {options.client_gpus}",
    )
    require(options.record in RECORD, f"record must be {', '.join(RECORD)}; got {options.record!r}")
    within("", options, record_mb=Range(0, inf, "must be positive, in MB", "(]"))
    one_of("tracking", options.tracking, TRACKERS)
    one_of("split", options.split, ("test", "validation"))


def _refuse_beside(rule: str, options: Mapping[str, tuple[object, object]]) -> None:
    """Refuse options that have another value than the one given with them, which means that they are left out."""
    for option, (value, unset) in options.items():
        require(value == unset, f"{rule}; got {option}={value}: leave {option} out")
