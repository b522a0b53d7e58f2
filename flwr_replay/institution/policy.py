"""The institution's own rules: what it answers to, and what may leave.

The policy is a YAML file in the institution's hands:

    strategies: [fedreplay, cwt]              # methods that it takes part in
    kinds: [model, statistic, per-sample]     # kinds of field that may leave; notices always may. Raw examples, as
                                              # FedAvg+Share sends them, have a kind of their own: per-sample-raw.
                                              # Where the server chooses the encoder, per-sample is no safer: that
                                              # encoder may pass images on unchanged. See `weights`
    weights: {extract: [random]}              # by stage, the weights that it accepts. `random`: those that the run's
                                              # seed gives, drawn again here. Others by digest, as `flwr-replay privacy
                                              # digest FILE` prints it. The stages: `PINNED`; of summarise all but the
                                              # head. `random` never matches the last two, nothing matches no weights.
                                              # A stage that is not named accepts any. SplitNN's part is moved by the
                                              # server's gradients: no digest pins it. Latents from pinned weights can
                                              # still be inverted, exactly where a layer is wider than its input
    max-upload-mb: 64                         # the largest message that may leave, in 10^6 bytes
    max-epsilon: 8                            # all that depends on training examples must be differentially private,
                                              # with at most this epsilon in a run. The run then needs dp=end-to-end, or
                                              # dp=statistics, gradient or update of classes or a known label range,
                                              # and a budget within it; with noise=shared it is that of the sum.
                                              # Metrics of tests are not covered: see `metrics`. Several runs add up
    max-total-epsilon: 16                     # of all runs in this state directory; without max-epsilon also of one.
                                              # Their deltas: as often max-delta as max-epsilon goes into this
    max-delta: 1.0e-5                         # the largest delta; choose it far below one over the number of examples.
                                              # Default: 1e-5 where an epsilon has a limit, which says nothing without
    max-local-epsilon: 20                     # rows of single patients leave with dp=latents only, and all runs in this
                                              # state directory together have at most this epsilon for an example and
                                              # its label. It says nothing of encoders: see `kinds`
    metrics: counted                          # of tests. none | counted: numbers of examples and pixels | exact: losses
                                              # and scores too, from which crafted weights read single pixels. Training
                                              # losses leave with exact only. Default: exact, with max-epsilon counted
    max-evaluations: 1000                     # tests in one run; default: 10,000
    min-count: 10                             # no number of fewer examples leaves; default: 0, any leaves. Of a test
                                              # leave right and wrong answers, and no loss. What cannot be floored is
                                              # refused: rows, class sums, counts by class; not under an epsilon that
                                              # this file limits, whose noise hides them. Tests can be subtracted, and
                                              # the noise of many sums averages out: so max-evaluations is of tests in
                                              # all runs together, and of runs with such sums, by default 1. Weights
                                              # can tell counts, too; only max-epsilon bounds that
    recording: false                          # no run whose server says that it keeps messages; any other can, too
    sealed: true                              # no run in which a server could read weights: sealed=true only. What
                                              # sealing does not hide is in docs/sealed.md
    masked: true                              # no run in which a server, or one institution that helps it, could read
                                              # this one's weights alone: masked=true only. See docs/masked.md
    min-colluders: 2                          # where institutions share noise (noise=shared), how many of them may help
                                              # the server, or add no noise, without harm to the stated epsilon; the
                                              # server chooses privacy.colluders, 0 too
    limits: {epochs: 50}                      # the most that a server may ask for; defaults: `LIMITS`

A key that is left out forbids nothing, except that limits always hold. This package's ClientApp enforces the rules,
before any data are read wherever the question can be decided then. They bind no other code.
"""

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, get_args

from flwr_replay.config.catalogue import choices
from flwr_replay.config.hiding import Hiding
from flwr_replay.config.model import PARAMETERS
from flwr_replay.config.sections import BATCH, CHANNELS, CLASSES, PASSES, THREADS, VIEWS, WIDTH
from flwr_replay.config.strict_yaml import read_yaml
from flwr_replay.errors import ConfigError, RefusedError, nearest
from flwr_replay.payloads.common import Evaluation
from flwr_replay.state.spent import AllRuns
from flwr_replay.wire.fields import Field, Kind
from flwr_replay.wire.payload import Payload

__all__ = ["ADVICE", "ENCODING", "LIMITS", "RANDOM", "Policy", "read_policy"]

