"""What a strategy's options say of themselves to the rest of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from flwr_replay.config.sections import TaskConfig

__all__ = ["StrategyConfig"]


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Base of every strategy's `<Name>Config`: its fields are the options, what stands here it declares beside them.

    The rest of the package knows a strategy's options by these declarations alone. What is not declared does not
    happen: a mechanism without `dp_passes` is never trained by DP-SGD, it is refused.

    Attributes
    ----------
    name : str
        The strategy's, as in `strategy=<name>`.
    dp_by_default : str
        What `dp=auto` stands for, where no preset says it.
    pooled : bool
        Whether one institution trains on the examples of all, in a simulation.
    files : tuple of str
        Options that name files of the user's, found again from wherever the run is resumed.
    chosen_later : tuple of str
        Options whose value in a request may be another than the run's: an institution refuses any other that differs.
    """

    name: ClassVar[str]
    dp_by_default: ClassVar[str] = "none"
    pooled: ClassVar[bool] = False
    files: ClassVar[tuple[str, ...]] = ()
    chosen_later: ClassVar[tuple[str, ...]] = ()

    def dp_passes(self, rounds: int) -> Mapping[str, int]:
        """Return how many passes an institution makes over its examples, by mechanism: encoder, classifier, proxy.

        They are those of a whole run of so many rounds, of what the method itself can train by DP-SGD; the passes of
        generator and prior are replay's. Noise, charge and forecast follow from them.
        """
        return {}

    @property
    def unproven(self) -> str:
        """Why the epsilon that is computed of these passes is no proof, in a sentence; empty: it is one."""
        return ""

    @property
    def private_models(self) -> tuple[str, ...]:
        """Models of conf/model that never leave, by turns over the institutions."""
        return ()

    def check_task(self, task: TaskConfig) -> None:
        """Refuse options that do not fit the task.

        Raises
        ------
        ConfigError
            With the rule, the value and what to do.
        """
