"""Options of training under DP: mechanisms, noise, clipping, the budget."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from flwr_replay.config.sections import FRACTION, NOT_NEGATIVE_FINITE, Range, one_of, require, within

__all__ = ["MECHANISMS", "ON_SUMS", "PrivacyConfig", "some_of"]

ON_SUMS = ("statistics", "gradient", "update")  # with noise on a sum over all examples, which institutions can share
MECHANISMS = ("generator", "prior", "encoder", "classifier", "proxy", "latents", *ON_SUMS)
NOISE = Range(0.01, 1e6, "lies in [0.01, 1e6]")  # noise multipliers
CLIP = Range(1e-9, 1e9, "lies in [1e-9, 1e9]")
LEAST = 1e-3  # the smallest epsilon
LATENT = Range(LEAST, 1e4, "lies in [0.001, 10000]")
LABEL = Range(LEAST, 20, "lies in [0.001, 20]")  # above, doubles could not tell how seldom a label changes
END_TO_END = ("generator", "prior", "classifier")


def some_of(mechanisms: Sequence[str]) -> str:
    """Write values of `dp`, joined by + as it joins them, or by or where one of them stands alone."""
    return (" or " if {"latents", "update"} & {*mechanisms} else "+").join(mechanisms) or "none"


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """DP-SGD at an institution, and local DP of its latents.

    Qu et al. 2022, section 4.4: sigma 0.7, delta 1/|D|; they give no clipping norm, and their latents have no DP.
    """

    dp: str = "none"  # none | some of MECHANISMS, joined by + | end-to-end
    sigma: float = 0.7  # noise multiplier
    target_epsilon: float = 0.0  # choose the least sigma that keeps the whole run within it; 0: use sigma as given
    clip: float = 1.0  # C, the largest L2 norm of an example's gradient: encoder, classifier, proxy; of an update
    generator_clip: float = 1.0  # C for the generator
    prior_clip: float = 1.0  # C for the prior
    count_sigma: float = 10.0  # prior: standard deviation of the noise on the number of examples of each label
    latent_clip: float = 0.0  # latents: C, the largest L2 norm of one row; a public constant, not computed from data
    latent_epsilon: float = 0.0  # latents: epsilon of one example's latents, all its views together
    label_epsilon: float = 0.0  # latents: epsilon of one example's label
    epsilon: float = 0.0  # each institution's budget for a run; 0: no limit, epsilon is only reported
    delta: float = 0.0  # delta; 0: 1/|D|
    noise: str = "secret"  # secret: from a key that the institution keeps | shared: so, a share of it, under
    # masks | seeded: for tests, protects nothing
    dropouts: int = 0  # shared: institutions that may be missing from a sum
    colluders: int = -1  # shared: institutions that may help the server, or add no noise; -1: a third of the others

    def __post_init__(self) -> None:
        one_of("privacy.noise", self.noise, ("secret", "shared", "seeded"))
        if self.dp not in ("none", "end-to-end"):
            for name in self.mechanisms:
                one_of("privacy.dp", name, ("none", *MECHANISMS, "end-to-end"))
            require(
                len(set(self.mechanisms)) == len(self.mechanisms) and set(self.mechanisms) <= set(MECHANISMS),
                f"privacy.dp is none, end-to-end, or names {', '.join(MECHANISMS)} once each, joined by +; got "
                f"{self.dp!r}",
            )
        within("privacy.", self, sigma=NOISE, count_sigma=NOISE, clip=CLIP, generator_clip=CLIP, prior_clip=CLIP)
        within("privacy.", self, epsilon=NOT_NEGATIVE_FINITE, target_epsilon=NOT_NEGATIVE_FINITE)
        within("privacy.", self, delta=replace(FRACTION, rule="is a probability in [0, 1)"))
        for option, value in (("epsilon", self.epsilon), ("target-epsilon", self.target_epsilon)):
            require(
                not 0 < value < LEAST,
                f"privacy.{option} must be 0, for none, or at least {LEAST}; below that, delta alone says what leaks; "
                f"got {value}",
            )
        self._check_local()
        require(
            self.dp == "update" or "update" not in self.mechanisms,
            "dp=update stands alone: its epsilon is for all examples of an institution, that of others for one or one "
            f"patient's; got dp={self.dp}: choose one of them",
        )
        self._check_shared()
        require(
            not (self.epsilon and self.target_epsilon),
            f"privacy.target-epsilon also sets the budget; got {self.target_epsilon:g} and privacy.epsilon="
            f"{self.epsilon:g}: leave one of them out",
        )

    def _check_shared(self) -> None:
        if self.noise != "shared":
            require(
                (self.colluders, self.dropouts) == (-1, 0),
                f"privacy.colluders and privacy.dropouts are for noise=shared; got noise={self.noise}, "
                f"colluders={self.colluders} and dropouts={self.dropouts}: leave them out",
            )
            return
        require(
            self.dp in ON_SUMS,
            f"noise=shared is for sums over all examples, dp={' or '.join(ON_SUMS)}; got dp={self.dp}: choose "
            "one of them, with strategy=fedstats, fedsgd, fedavg or fml",
        )
        require(
            self.delta > 0,
            "noise that is shared has one delta for all institutions; got privacy.delta=0, one over the number of each "
            "one's examples: set privacy.delta=1e-5, or less than one over the number of all",
        )

    def _check_local(self) -> None:
        options = {"latent-clip": self.latent_clip, "latent-epsilon": self.latent_epsilon}
        options["label-epsilon"] = self.label_epsilon
        shown = ", ".join(f"privacy.{name}={value:g}" for name, value in options.items())
        if "latents" not in self.mechanisms:
            require(not any(options.values()), f"{shown} are for dp=latents; got dp={self.dp}: leave them out")
            return
        require(
            self.dp == "latents",
            "dp=latents stands alone: its epsilon is for one example replaced by another, that of DP-SGD for one more "
            f"or less, and an account has one kind; got dp={self.dp}: choose one of them",
        )
        require(all(options.values()), f"dp=latents needs latent-clip, latent-epsilon and label-epsilon; got {shown}")
        within("privacy.", self, latent_clip=CLIP, latent_epsilon=LATENT, label_epsilon=LABEL)
        require(
            not (self.epsilon or self.target_epsilon),
            f"with dp=latents the budget is latent-epsilon + label-epsilon; got privacy.epsilon={self.epsilon:g} and "
            f"privacy.target-epsilon={self.target_epsilon:g}: leave them out",
        )

    @property
    def end_to_end(self) -> bool:
        """Say whether everything that depends on training examples is under DP."""
        return self.dp == "end-to-end"

    @property
    def secret(self) -> bool:
        """Say whether noise comes from keys that institutions keep."""
        return self.noise != "seeded"

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """Return the mechanisms that are trained by DP-SGD, or latents."""
        if self.end_to_end:
            return END_TO_END
        return () if self.dp == "none" else tuple(self.dp.split("+"))

    def clip_of(self, mechanism: str) -> float:
        """Return C, the clipping norm of a mechanism."""
        clips = {"generator": self.generator_clip, "prior": self.prior_clip, "statistics": 1.0}
        return clips.get(mechanism, self.clip)

    def sensitivity(self, mechanism: str) -> float:
        """Return the most by which neighbours move a sum: C, and 2C where one update takes another's place."""
        return self.clip_of(mechanism) * (1 + (mechanism == "update"))

    @property
    def limit(self) -> float:
        """The budget, an epsilon; infinite without one. Of latents, what one upload costs."""
        if self.dp == "latents":
            return self.latent_epsilon + self.label_epsilon
        return self.epsilon or self.target_epsilon or inf

    def delta_for(self, examples: int) -> float:
        """Return delta for an institution with so many examples."""
        return self.delta or 1 / examples
