"""How a mechanism is made private: noise, clipping, the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from flwr_replay.config import one_of, require
from flwr_replay.privacy.accounting import noise_for

__all__ = ["PrivacyConfig"]


@dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """DP-SGD at an institution (Qu et al. 2022, section 4.4: sigma 0.7, delta 1/|D|; its clip is not given)."""

    sigma: float = 0.7  # noise multiplier; 0: the least with which the whole run keeps within epsilon
    clip: float = 1.0  # C, the L2 norm that an example's gradient may have
    epsilon: float = 0.0  # each institution's budget for a run; 0: no limit, epsilon is only reported
    delta: float = 0.0  # 0: 1/|D|
    noise: str = "secret"  # secret: by a key that the institution keeps | seeded: for tests, protects nothing

    def __post_init__(self) -> None:
        one_of("privacy.noise", self.noise, ("secret", "seeded"))
        require(0 <= self.sigma < inf, f"privacy.sigma must be finite and not negative; got {self.sigma}")
        require(0 < self.clip < inf, f"privacy.clip must be positive and finite; got {self.clip}")
        require(0 <= self.epsilon < inf, f"privacy.epsilon must be finite and not negative; got {self.epsilon}")
        require(0 <= self.delta < 1, f"privacy.delta is a probability in [0, 1); got {self.delta}")
        require(
            self.sigma > 0 or self.epsilon > 0,
            "privacy needs noise; got privacy.sigma=0 and privacy.epsilon=0: set one of them",
        )

    @property
    def limit(self) -> float:
        """The budget; infinite where there is none."""
        return self.epsilon or inf

    def delta_for(self, examples: int) -> float:
        """Return delta for an institution with so many examples."""
        return self.delta or 1 / examples

    def sigma_for(self, samplings: Sequence[tuple[float, int]], delta: float) -> float:
        """Return the noise multiplier; (q, steps) of all mechanisms of the whole run matter where epsilon gives it."""
        return self.sigma or noise_for(self.epsilon, delta, samplings)
