"""Options of training under DP: mechanisms, noise, clipping, the budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from flwr_replay.config.sections import FRACTION, NOT_NEGATIVE_FINITE, Range, one_of, require, within

__all__ = ["MECHANISMS", "PrivacyConfig"]

MECHANISMS = ("generator", "prior", "encoder", "classifier", "proxy")
NOISE = Range(0.01, 1e6, "lies in [0.01, 1e6]")  # noise multipliers
CLIP = Range(1e-9, 1e9, "lies in [1e-9, 1e9]")
LEAST = 1e-3  # the smallest epsilon
END_TO_END = ("generator", "prior", "classifier")


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """DP-SGD at an institution (Qu et al. 2022, section 4.4: sigma 0.7, delta 1/|D|; no clipping norm is given)."""

    dp: str = "none"  # none | generator, prior, encoder, classifier, proxy, joined by + | end-to-end
    sigma: float = 0.7  # noise multiplier
    target_epsilon: float = 0.0  # choose the least sigma that keeps the whole run within it; 0: use sigma as given
    clip: float = 1.0  # C, the largest L2 norm of an example's gradient: encoder, classifier, proxy
    generator_clip: float = 1.0  # C for the generator
    prior_clip: float = 1.0  # C for the prior
    count_sigma: float = 10.0  # prior: standard deviation of the noise on the number of examples of each label
    epsilon: float = 0.0  # each institution's budget for a run; 0: no limit, epsilon is only reported
    delta: float = 0.0  # delta; 0: 1/|D|
    noise: str = "secret"  # secret: from a key that the institution keeps | seeded: for tests, protects nothing

    def __post_init__(self) -> None:
        one_of("privacy.noise", self.noise, ("secret", "seeded"))
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
        require(
            not (self.epsilon and self.target_epsilon),
            f"privacy.target-epsilon also sets the budget; got {self.target_epsilon:g} and privacy.epsilon="
            f"{self.epsilon:g}: leave one of them out",
        )

    @property
    def end_to_end(self) -> bool:
        """Say whether everything that depends on training examples is under DP."""
        return self.dp == "end-to-end"

    @property
    def mechanisms(self) -> tuple[str, ...]:
        """Return the mechanisms that are trained by DP-SGD."""
        if self.end_to_end:
            return END_TO_END
        return () if self.dp == "none" else tuple(self.dp.split("+"))

    def clip_of(self, mechanism: str) -> float:
        """Return C, the clipping norm of a mechanism."""
        clips = {"generator": self.generator_clip, "prior": self.prior_clip}
        return clips.get(mechanism, self.clip)

    @property
    def limit(self) -> float:
        """The budget, an epsilon; infinite without one."""
        return self.epsilon or self.target_epsilon or inf

    def delta_for(self, examples: int) -> float:
        """Return delta for an institution with so many examples."""
        return self.delta or 1 / examples
