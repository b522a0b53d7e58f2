"""What can be set: frozen dataclasses, validated on construction.

YAML under `conf/` chooses among them; its keys equal the field names here. A strategy's own options are the
`<Name>Config` dataclass of its file in `strategies/`.
"""

import re
import unicodedata
from dataclasses import dataclass, fields
from math import inf, isfinite
from typing import ClassVar, Self

from flwr_replay.config.own_code import is_own
from flwr_replay.errors import ConfigError, near_matches, nearest

__all__ = [
    "BATCH",
    "CHANGES",
    "CLASSES",
    "FRACTION",
    "LABEL",
    "NOT_NEGATIVE",
    "NOT_NEGATIVE_FINITE",
    "PASSES",
    "POSITIVE",
    "SHARE",
    "VIEWS",
    "WHOLE",
    "GeneratorConfig",
    "Named",
    "PartitionConfig",
    "PriorConfig",
    "Range",
    "ReplayConfig",
    "TaskConfig",
    "TrainingConfig",
    "bare",
    "check_own",
    "one_of",
    "require",
    "spelled",
    "within",
]

# Upper limits, far above any use, within a machine's memory, threads and time. An institution composes the options that
# a server sends, so these also limit what a server can ask for. The institution's policy may allow less.
BATCH = 1_000_000  # examples
BUFFER = 100_000  # images
CHANNELS = 65_536  # of an input: a table's features, a bag's vectors
CLASSES = 4_096  # a confusion matrix has their square
LABEL, APART = 1e12, 1e-6  # a regression's largest label, and its range at least, in the label's unit
EXAMPLE = 2**26  # numbers of an input, channels x size x size
NODES = 10_000
PASSES = 1_000_000  # epochs
ROUNDS = 1_000_000
SECONDS = 366 * 86_400.0  # of waiting
THREADS = 256  # if more cannot be started, OpenMP ends the process without a message
VIEWS = 1_000  # uploads of one image
WIDTH = 4_096  # channels of a model's first stage; some models double it with every stage


def require(rule: bool, message: str) -> None:
    """Raise `ConfigError` with `message` unless the rule holds."""
    if not rule:
        raise ConfigError(message)


class Named:
    """Base of the dataclasses that a user's own app makes: a misspelt argument is a `ConfigError`."""

    def __new__(cls, *values: object, **named: object) -> Self:
        """Refuse arguments without a name, and names that the dataclass does not have."""
        known: list[str] = [option.name for option in fields(cls)]  # type: ignore[arg-type]
        for name in named.keys() - known:
            raise ConfigError(f"{cls.__name__} has no {name}=: {nearest(name, known)}")
        require(not values, f"{cls.__name__} takes its arguments by name; got {values!r:.80}")
        return super().__new__(cls)


def one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    """Raise `ConfigError` with near matches unless `value` is one of `known`."""
    if value not in known:
        hint = near_matches(value, known) or "choose one of these"
        shown = ", ".join(name or "'' (empty)" for name in known)
        raise ConfigError(f"{option} must be one of {shown}; got {value!r}: {hint}")


@dataclass(frozen=True)
class Range:
    """Numbers between two ends, and the rule that an error states; NaN is not included."""

    low: float
    high: float
    rule: str
    ends: str = "[]"  # ( instead of [: without low; ) instead of ]: without high

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.ends[0] == "(" else value >= self.low
        below = value < self.high if self.ends[1] == ")" else value <= self.high
        return above and below


POSITIVE = Range(0, inf, "must be positive and finite", "()")
NOT_NEGATIVE = Range(0, inf, "must not be negative")
NOT_NEGATIVE_FINITE = Range(0, inf, "must be finite and not negative", "[)")
FRACTION = Range(0, 1, "lies in [0, 1)", "[)")
SHARE = Range(0, 1, "is a share in (0, 1]", "(]")


def within(prefix: str, config: object, **ranges: Range | tuple[float, float]) -> None:
    """Raise `ConfigError` unless each named number of a configuration lies in its range, or between its two numbers."""
    for name, known in ranges.items():
        value = getattr(config, name)
        option = f"{prefix}{name}".replace("_", "-")
        if isinstance(known, Range):
            require(value in known, f"{option} {known.rule}; got {value}")
            continue
        low, high = known
        require(value >= low, f"{option} must be at least {low}; got {value}")
        require(value <= high, f"{option} must be at most {high}; got {value}")


WHOLE = re.compile(r"([+-]?)0*([0-9]+)(?:\.0*)?")  # spreadsheets write 1 as 1.0, and 01


