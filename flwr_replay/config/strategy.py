"""What a strategy's options declare to the rest of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

from flwr_replay.config.sections import Named, TaskConfig
from flwr_replay.errors import ConfigError

__all__ = ["StrategyConfig", "Traits", "refuse_stray"]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a method is, stated once; what it does not state is as here, and claims nothing."""

    mixes: bool = False  # trained models are averaged or mixed, and can be tested before
    summed: bool = False  # the server needs only the mean of what institutions send, which can be masked (masked=true)
    relayed: bool = False  # the server only hands on what institutions send, which can be sealed (sealed=true)
    supports_replay: bool = False  # institutions may train on replayed examples
    supports_draws: bool = False  # institutions may train on features that are drawn from sums, replay=statistics
    takes_fraction: bool = False  # in a round a fraction of the institutions may train
    needs_roll_call: bool = False  # every institution must run this package's client, for all stages
    own_batches: bool = False  # institutions train on batches of a `Learner`, which have the institution's size
    draws_images: bool = False  # each institution trains an image generator, from which it draws synthetic images
    one_form: bool = False  # all institutions' models must have the same names, shapes and dtypes
    own_models: bool = False  # institutions test models of their own, which only training makes
    begins_at_server: bool = True  # the server draws the fresh weights
    global_model: bool = True  # the server has a model that it could test
    private_key: str = ""  # begins the names of the files with private models, where institutions keep such
    pooled: bool = False  # in a simulation, one institution trains on the examples of all
    dp_mechanisms: tuple[str, ...] = ()  # what both halves can train by DP-SGD, or send with noise
    dp_by_default: str = "none"  # the meaning of dp=auto if no preset sets dp
    metrics_note: str = ""  # what a reader of a comparison must know of the metrics: whose model they are of

    def __post_init__(self) -> None:
        for trait in fields(self):
            value, kind = getattr(self, trait.name), type(trait.default)
            if not isinstance(value, kind):
                raise ConfigError(f"{trait.name} must be a {kind.__name__}; got {value!r}: write it so in traits")

    def inherited(self) -> Self:
        """Return those of a subclass that states none: it has other steps, for which its parent cannot speak."""
        return replace(self, mixes=False, summed=False, supports_draws=False, dp_mechanisms=())


def refuse_stray(half: type[Any]) -> None:
    """Refuse traits that a class states by themselves."""
    stray = {trait.name: vars(half)[trait.name] for trait in fields(Traits) if trait.name in vars(half)}
    if stray:
        written = ", ".join(f"{name}={value!r}" for name, value in stray.items())
        raise ConfigError(
            f"a method's traits stand in its options; {half.__name__} states {', '.join(stray)} by itself: write "
            f"traits = Traits({written}) in {half.__name__.removesuffix('Config')}Config"
        )


@dataclass(frozen=True, kw_only=True)
class StrategyConfig(Named):
    """Base of every strategy's `<Name>Config`. Fields are options; attributes and methods here are declarations.

    The rest of the package knows a strategy's options by these declarations alone. Nothing is guessed: a mechanism
    without `dp_passes` is refused, not trained by DP-SGD.

    Attributes
    ----------
    name : str
        The strategy's name, as in `strategy=<name>`.
    traits : Traits
        What the method is.
    files : tuple of str
        Options that name a user's files. Their paths are made absolute, so that a resumed run finds them.
    chosen_later : tuple of str
        Options whose value in a request may differ from the run's. An institution refuses any other difference.
    from_training : Mapping of str to str
        Options that, where they are empty, have the value of an option of training. Requests state that value.
    """

    name: ClassVar[str]
    traits: ClassVar[Traits] = Traits()
    files: ClassVar[tuple[str, ...]] = ()
    chosen_later: ClassVar[tuple[str, ...]] = ()
    from_training: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        refuse_stray(cls)
        if "traits" not in vars(cls):
            cls.traits = cls.traits.inherited()

    def dp_passes(self, rounds: int) -> Mapping[str, int]:
        """Return how many passes an institution makes over its examples, by mechanism: encoder, classifier, proxy.

        The passes are those of a whole run of `rounds` rounds, for every mechanism that the method can train by
        DP-SGD. Replay declares those of generator and prior. Noise, charges and forecast follow from them. Of latents,
        which get noise before they leave, it is the rows that an upload has for each example.
        """
        return {}

    @property
    def sends_sums(self) -> bool:
        """Whether, with these options, the server needs no more than the mean of what institutions send."""
        return self.traits.summed

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
    def takes_steps(self) -> bool:
        """Whether anything is trained by an optimizer's steps, whose rate `training` says."""
        return True

    @property
    def own_images(self) -> bool:
        """Whether an institution trains on nothing but its own images, as they are, by models with one encoder."""
        return not self.private_models

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
        """Refuse options that do not fit the task, by a ConfigError."""