ENCODING = ("extract", "summarise")  # stages whose weights, or a frozen encoder, a policy may pin
PINNED = (*ENCODING, "encode-images", "train-generator", "keep-decoder", "train-prior", "keep-prior")
DIGEST = re.compile("sha256:[0-9a-f]{64}")
RANDOM = "random"  # of weights: those that the run's seed gives
DELTA = 1e-5  # the largest, where a policy limits epsilon and names none: a server would choose it up to one over |D|
METRICS = ("none", "counted", "exact")
EVALUATIONS = 10_000  # tests in a run
LIMITS: Mapping[str, float] = {  # what a server may ask for at most, by the last word of an option's name
    "epochs": PASSES,  # local, of encoders, generators, priors, private models
    "views": VIEWS,  # of each example
    "counts": 10_000_000,  # examples that are to be drawn from a prior
    "clip": 1e9,  # norms of features, latents, gradients
    "products": 10_000_000,  # of features, in sums
    "width": WIDTH,
    "parameters": PARAMETERS,  # of a model, all of it
    "dim": WIDTH,
    "layers": 100,
    "blocks": 100,
    "bins": CLASSES,
    "classes": CLASSES,
    "channels": CHANNELS,  # of an image; features of a row
    "size": BATCH,  # of an image, of a batch
    "threads": THREADS,
    "mb": 100_000,  # of memory, of a message
    "source": 10_000,  # the number of a prior
    "steps": 100_000_000,  # of a generator's training
    "latents": WIDTH,
    "mapping": 100,  # layers
    "buffer": 100_000,  # synthetic images
    "number": 10_000,  # of buffers that are kept
    "generators": 1000,  # in the state directory; each is of other options or images, and draws other images
    "round": 1_000_000_000,  # of the exchange; with buffer-refresh=round each has images of its own
}
ADVICE = "or ask the institution to change its policy file"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What an institution allows. None: everything."""

    strategies: tuple[str, ...] | None = None
    kinds: tuple[str, ...] | None = None
    weights: tuple[tuple[str, tuple[str, ...]], ...] = ()  # stage, digests or `random`
    max_upload_mb: float | None = None
    max_epsilon: float | None = None
    max_total_epsilon: float | None = None
    max_delta: float | None = None
    max_local_epsilon: float | None = None
    metrics: str | None = None
    max_evaluations: int = EVALUATIONS
    min_count: int = 0  # examples; see `flwr_replay.institution.floor`
    recording: bool = True
    sealed: bool = False
    masked: bool = False
    min_colluders: int = 0
    limits: tuple[tuple[str, float], ...] = tuple(LIMITS.items())

    def check_strategy(self, strategy: str) -> None:
        """Refuse a strategy that is not allowed."""
        if self.strategies is not None and strategy not in self.strategies:
            raise RefusedError(
                f"policy allows strategies {', '.join(self.strategies) or 'none'}; the server runs {strategy!r}: "
                f"choose an allowed strategy {ADVICE}"
            )

    def check_recording(self, kept: str) -> None:
        """Refuse a run whose server says that it keeps messages: `up` or `all`; `none` or an empty text is allowed."""
        if not self.recording and kept not in ("", "none"):
            raise RefusedError(
                f"policy allows no run that keeps messages (recording: false); the server says record={kept[:40]}: "
                f"leave record out {ADVICE}"
            )

    def check_hidden(self, way: Hiding, hiding: Hiding) -> None:
        """Refuse a run in which the server could read weights, where they must be `sealed`, or `masked`.

        Masked is more: in a sealed run one institution could read weights and show them to the server.
        """
        if getattr(self, way) and hiding is not way:
            raise RefusedError(
                f"policy asks for a {way} run ({way}: true); the server's says {way}=false: set {way}=true {ADVICE}"
            )

    def check_colluders(self, colluders: int) -> None:
        """Refuse shared noise that holds against fewer institutions that help the server."""
        if colluders < self.min_colluders:
            raise RefusedError(
                f"policy asks for noise that {self.min_colluders} institutions may lack or give away (min-colluders); "
                f"the run says privacy.colluders={colluders}: choose more {ADVICE}"
            )

    def check_limits(self, asked: Mapping[str, Any]) -> None:
        """Refuse more than a server may ask for, in options or instructions by name; of a list the sum counts."""
        limits = dict(self.limits)
        for name, value in asked.items():
            most = limits.get(name.replace("_", "-").replace(".", "-").rpartition("-")[2])
            numbers = value if isinstance(value, (list, tuple)) else [value]
            if most is None or not all(isinstance(number, (int, float)) for number in numbers):
                continue
            if not sum(numbers) <= most or any(number < 0 for number in numbers):
                raise RefusedError(
                    f"policy lets a server ask for {name.replace('_', '-')} from 0 to {most:g}; got {sum(numbers):g}: "
                    f"ask for less {ADVICE} (limits)"
                )

    def check_release(
        self, answer: type[Payload], promise: Callable[[type[Payload], Field], float] | None = None
    ) -> None:
        """Refuse a payload with a declared field that may not leave.

        `promise` gives the largest epsilon that a field can have in this run. None: the run has no differential
        privacy.
        """
        if issubclass(answer, Evaluation) and self.allowed_metrics == "none":
            raise RefusedError(f"policy lets no metrics leave; a test was asked for: evaluate elsewhere, {ADVICE}")
        for name, field in answer.declared().items():
            self.check_field(f"{answer.__name__}.{name}", field.kind, promise(answer, field) if promise else math.inf)

    def check_field(self, name: str, kind: Kind, epsilon: float = math.inf) -> None:
        """Refuse a field by its kind or its epsilon."""
        if kind == "notice":
            return
        if self.kinds is not None and kind not in self.kinds:
            raise RefusedError(
                f"policy lets fields of kind {', '.join(self.kinds) or 'none'} leave; {name} is {kind}: "
                f"choose a strategy that shares less {ADVICE}"
            )
        shown = f"epsilon {epsilon:g}" if math.isfinite(epsilon) else "no differential privacy (epsilon = inf)"
        if self.max_epsilon is not None and epsilon > self.max_epsilon:
            raise RefusedError(
                f"policy asks for epsilon <= {self.max_epsilon:g}; {name} has {shown}: "
                f"choose a differentially private setting {ADVICE}"
            )
        most = math.inf if self.max_local_epsilon is None else self.max_local_epsilon
        if kind.startswith("per-sample") and epsilon > most:
            raise RefusedError(
                f"policy lets rows of single patients leave with local epsilon <= {most:g}; {name} has {shown}: "
                f"choose dp=latents with less {ADVICE}"
            )

    def check_local(self, epsilon: float) -> None:
        """Refuse an upload of latents with which all runs together would have too large an epsilon."""
        if self.max_local_epsilon is not None and epsilon > self.max_local_epsilon:
            raise RefusedError(
                f"policy lets latents of all runs have local epsilon <= {self.max_local_epsilon:g} together; with this "
                f"run they would have {epsilon:.4g}: ask for less {ADVICE}"
            )

    def check_delta(self, delta: float) -> None:
        """Refuse a delta that is too large."""
        if self.max_delta is not None and delta > self.max_delta:
            raise RefusedError(
                f"policy asks for delta <= {self.max_delta:g}; the run has {delta:.2g}: lower privacy.delta {ADVICE}"
            )

    def check_evaluations(self, made: int) -> None:
        """Refuse one more test than a run may have."""
        if made >= self.max_evaluations:
            raise RefusedError(
                f"policy allows {self.max_evaluations:,} tests in a run; they are used up: evaluate less often {ADVICE}"
            )

    def check_weights(self, stage: str, actual: str, random: Callable[[], str]) -> None:
        """Refuse weights that the policy does not accept for a stage, by their digest; it is empty for no weights.

        `random` computes that of the weights that follow from the run's seed.
        """
        allowed = dict(self.weights).get(stage)
        if allowed is None or actual in allowed or (RANDOM in allowed and actual == random()):
            return
        look = "have the institution look at them and add their digest to its policy file"
        raise RefusedError(
            f"policy lets stage {stage} take weights {', '.join(allowed) or 'none'}; got {actual or 'no weights'}: "
            + (look if actual else "freeze the encoder, model.train=head, and it has a digest")
        )

    def check_upload(self, size: int, what: str) -> None:
        """Refuse a message of more bytes than may leave at once."""
        if self.max_upload_mb is not None and size > self.max_upload_mb * 1e6:
            raise RefusedError(
                f"policy lets at most {self.max_upload_mb:g} MB leave in one message; {what} has {size / 1e6:.3g} MB: "
                "choose a smaller model (FedReplay: strategy.chunk-mb), or ask the institution to change its policy"
            )

    def all_runs(self, state: Path) -> AllRuns:
        """Return the sum of all runs in a state directory, with the most that it may come to."""
        if self.max_total_epsilon is None:
            return AllRuns(state)
        times = self.max_total_epsilon / (self.max_epsilon or self.max_total_epsilon or 1)
        return AllRuns(state, self.max_total_epsilon, times * (math.inf if self.max_delta is None else self.max_delta))

    @property
    def allowed_metrics(self) -> str:
        """Which results of a test may leave: none, counted or exact."""
        return self.metrics or ("exact" if self.max_epsilon is None and not self.min_count else "counted")


def read_policy(path: Path | None) -> Policy:
    """Read a policy file. No file allows everything; a faulty file is an error and allows nothing.

    Raises
    ------
    ConfigError
        If the file is missing or empty, is not YAML as `read_yaml` takes it, or has unknown keys or values.
    """
    if path is None:
        return Policy()
    known = {field.name.replace("_", "-"): field.name for field in fields(Policy)}
    content = read_yaml(path, "the policy file")
    if not content:  # a full disk leaves such a file; it must not allow everything
        raise ConfigError(f"the policy file must hold keys {', '.join(known)}; got none in {path}: write one")
    values: dict[str, Any] = {}
    for key, value in content.items():
        what = f"{key} in line {content.lines[key]} of the policy file {path}"
        if key not in known:
            raise ConfigError(f"unknown key {what}: {nearest(key, known)}")
        read: Callable[[object, str], Any] = READ.get(key, _number)
        values[known[key]] = read(value, what)
    if "max_total_epsilon" in values:  # without it, what has no epsilon would pass by
        values.setdefault("max_epsilon", values["max_total_epsilon"])
    if values.keys() & {"max_epsilon", "max_local_epsilon"}:
        values.setdefault("max_delta", DELTA)
    if values.get("min_count"):
        values.setdefault("max_evaluations", 1)
        if values.get("metrics") == "exact":
            raise ConfigError(f"min-count goes with metrics: none or counted; exact losses tell counts: see {path}")
    return Policy(**values)


def _number(value: object, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        raise ConfigError(f"{what} must be a number, finite and not below 0; got {value!r}")
    return value


def _whole(value: object, what: str) -> float:
    if int(number := _number(value, what)) != number:
        raise ConfigError(f"{what} must be a whole number; got {value!r}")
    return int(number)


def _delta(value: object, what: str) -> float:
    if (number := _number(value, what)) >= 1:
        raise ConfigError(f"{what} must be a probability, far below one over the number of examples; got {value!r}")
    return number


def _names(value: object, what: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{what} must be a list of names; got {value!r}")
    return tuple(value)


def _chosen(known: Callable[[], Iterable[str]], value: object, what: str) -> tuple[str, ...]:
    for name in (named := _names(value, what)):
        if name not in known():  # a mistyped one would allow less, or another, than was meant
            raise ConfigError(f"unknown name {name!r} under {what}: {nearest(name, known())}")
    return named


def _metrics(value: object, what: str) -> str:
    if value not in METRICS:
        raise ConfigError(f"{what} must be {', '.join(METRICS)}; got {value!r}")
    return str(value)


def _mapping(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{what} must hold names with values; got {value!r}")
    return value


def _flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{what} must be true or false; got {value!r}")
    return value


def _weights(value: object, what: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    for stage, allowed in _mapping(value, what).items():
        if stage not in PINNED:  # a mistyped one would pin nothing
            raise ConfigError(f"unknown stage {stage!r} under {what}: {nearest(stage, PINNED)}")
        for pinned in _names(allowed, f"{stage} under {what}"):
            if pinned != RANDOM and not DIGEST.fullmatch(pinned):
                raise ConfigError(f"{stage} under {what} must be {RANDOM} or sha256: and 64 digits; got {pinned!r}")
    return tuple((stage, _names(allowed, f"{stage} under {what}")) for stage, allowed in _mapping(value, what).items())


def _limits(value: object, what: str) -> tuple[tuple[str, float], ...]:
    own = _mapping(value, what)
    for name in own:
        if name not in LIMITS:
            raise ConfigError(f"unknown limit {name!r} under {what}: {nearest(name, LIMITS)}")
    return tuple({**LIMITS, **{name: _number(most, f"{name} under {what}") for name, most in own.items()}}.items())


READ: Mapping[str, Callable[[object, str], Any]] = {
    "strategies": partial(_chosen, partial(choices, "strategy")),
    "kinds": partial(_chosen, partial(get_args, Kind)),
    "max-delta": _delta,
    "max-evaluations": _whole,
    "min-count": _whole,
    "min-colluders": _whole,
    "weights": _weights,
    "metrics": _metrics,
    "recording": _flag,
    "sealed": _flag,
    "masked": _flag,
    "limits": _limits,
}
