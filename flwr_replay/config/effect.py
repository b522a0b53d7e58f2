"""What options are for: one that a person has typed, and that would change nothing in the run, is refused."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

from flwr_replay.config.quoting import key_of, short
from flwr_replay.config.run import RunConfig

__all__ = ["idle"]

IMAGES = "replay=buffer, strategy=feder or syncentral"
OWN_BATCHES = "methods whose institutions train on batches of their own, with own_batches in their Traits"
# Options (or a section: all of its options), attributes of a `RunConfig`, of which one must have one of these values
# (after a !, any other), and what is told in their place.
USES: tuple[tuple[str, ...], ...] = (
    ("replay.codes", "replay.name", "vqvae2"),
    ("replay.cache_mb", "replay.name", "vqvae2 pixelcnn"),
    ("replay.clip", "replay.name", "statistics"),
    ("replay.ratio replay.missing", "replay.name", "! none"),
    ("replay.images generator.checkpoint generator.classes", "replay.name draws_images", "True", IMAGES),
    ("generator.piece_steps", "replay.name draws_images", "True", IMAGES),
    ("generator", "replay.name draws_images", "vqvae2 pixelcnn True", f"replay=vqvae2 or pixelcnn, {IMAGES}"),
    ("prior", "replay.name draws_images", "pixelcnn True", f"replay=pixelcnn, {IMAGES}"),
    ("task.unit prior.bins", "task.kind", "regression"),
    ("task.class_names task.class_groups", "task.kind", "classification"),
    ("task.data_dir", "task.name", "! digits diabetes", "tasks that read files"),
    ("partition.test", "partition.name", "! natural"),
    ("training.batches training.batch_sizes", "strategy.name strategy.traits.own_batches", "True", OWN_BATCHES),
    ("training", "strategy.name strategy.takes_steps", "True", "methods that take steps"),
    ("training.momentum", "training.optimizer strategy.private_optimizer", "sgd"),
    ("privacy.sigma", "privacy.target_epsilon", "0.0", "a run without target-epsilon"),
    ("privacy.sigma privacy.delta privacy.noise", "privacy.dp", "! none"),
    ("privacy.clip", "privacy.dp privacy.mechanisms", "encoder classifier proxy gradient update"),
    ("privacy.generator_clip", "privacy.dp privacy.mechanisms", "generator"),
    ("privacy.prior_clip privacy.count_sigma", "privacy.dp privacy.mechanisms", "prior"),
    ("record_mb", "record", "! none"),
    ("strategy.own_epochs strategy.holdout", "strategy.listen", "pool"),
    ("strategy.latent_dtype strategy.chunk_mb strategy.upload_views strategy.encoder", "strategy.latents", "sent"),
    ("strategy.encoder_institution strategy.encoder_epochs strategy.patience", "strategy.encoder", "institution"),
    ("strategy.clip", "strategy.latents", "drawn"),
    ("strategy.passes", "strategy.head", "mlp"),
    ("strategy.priors", "strategy.head", "lda"),
    ("strategy.durations", "strategy.order", "queue"),
    ("strategy.private_batch_size strategy.private_shift", "strategy.private_epochs", "! 0"),
    ("strategy.lr_by_noise", "privacy.dp privacy.mechanisms", "gradient"),
)


def idle(full: str, typed: str, configs: Sequence[RunConfig]) -> str:
    """Say what an option, under its full name and as typed, is for, if it changes nothing in any of the runs."""
    for options, where, among, *text in USES:
        if not {full, full.partition(".")[0]} & {*options.split()}:
            continue
        other, places = among.startswith("!"), where.split()
        values = [[str(value) for place in places for value in _values(config, place)] for config in configs]
        if all(found and other == any(value in among.split() for value in found) for found in values):
            option, known = places[0].removesuffix(".name").replace("_", "-"), among.removeprefix("! ")
            needs = text[0] if text else f"{option}{' other than ' if other else '='}{known.replace(' ', ' or ')}"
            named = "" if key_of(typed) == full else f"{full.replace('_', '-')}, "
            return f"{short(typed)} is {named}for {needs}; got {option}={values[0][0]}: leave it out"
    return ""


def _values(config: RunConfig, place: str) -> Iterator[Any]:
    with suppress(AttributeError):  # a strategy without this option
        value = reduce(getattr, place.split("."), config)
        yield from value if isinstance(value, tuple) else (value,)