def spelled(label: str) -> str:
    """Return the one spelling of a label or a class's name: whole numbers as integers, other text as Unicode's NFC.

    >>> [spelled(label) for label in (" 1", "01", "1.0", "-0", "1.5")]
    ['1', '1', '1', '0', '1.5']
    """
    text = unicodedata.normalize("NFC", label).strip()
    if not (whole := WHOLE.fullmatch(text)):
        return text
    sign, digits = whole.groups()
    return f"-{digits}" if sign == "-" and digits != "0" else digits


def bare(name: str) -> str:
    """Return what is left of a name without capitals, spaces, hyphens and invisible characters."""
    text = "".join(letter for letter in unicodedata.normalize("NFKC", name) if unicodedata.category(letter) != "Cf")
    return re.sub(r"(?<=\w)[\s_-]+(?=\w)", "", spelled(text).casefold())


def check_own(group: str, name: str, code: str) -> None:
    """Raise `ConfigError` unless the choice `own` of a group comes with its function."""
    require(name != "own" or is_own(code), f"{group}=own needs its function: {group}={FUNCTION}; got {code!r}")


CHANGES = ("flip", "rot90", "rotate", "shift", "crop")
FUNCTION = "package.module:function"


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """A data set, and the task learned from it."""

    name: str
    kind: str = "classification"  # classification | regression | segmentation
    format: str  # which reader in flwr_replay.data.datasets
    load: str = ""  # own: package.module:function
    data_dir: str = ""  # a folder, or one .npz file; empty: the data come with a Python package
    download: bool = False  # allow downloading the data?
    channels: int  # of an image; a table's features
    size: int  # height and width of an image, pixels; a table's rows have 1
    fit: str = "exact"  # images of another size: pad | crop | stretch | crop-cubic | stretch-cubic | exact: refuse them
    classes: int = 1  # classification: C >= 2; otherwise 1
    mean: tuple[float, ...] = ()  # per channel of images in [0, 1]: models subtract it; empty: nothing
    std: tuple[float, ...] = ()  # per channel: models divide by it; use public numbers, those of the data reveal them
    unit: str = ""  # regression: the unit of the label
    label_range: tuple[float, ...] = ()  # regression: bounds that labels are clipped to and scaled by; empty: by sums
    class_names: tuple[str, ...] = ()  # classes of a manifest or folder, in the order of the labels; empty: sorted
    class_groups: tuple[str, ...] = ()  # a group for each class, for accuracy within groups; empty: no groups
    site_column: str = "site"  # the manifest's column that names the institution
    train_size: int = 0  # clinical sets: subjects to train on; 0: all that remain
    val_size: int = 0  # clinical sets: subjects to validate on
    test_size: int = 0  # clinical sets: subjects to test on; 0: the set's own test split, else one in five
    validation: bool = False  # by split=validation: hold out training examples where the data have no validation split
    balanced: bool = False  # as many examples of every class; retina: in every split, tuberculosis and isic: in tests

    def __post_init__(self) -> None:
        one_of("task.kind", self.kind, ("classification", "regression", "segmentation"))
        one_of("task.fit", self.fit, ("pad", "crop", "stretch", "crop-cubic", "stretch-cubic", "exact"))
        check_own("task", self.name, self.load)
        require(
            self.kind == "classification" or self.format not in ("folder", "bags"),
            f"task={self.name} has classes only; got task.kind={self.kind}: read images with numbers or masks by a "
            f"function of your own, task={FUNCTION}",
        )
        within("task.", self, channels=(1, CHANNELS), size=(1, int(EXAMPLE**0.5)))
        require(
            self.channels * self.size**2 <= EXAMPLE,
            f"task.channels x task.size x task.size must be at most {EXAMPLE:,}; got {self.channels} x {self.size} "
            f"x {self.size}",
        )
        within("task.", self, train_size=NOT_NEGATIVE, val_size=NOT_NEGATIVE, test_size=NOT_NEGATIVE)
        require(
            all(map(isfinite, (*self.mean, *self.std))),
            f"task.mean and task.std must be finite numbers; got {list(self.mean)} and {list(self.std)}",
        )
        require(
            len(self.mean) == len(self.std) and len(self.mean) in (0, self.channels) and all(s > 0 for s in self.std),
            f"task.mean and task.std go together, one positive std for each of {self.channels} channels; got "
            f"{list(self.mean)} and {list(self.std)}",
        )
        require(
            not self.mean or (self.size > 1 and self.format != "bags"),
            f"task.mean and task.std are for images; task={self.name} has none: leave them out",
        )
        bounds = self.label_range
        require(
            not bounds
            or (self.kind == "regression" and len(bounds) == 2 and -LABEL <= bounds[0] <= bounds[1] - APART <= LABEL),
            "task.label-range is the lowest and the highest label of a regression, public numbers such as [0,228]; got "
            f"{list(bounds)} for task.kind={self.kind}",
        )
        if self.kind == "classification":
            within("task.", self, classes=(2, CLASSES))
        else:
            require(self.classes == 1, f"task.classes is 1 where task.kind={self.kind}; got {self.classes}")
        require(
            len(set(map(spelled, self.class_names))) == len(self.class_names),
            f"task.class-names must differ by more than spelling; got {', '.join(self.class_names)}",
        )
        for option, named in (("class-names", self.class_names), ("class-groups", self.class_groups)):
            rule = f"task.{option} must have a name for each of {self.classes} classes; got {len(named)}"
            require(len(named) in (0, self.classes), rule)


