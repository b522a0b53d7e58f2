"""What options are for: one that a person has typed, and that would change nothing in the run, is refused."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any, NamedTuple

from flwr_replay.config.quoting import key_of, short
from flwr_replay.config.run import RunConfig

__all__ = ["idle"]


class Use(NamedTuple):
    """What options are for: a value of other options."""

    options: str  # with blanks between, as all here; a section is all of its options
    where: str  # attributes of a `RunConfig`, of which one must have
    values: str  # one of these; after a !, all other values
    text: str = ""


IMAGES = "replay=buffer, strategy=feder or syncentral"
OWN_BATCHES = "methods whose institutions train on batches of their own, Traits(own_batches=True)"
USES = (
    Use("replay.codes", "replay.name", "vqvae2"),
    Use("replay.cache_mb", "replay.name", "vqvae2 pixelcnn"),
    Use("replay.clip", "replay.name", "statistics"),
    Use("replay.ratio replay.missing", "replay.name", "! none"),
    Use("replay.images generator.checkpoint generator.classes", "replay.name draws_images", "True", IMAGES),
    Use("generator.piece_steps", "replay.name draws_images", "True", IMAGES),
    Use("generator", "replay.name draws_images", "vqvae2 pixelcnn True", f"replay=vqvae2 or pixelcnn, {IMAGES}"),
    Use("prior", "replay.name draws_images", "pixelcnn True", f"replay=pixelcnn, {IMAGES}"),
    Use("task.unit prior.bins", "task.kind", "regression"),
    Use("task.class_names", "task.kind", "classification"),
    Use("task.data_dir", "task.name", "! digits diabetes", "tasks that read files"),
    Use("partition.test", "partition.name", "! natural"),
    Use("training.batches training.batch_sizes", "strategy.name strategy.traits.own_batches", "True", OWN_BATCHES),
    Use("training", "strategy.name strategy.takes_steps", "True", "methods that take steps"),
    Use("training.momentum", "training.optimizer strategy.private_optimizer", "sgd"),
    Use("privacy.sigma", "privacy.target_epsilon", "0.0", "a run without target-epsilon"),
    Use("privacy.sigma privacy.delta privacy.noise", "privacy.dp", "! none"),
    Use("privacy.clip", "privacy.dp privacy.mechanisms", "encoder classifier proxy gradient update"),
    Use("privacy.generator_clip", "privacy.dp privacy.mechanisms", "generator"),
    Use("privacy.prior_clip privacy.count_sigma", "privacy.dp privacy.mechanisms", "prior"),
    Use("record_mb", "record", "! none"),
    Use("strategy.own_epochs strategy.holdout", "strategy.listen", "pool"),
    Use("strategy.latent_dtype strategy.chunk_mb strategy.upload_views strategy.encoder", "strategy.latents", "sent"),
    Use("strategy.encoder_institution strategy.encoder_epochs strategy.patience", "strategy.encoder", "institution"),
    Use("strategy.clip", "strategy.latents", "drawn"),
    Use("strategy.passes", "strategy.head", "mlp"),
    Use("strategy.priors", "strategy.head", "lda"),
    Use("strategy.durations", "strategy.order", "queue"),
    Use("strategy.private_batch_size strategy.private_shift", "strategy.private_epochs", "! 0"),
    Use("strategy.lr_by_noise", "privacy.dp privacy.mechanisms", "gradient"),
)


def idle(full: str, typed: str, configs: Sequence[RunConfig]) -> str:
    """Say what an option, under its full name and as typed, is for, if it changes nothing in any of the runs."""
    for use in USES:
        if not any(full == option or full.startswith(f"{option}.") for option in use.options.split()):
            continue
        where, other = use.where.split(), use.values.startswith("!")
        values = [[str(value) for place in where for value in _values(config, place)] for config in configs]
        if all(found and other == any(value in use.values.split() for value in found) for found in values):
            option = where[0].removesuffix(".name").replace("_", "-")
            among = use.values.removeprefix("! ").replace(" ", " or ")
            needs = use.text or f"{option}{' other than ' if other else '='}{among}"
            named = "" if key_of(typed) == full else f"{full.replace('_', '-')}, "
            return f"{short(typed)} is {named}for {needs}; got {option}={values[0][0]}: leave it out"
    return ""


def _values(config: RunConfig, place: str) -> Iterator[Any]:
    with suppress(AttributeError):  # a strategy without this option
        value = reduce(getattr, place.split("."), config)
        yield from value if isinstance(value, tuple) else (value,)
