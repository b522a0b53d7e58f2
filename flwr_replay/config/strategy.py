"""What a strategy's options declare to the rest of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from flwr_replay.config.sections import TaskConfig

__all__ = ["StrategyConfig", "states"]


def states(half: type, trait: str) -> bool:
    """Say whether a class states a trait itself: a subclass has another step, for which its parent cannot speak."""
    return bool(vars(half).get(trait, False))


@dataclass(frozen=True, kw_only=True)
class StrategyConfig:
    """Base of every strategy's `<Name>Config`. Fields are options; attributes and methods here are declarations.

    The rest of the package knows a strategy's options by these declarations alone. Nothing is guessed: a mechanism
    without `dp_passes` is refused, not trained by DP-SGD.

    Attributes
    ----------
    name : str
        The strategy's name, as in `strategy=<name>`.
    dp_by_default : str
        The meaning of `dp=auto` if no preset sets `dp`.
    pooled : bool
        Whether, in a simulation, one institution trains on the examples of all.
    files : tuple of str
        Options that name a user's files. Their paths are made absolute, so that a resumed run finds them.
    chosen_later : tuple of str
        Options whose value in a request may differ from the run's. An institution refuses any other difference.
    from_training : Mapping of str to str
        Options that, where they are empty, have the value of an option of training. Requests state that value.
    metrics_note : str
        What a reader of a comparison must know of the method's metrics: whose model they are of.
    draws_images : bool
        Whether each institution trains an image generator, from which it draws synthetic images.
    own_batches : bool
        Whether institutions train on batches of a `Learner`, which have the institution's size.
    relayed : bool
        Whether the server only hands on what institutions send, so that it can be sealed (sealed=true).
    summed : bool
        Whether the server needs only the mean of what institutions send, so that it can be masked (masked=true). Each
        class must state it itself.
    """

    name: ClassVar[str]
    dp_by_default: ClassVar[str] = "none"
    pooled: ClassVar[bool] = False
    files: ClassVar[tuple[str, ...]] = ()
    chosen_later: ClassVar[tuple[str, ...]] = ()
    from_training: ClassVar[Mapping[str, str]] = {}
    metrics_note: ClassVar[str] = ""
    draws_images: ClassVar[bool] = False
    own_batches: ClassVar[bool] = False
    relayed: ClassVar[bool] = False
    summed: ClassVar[bool] = False

    def dp_passes(self, rounds: int) -> Mapping[str, int]:
        """Return how many passes an institution makes over its examples, by mechanism: encoder, classifier, proxy.

        The passes are those of a whole run of `rounds` rounds, for every mechanism that the method can train by
        DP-SGD. Replay declares those of generator and prior. Noise, charges and forecast follow from them. Of latents,
        which get noise before they leave, it is the rows that an upload has for each example.
        """
        return {}

    @property
    def unproven(self) -> str | None:
        """Why the epsilon computed from these passes is not proven, in a sentence; empty: it is proven.

        None declares nothing, which is enough where no proxy is trained: it may learn from a model without noise.
        """
        return None

    @property
    def classifiers(self) -> str:
        """What becomes of classifiers that institutions train: `released`; `kept`: they never leave; `none` are."""
        return "released"

    @property
    def private_models(self) -> tuple[str, ...]:
        """Names in conf/model of models that never leave the institutions, which take them in turn."""
        return ()

    @property
    def instructed(self) -> Mapping[str, object]:
        """Instructions, by name, that follow from options of another name: `{"local_epochs": self.sweeps}`.

        An institution refuses a request with other values, as it does for options and instructions of one name.
        """
        return {}

    def check_task(self, task: TaskConfig) -> None:
        """Refuse options that do not fit the task.

        Raises
        ------
        ConfigError
            If an option does not fit.
        """
