"""Which mechanisms of a run are trained under DP, what they cost an institution, and which claims follow."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import inf, isfinite, sqrt
from typing import Any, NamedTuple, Self

from flwr_replay.config.privacy import ON_SUMS, PrivacyConfig, some_of
from flwr_replay.config.run import RunConfig
from flwr_replay.config.sections import require
from flwr_replay.errors import BudgetError, ConfigError, PrivacyError, WireError
from flwr_replay.payloads.common import Evaluation
from flwr_replay.privacy.accounting import SampledGaussian, epsilon, noise_for, rounded_up
from flwr_replay.privacy.fitting import check_fit, mechanisms_wanted, trains_encoder
from flwr_replay.privacy.gaussian import gaussian_epsilon, gaussian_noise
from flwr_replay.privacy.local import LATENTS, LocalDP
from flwr_replay.privacy.shares import step_of
from flwr_replay.wire.fields import Field
from flwr_replay.wire.masked import MASKED
from flwr_replay.wire.payload import LedgerRow, Payload
from flwr_replay.wire.sealed import SEALED

__all__ = ["COUNTS", "GRADIENT", "STATISTICS", "UPDATE", "Passes", "PrivacyPlan"]

NO_PROOF = " as the paper counts it; not a proof"
COUNTS = "label counts"  # released together with a prior, with noise of their own
STATISTICS, GRADIENT, UPDATE = ON_SUMS  # mechanisms: noise on sums over all examples, once, or in every round


class Passes(NamedTuple):
    """How long DP-SGD trains a mechanism in the whole run, and with which b."""

    mechanism: str
    epochs: int
    batch: int  # 0: all examples
    steps: int = 0  # in place of those of the epochs, however many examples there are

    def cost(self, examples: int, sigma: float) -> SampledGaussian:
        """Return the cost of the whole training."""
        batch = self.batch or examples
        cost = SampledGaussian.of_epochs(examples=examples, batch=batch, sigma=sigma, epochs=self.epochs)
        return replace(cost, steps=self.steps) if self.steps else cost

    def in_share(self, share: float) -> Self:
        """Return those of an institution that trains in a share of the rounds; what is trained before is not less."""
        by_round = self.mechanism in ("classifier", "proxy", GRADIENT, UPDATE)
        return self._replace(epochs=round(share * self.epochs)) if by_round else self


@dataclass(frozen=True)
class PrivacyPlan:
    """The mechanisms that a run trains under DP.

    Attributes
    ----------
    passes : tuple of Passes
        Of every mechanism that is trained by DP-SGD.
    unproven : str
        Why the computed epsilon is no proven bound; empty: it is one.
    pooled : bool
        Whether one institution trains on the examples of all, in a simulation.
    counted : bool
        Whether label counts are released together with a prior.
    tests_own : bool
        Whether tests are of models that institutions train on their examples without noise, and keep.
    replays_codes : bool
        Whether institutions learn from codes of each other's images.
    local : LocalDP | None
        With dp=latents, what each example releases of itself; then nothing is trained by DP-SGD.
    end_to_end : bool
        Whether all that leaves and depends on training examples is covered, but for metrics of tests.
    institutions, colluders, dropouts : int
        With noise=shared, how many there are, how many of these may help the server or add none, and how many may be
        missing from a sum; else 0.
    """

    config: PrivacyConfig
    passes: tuple[Passes, ...]
    unproven: str = ""
    pooled: bool = False
    counted: bool = False
    tests_own: bool = False
    replays_codes: bool = False
    local: LocalDP | None = None
    end_to_end: bool = False
    institutions: int = 0
    colluders: int = 0
    dropouts: int = 0

    @classmethod
    def of(cls, config: RunConfig) -> Self | None:
        """Read a run's configuration; None where nothing is trained under DP.

        Raises
        ------
        ConfigError
            If the run does not train a mechanism, cannot train it under DP as it is configured, or the strategy does
            not declare how many passes it makes. These are never guessed.
        """
        privacy, strategy = config.privacy, config.strategy
        wanted = mechanisms_wanted(config)
        declared = {name: epochs for name, epochs in strategy.dp_passes(config.rounds).items() if epochs >= 1}
        declared |= {STATISTICS: 1} if config.replay.name == "statistics" else {}
        require(
            bool(wanted) or privacy.limit == inf,
            f"a budget is for training under DP; got epsilon {privacy.limit:g} and dp=none: choose dp=proxy "
            "(ProxyFL, FML) or dp=classifier, or set privacy.epsilon=0 privacy.target-epsilon=0, which a preset may "
            "have set",
        )
        if not wanted:
            return None
        check_fit(config, wanted)
        passes = {k: Passes(k, n, 0 if k in ON_SUMS else config.training.batch_size) for k, n in declared.items()}
        generator, prior = config.generator, config.prior
        passes["generator"] = Passes("generator", generator.dp_passes, generator.batch_size, generator.dp_steps)
        passes["prior"] = Passes("prior", prior.epochs, prior.batch_size)
        possible = [*(generator.draws_with if strategy.traits.draws_images else ()), *declared]
        _refuse_untrained(strategy.name, [name for name in wanted if name not in passes], possible)
        require(
            "proxy" not in wanted or strategy.unproven is not None,
            f"a proxy may learn from a model trained without noise, and then its epsilon is not proven; "
            f"{type(strategy).__name__} does not say so or otherwise: let it declare `unproven`",
        )
        if LATENTS in wanted:
            epsilons = privacy.latent_epsilon, privacy.label_epsilon
            trained = "encoder" in declared and trains_encoder(config)
            local = LocalDP(privacy.latent_clip, *epsilons, declared[LATENTS], config.task.classes, trained)
            return cls(privacy, (), local=local)
        return cls(
            privacy,
            tuple(passes[name] for name in wanted),
            (strategy.unproven or "") if "proxy" in wanted else "",
            strategy.traits.pooled,
            counted="prior" in wanted and config.replay.name == "pixelcnn",
            tests_own=strategy.classifiers == "kept" or bool(strategy.traits.private_key),
            replays_codes=config.replay.name in ("vqvae2", "pixelcnn"),
            institutions=config.nodes * (privacy.noise == "shared"),
            colluders=config.colluders * (privacy.noise == "shared"),
            dropouts=privacy.dropouts,
            end_to_end=config.end_to_end,
        )

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """All that is trained by DP-SGD, or the latents that get noise."""
        return (LATENTS,) if self.local else tuple(passes.mechanism for passes in self.passes)

    def covers(self, mechanism: str) -> bool:
        """Return whether a mechanism's releases are under DP; label counts belong to the prior."""
        return self.counted if mechanism == COUNTS else mechanism in self.mechanisms

    def covering(self, named: str) -> str:
        """Return which of the mechanisms that a field names, joined by +, is on; empty: none."""
        return next((mechanism for mechanism in named.split("+") if self.covers(mechanism)), "")

    def check_method(self, strategy: str, mechanisms: Sequence[str]) -> None:
        """Refuse what is not among the mechanisms that a method trains by DP-SGD: it would wrongly be labelled so."""
        _refuse_untrained(strategy, [name for name in self.mechanisms if name not in mechanisms], mechanisms)

    def counts(self) -> SampledGaussian:
        """Return the cost of noisy label counts: adding an example changes one count by one."""
        return SampledGaussian(1.0, self.config.count_sigma, 1)

    def cost(self, mechanism: str, examples: int, epochs: int) -> SampledGaussian:
        """Return the cost of some epochs of a mechanism at an institution with this number of examples."""
        passes = next(passes for passes in self.passes if passes.mechanism == mechanism)
        return passes._replace(epochs=epochs, steps=0).cost(examples, _sigma(self, examples))

    @property
    def accountant(self) -> str:
        """The accountant of an institution's releases: rdp where a server may choose which of several come next."""
        return "rdp" if len(self.passes) + self.counted > 1 else "prv"

    @property
    def honest(self) -> int:
        """How many shares make up the noise of a sum; 1: an institution's own is all of it."""
        return self.institutions - self.colluders - self.dropouts or 1

    def share(self, mechanism: str, examples: int) -> float:
        """Return the noise that an institution adds to its sums, in units of their sensitivity."""
        return self.cost(mechanism, examples, 1).sigma / sqrt(self.honest)

    def step(self, mechanism: str, examples: int, numbers: int) -> float:
        """Return what a step of an answer's whole numbers is worth, with shared noise; units as of `share`."""
        return step_of(self.cost(mechanism, examples, 1).sigma, self.honest, numbers)

    def check_room(self, numbers: int) -> None:
        """Refuse, as `step` does, noise that leaves no room for so many numbers."""
        for mechanism in self.mechanisms:
            self.step(mechanism, 1, numbers)

    def alone(self, epsilon: float, delta: float) -> float:
        """Return the epsilon of one institution's messages without masks, where that of the sums is this one."""
        return gaussian_epsilon(sqrt(self.honest) / gaussian_noise(epsilon, delta), delta)

    def among(self, epsilon: float, delta: float) -> float:
        """Return the epsilon of the sums against another institution: with colluders=0 its own share hides nothing."""
        others = max(1, self.honest - (not self.colluders))
        return gaussian_epsilon(sqrt(self.honest / others) / gaussian_noise(epsilon, delta), delta)

    def planned(self, examples: int, share: float = 1.0) -> tuple[float, float]:
        """Return epsilon and delta, as its account states them, of an institution that stays to the end.

        Parameters
        ----------
        examples : int
            |D|, its training examples.
        share : float
            Of the rounds in which it trains a classifier.
        """
        delta = self.config.delta_for(examples)
        costs = [passes.in_share(share).cost(examples, _sigma(self, examples)) for passes in self.passes]
        costs += [self.local.cost(delta)] if self.local else []
        return min(self.config.limit, epsilon([*costs, *self.fixed()], delta, self.accountant)), delta

    def checked_delta(self, examples: int) -> float:
        """Return delta of an institution with this number of examples.

        Raises
        ------
        PrivacyError
            If it is above one over their number. Such a delta allows publishing one patient chosen at random.
        """
        if self.config.delta > 1 / examples:
            raise PrivacyError(
                f"delta may be at most one over the number of examples, {1 / examples:.2g} here; got "
                f"{self.config.delta:g}: lower privacy.delta, or leave it out"
            )
        return self.config.delta_for(examples)

    def fixed(self) -> list[SampledGaussian]:
        """Return the releases whose noise does not depend on the target epsilon: label counts."""
        return [self.counts()] if self.counted else []

    def check_first_passes(self, examples: int) -> None:
        """Refuse a run in which an institution could not make its sums and take the first pass of a round, together.

        Raises
        ------
        PrivacyError
            If the budget does not allow it, delta is too large, or there are fewer examples than a batch has.
        """
        delta, limit = self.checked_delta(examples), self.config.limit
        names = [name for name in self.mechanisms if name in ("classifier", "proxy", *ON_SUMS)]
        try:
            first = [self.cost(name, examples, 1) for name in names]
        except ConfigError as error:
            raise PrivacyError(str(error)) from None
        if names and (least := epsilon([*first, *self.fixed()], delta, self.accountant)) > limit:
            raise BudgetError(
                f"the privacy budget is epsilon {limit:g} at delta {delta:.2g}; the first pass of "
                f"{' and '.join(names)} alone makes {least:.2f}: choose more noise or a larger privacy.epsilon"
            )

    @property
    def mechanism(self) -> str:
        """Name of the mechanism to which an epsilon belongs."""
        if self.local:
            return "Gaussian noise on latents and randomised response on labels; one example replaced"
        if self.institutions:
            return "discrete Gaussian noise on a sum, shared"
        if set(self.mechanisms) <= {*ON_SUMS}:
            return "Gaussian noise on sums"
        sums = "Gaussian noise on sums, and " if STATISTICS in self.mechanisms else ""
        return f"{sums}DP-SGD, Poisson sampling{NO_PROOF if self.unproven else ''}"

    @property
    def trust(self) -> str:
        """Say how many institutions may help the server, or be missing."""
        missing = f", {self.dropouts} be missing" if self.dropouts else ""
        return f"{self.colluders or 'none'} of whom may help the server{missing}"

    # --- claims -------------------------------------------------------------------------------------------------------

    def dp_fields(self, answer: type[Payload]) -> dict[str, str]:
        """Return the fields of an answer that leave under DP: from the key in records to the mechanism."""
        return {key: by for key, field in answer.by_key().items() if (by := self.covering(field.dp))}

    def check_covered(self, answer: type[Payload]) -> None:
        """Refuse, under dp=end-to-end, an answer with a field that depends on training examples without noise.

        Metrics of tests are none: they are what dp=end-to-end leaves out.
        """
        if not self.end_to_end or issubclass(answer, Evaluation):
            return
        for name, field in answer.declared().items():
            if field.kind == "notice" or field.public or self.covering(field.dp) or self.left_out(answer, field):
                continue
            raise PrivacyError(
                f"with dp={self.config.dp} nothing leaves that depends on training examples without noise; "
                f"{answer.__name__}.{name} would: refused"
            )

    def check_withheld(self, answer: type[Payload] | None, leaving: Container[str]) -> None:
        """Refuse an answer that holds a withheld field, such as a loss in an answer with weights under DP."""
        for key, field in answer.by_key().items() if answer else ():
            if key in leaving and self.left_out(answer, field):  # type: ignore[arg-type]
                raise PrivacyError(
                    f"a field without differential privacy is withheld in this run; the answer holds {key}: kept back"
                )

    def check_stated(self, answer: type[Payload], leaving: Container[str], metrics: Mapping[str, Any]) -> None:
        """Refuse an answer with a field under DP that does not state the epsilon and delta of its account.

        Raises
        ------
        WireError
            If so. Only noise from the run's seed has no epsilon.
        """
        stated = ("epsilon", "delta") if self.config.secret else ("delta",)
        covered = [key for key in self.dp_fields(answer) if key in leaving]
        if covered and not all(name in metrics for name in stated):
            raise WireError(f"an answer under DP states {' and '.join(stated)}; this one, with {covered[0]}, does not")

    def protection(self, field: Field, epsilon: float, delta: float) -> str:
        """Return in a few words what protects a field of an answer."""
        if self.covering(field.dp):
            if not delta:
                return "none: no epsilon and delta are stated"
            if not isfinite(epsilon):
                return "not protected: its noise comes from the run's seed"
            unit = " of each replaced example" if self.local else " of a whole institution" * self.covers(UPDATE)
            proof = NO_PROOF if self.unproven else f"-DP{unit}"
            shown = f"({rounded_up(epsilon)}, {rounded_up(delta, 2)}){proof}"
            if not self.institutions:
                return shown
            other = "" if self.colluders else f"; {rounded_up(self.among(epsilon, delta))} against another of them"
            alone = rounded_up(self.alone(epsilon, delta))
            return f"{shown} in the sum of {self.institutions}, {self.trust}{other}; alone {alone}"
        return "declared public" if field.public else "none"

    def promise(self, answer: type[Payload], field: Field) -> float:
        """Return the largest epsilon that a field of an answer can have: the budget, 0, or infinity for no promise.

        Under dp=end-to-end it is 0 for fields that are declared public, for fields that are withheld, and for metrics
        of tests, unless they are those of models that an institution keeps.
        """
        if self.covering(field.dp):
            return self.config.limit if self.config.secret and not self.unproven else inf
        tested = issubclass(answer, Evaluation) and not self.tests_own
        free = field.public or tested or self.left_out(answer, field)
        return 0.0 if self.end_to_end and free else inf

    def answered(self, answer: Payload, examples: int, share: float = 1.0) -> Payload:
        """Return an answer of an institution as it will be at the end of a run; arguments as of `planned`."""
        left_out = [name for name, field in answer.declared().items() if self.left_out(type(answer), field)]
        answer = replace(answer, **{field.name: field.default for field in fields(answer) if field.name in left_out})
        of_latents = any(field.dp == LATENTS for field in answer.declared().values())
        if "delta" in answer.declared() and of_latents == (self.local is not None):  # neighbours of its own kind
            epsilon, delta = self.planned(examples, share)
            stated = epsilon if self.config.secret else None
            answer = replace(answer, epsilon=stated, delta=delta)  # type: ignore[call-arg]
        return answer

    def left_out(self, answer: type[Payload], field: Field) -> bool:
        """Return whether a field without noise is withheld, since its payload or the whole run is under DP."""
        beside_dp = any(self.covering(other.dp) for other in answer.declared().values())
        return field.withheld and (self.end_to_end or beside_dp)

    def protected(
        self, fields: Iterable[LedgerRow], declared: type[Payload] | None, metrics: Mapping[str, Any]
    ) -> list[LedgerRow]:
        """Return an answer's rows with their protection; `metrics` holds the epsilon that it states, if any."""
        known = declared.by_key() if declared else {}
        # an answer states no epsilon where its noise is not secret
        stated = float(metrics.get("epsilon", inf)), float(metrics.get("delta", 0.0))
        return [
            row._replace(protection=also(row.protection, self.protection(known[row.field], *stated)))
            if row.field in known
            else row
            for row in fields
        ]


def also(before: str, by_noise: str) -> str:
    """Return the protection by noise, and that of a seal or of masks where there were such."""
    if before not in (SEALED, MASKED):
        return by_noise
    return before if by_noise == "none" else f"{by_noise}, {before}"


def _refuse_untrained(strategy: str, wanted: Sequence[str], possible: Sequence[str]) -> None:
    """Refuse mechanisms that a method does not train by DP-SGD, or not with the run's options."""
    if wanted:
        raise ConfigError(
            f"strategy={strategy} with these options can have dp={some_of(possible)}; got {'+'.join(wanted)}: choose "
            "among these, other options, or another strategy; dp_mechanisms of its Traits names all"
        )


@lru_cache(maxsize=256)
def _sigma(plan: PrivacyPlan, examples: int) -> float:
    """Return the noise multiplier of an institution, the same in all mechanisms."""
    if not plan.config.target_epsilon:
        return plan.config.sigma
    sizes = [(p, p.batch or examples) for p in plan.passes]
    samplings = [(min(1.0, batch / examples), p.steps or examples // batch * p.epochs) for p, batch in sizes]
    delta = plan.config.delta_for(examples)
    return noise_for(plan.config.target_epsilon, delta, samplings, plan.accountant, plan.fixed())