@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    """How one data set is split among simulated institutions."""

    name: str
    p: float = 0.8  # majority: the share of the major class
    majors: str = "distinct"  # majority: distinct | random
    rest: str = "as-left"  # majority: as-left: at random from what the majors leave | uniform: as many of every class
    ks: float = 0.9  # ks: target mean pairwise Kolmogorov-Smirnov statistic
    drop: bool = False  # ks: allow leaving out examples of the most frequent class to reach the target?
    alpha: float = 0.5  # dirichlet: concentration
    shares: tuple[str, ...] = ()  # shares: a row for each institution, a share for each class
    file: str = ""  # shares: a CSV file in place of the list | index: who owns which example
    deal: str = ""  # own: package.module:function, which deals
    size: int = 0  # examples per institution; 0: as many as possible
    test: str = "iid"  # iid: each test shard is a sample of all; mirror: it has its institution's label distribution
    contrast: float = 0.0  # scale the contrast of institution 1..K's images by 1 - contrast .. 1 + contrast

    def __post_init__(self) -> None:
        one_of("partition.name", self.name, ("iid", "majority", "ks", "natural", "dirichlet", "shares", "index", "own"))
        check_own("partition", self.name, self.deal)
        one_of("partition.majors", self.majors, ("distinct", "random"))
        one_of("partition.rest", self.rest, ("as-left", "uniform"))
        one_of("partition.test", self.test, ("iid", "mirror"))
        within("partition.", self, p=SHARE, ks=Range(0, 1, "is a statistic in [0, 1]"), alpha=POSITIVE)
        within("partition.", self, size=NOT_NEGATIVE, contrast=FRACTION)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Named):
    """How models are trained, at institutions and at the server (Qu et al. 2022, section 4.1: SGD, 0.001, batch 32)."""

    optimizer: str = "sgd"  # sgd | adam
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch_size: int = 32
    batch_sizes: tuple[int, ...] = ()  # of the institutions, by turns; empty: batch_size
    batches: str = "shuffled"  # shuffled | balanced: classes are drawn equally often (Alhamoud et al. 2024)
    augment: str = "none"  # none, or some of flip, rot90, rotate, shift, crop, with commas between
    lr_step: int = 0  # rounds after which the learning rate is divided by ten; 0: never (paper: 35)

    def __post_init__(self) -> None:
        one_of("training.optimizer", self.optimizer, ("sgd", "adam"))
        one_of("training.batches", self.batches, ("shuffled", "balanced"))
        for change in self.changes:
            one_of("training.augment", change, ("none", *CHANGES))
        require("none" not in self.changes, f"training.augment=none stands alone; got {self.augment!r}: leave it out")
        require(
            len(set(self.changes)) == len(self.changes),
            f"training.augment names every change once; got {self.augment!r}: leave one out",
        )
        for size in self.batch_sizes:
            require(1 <= size <= BATCH, f"training.batch-sizes must lie in 1 to {BATCH:,}; got {size}")
        within("training.", self, lr=POSITIVE, momentum=FRACTION, weight_decay=NOT_NEGATIVE_FINITE)
        within("training.", self, batch_size=(1, BATCH), lr_step=NOT_NEGATIVE)

    @property
    def changes(self) -> tuple[str, ...]:
        """The random changes of training images; those of older versions have + between."""
        return () if self.augment == "none" else tuple(self.augment.replace("+", ",").split(","))


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Replayed examples, which represent the other institutions in every batch (Qu et al. 2022, Algorithm 1)."""

    name: str = "none"  # none | vqvae2: codes of images | pixelcnn: drawn codes | buffer: images | statistics: features
    codes: str = "paper"  # vqvae2: paper: encoded at every visit | last-pass: and once at the end | stale: encoded once
    ratio: float = 1.0  # replayed examples for each real one in a batch; paper: 1
    images: int = 512  # buffer: images that every institution draws from its generator
    cache_mb: float = 512.0  # memory for decoded images, 10^6 bytes; images beyond it are decoded at every draw
    clip: float = 10.0  # statistics: C, the largest L2 norm of an image's features
    missing: str = "stop"  # if an institution's images are not replayed in the last round: stop the run | say so

    def __post_init__(self) -> None:
        one_of("replay.name", self.name, ("none", "vqvae2", "pixelcnn", "buffer", "statistics"))
        one_of("replay.codes", self.codes, ("paper", "last-pass", "stale"))
        one_of("replay.missing", self.missing, ("stop", "say"))
        within("replay.", self, ratio=Range(0, 100, "lies in (0, 100]", "(]"), cache_mb=NOT_NEGATIVE_FINITE)
        within("replay.", self, images=(1, BUFFER), clip=Range(1e-6, 1e6, "lies in [1e-6, 1e6]"))

    def num_replayed(self, batch_size: int, held: int) -> int:
        """Return the number of replayed examples beside b real ones; where fewer are held, all of them, once."""
        return min(max(1, round(self.ratio * batch_size)), held)


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """Base of every generator's `<Name>Config`, which lies in `flwr_replay.generators.<name>`, with what all have."""

    draws_with: ClassVar[tuple[str, ...]] = ("generator",)  # mechanisms on which an image drawn for a label depends
    length: ClassVar[str] = "generator.epochs"  # the options that say how long an institution trains it

    name: str
    lr: float  # of Adam
    batch_size: int = 32
    checkpoint: str = (
        ""  # where each institution has its own: a trained one's file, or a folder with <institution>.safetensors
    )
    classes: tuple[str, ...] = ()  # which institutions draw, by turns: "all" or numbers; empty: those that they have
    piece_steps: int = 500  # where each institution trains its own: steps in a piece, at most
    piece_seconds: float = 300.0  # of a piece, also of a prior's training: then the message is answered; below timeout

    def __post_init__(self) -> None:
        within("generator.", self, batch_size=(1, BATCH), lr=POSITIVE, piece_steps=(1, BATCH), piece_seconds=POSITIVE)

    def check_classes(self, declared: str, classes: int, option: str = "generator.classes") -> None:
        """Refuse what names no classes of a task that has so many."""
        numbers = declared.split()
        require(
            declared == "all"
            or (bool(numbers) and all(n.isascii() and n.isdecimal() and int(n) < classes for n in numbers)),
            f"{option} is all, or numbers below {classes} with spaces between; got {declared!r}",
        )

    @property
    def keeps_distance(self) -> bool:
        """Whether a loss keeps its images away from real ones, by a margin that is measured."""
        return False

    @property
    def dp_passes(self) -> int:
        """How many passes DP-SGD makes over an institution's images."""
        return 0

    @property
    def dp_steps(self) -> int:
        """How many steps DP-SGD makes, where they are no passes."""
        return 0

    @property
    def dp_fault(self) -> str:
        """Why DP-SGD cannot train it, and what to do; empty if it can."""
        return f"generator={self.name} has no training by DP-SGD: choose generator=vqvae2"


@dataclass(frozen=True, kw_only=True)
class PriorConfig:
    """Base of every prior's `<Name>Config`, which lies in `flwr_replay.generators.<name>`, with what all have.

    A prior draws new codes in place of codes of real images (Qu et al. 2022, footnote 1).
    """

    # seconds of a core for an image of 256 pixels, with conf/prior and conf/generator: to train once, and to draw
    cpu_seconds: ClassVar[tuple[float, float]]

    name: str
    bins: int = 10  # regression: bins of labels, over three standard deviations to either side of their mean
    lr: float = 3e-3  # of Adam
    batch_size: int = 32
    epochs: int = 12  # at each institution
    cpu_size: int = 128  # pixels: the largest images whose prior is trained on a CPU

    def __post_init__(self) -> None:
        within("prior.", self, bins=(1, CLASSES), cpu_size=(1, int(EXAMPLE**0.5)))
        within("prior.", self, batch_size=(1, BATCH), epochs=(1, PASSES), lr=POSITIVE)
