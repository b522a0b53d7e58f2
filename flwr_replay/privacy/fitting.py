"""Whether the mechanisms that a run is to train by DP-SGD fit its task, its replay and its generator."""

from collections.abc import Container

from flwr_replay.config.model import ModelConfig
from flwr_replay.config.privacy import ON_SUMS
from flwr_replay.config.run import RunConfig
from flwr_replay.config.sections import TaskConfig, require
from flwr_replay.data.datasets import MIXES_PATIENTS
from flwr_replay.memory import remembered

__all__ = ["check_fit", "mechanisms_wanted", "trains_encoder"]


def mechanisms_wanted(config: RunConfig) -> tuple[str, ...]:
    """Return the mechanisms that are to be trained by DP-SGD."""
    if not (config.privacy.end_to_end and config.draws_images):
        return config.privacy.mechanisms
    require(
        config.strategy.classifiers != "released" or not config.strategy.traits.draws_images,
        f"dp=end-to-end trains all that leaves by DP-SGD; strategy={config.strategy.name} lets classifiers leave that "
        "it cannot train so: choose mode=buffer-only, dp=generator, or another strategy",
    )
    released = ("classifier",) if config.strategy.classifiers == "released" else ()
    return (*config.generator.draws_with, *released)


def check_fit(config: RunConfig, wanted: Container[str]) -> None:
    """Refuse a task, replay or generator with which these mechanisms cannot be trained by DP-SGD."""
    if config.privacy.end_to_end:
        _check_end_to_end(config)
    if config.model.build:
        _check_own(config.model, config.task)
    require(
        "encoder" not in wanted or trains_encoder(config),
        f"dp=encoder is for what trains before the cut; with model.train={config.model.train} nothing there does: "
        "leave dp=encoder out, or choose dp=latents",
    )
    mixed = MIXES_PATIENTS.get(config.task.format)
    require(
        mixed is None,
        f"task={config.task.name} {mixed}, which mixes patients without noise: choose dp=none or another task",
    )
    require(
        "latents" not in wanted or config.task.kind == "classification",
        f"dp=latents randomises labels among classes; task={config.task.name} is a {config.task.kind}, which has none: "
        "choose a classification, or dp=none",
    )
    require(
        not config.task.balanced,
        "task.balanced=true leaves patients out until both classes are equally frequent, so adding one patient may "
        "change which others are used: choose dp=none or balanced=false",
    )
    require(
        not any(name in wanted for name in ON_SUMS)
        or config.replay.name in ("none", "statistics" * ("update" not in wanted)),
        f"noise on sums covers an institution's own examples, and no replayed ones; got replay={config.replay.name}: "
        "choose replay=none",
    )
    if config.draws_images:
        _check_drawing(config, wanted)
    else:
        _check_replay(config, wanted)
    require(
        "prior" not in wanted or "generator" in wanted,
        "a prior learns the codes of a generator, and a generator trained without noise depends on all images: "
        "choose dp=generator+prior or dp=end-to-end",
    )


@remembered(maxsize=4)  # every message asks
def _check_own(model: ModelConfig, task: TaskConfig) -> None:
    from flwr_replay.models.own import check_layers
    from flwr_replay.models.zoo import build

    check_layers(model, build(model, task, 0))


def trains_encoder(config: RunConfig) -> bool:
    """Return whether an institution trains what lies before the cut, if the method says so."""
    from flwr_replay.models.zoo import frozen_before

    some = config.model.train != "all" and "encoder" in config.strategy.dp_passes(1)
    return not (some and frozen_before(config.model, config.task, getattr(config.strategy, "cut", "")))


def _check_drawing(config: RunConfig, wanted: Container[str]) -> None:
    """Refuse mechanisms that do not fit the drawing of images by each institution's own generator."""
    needed, named = config.generator.draws_with, "+".join(config.generator.draws_with)
    some = [name for name in ("generator", "prior") if name in wanted]
    require(
        not some or sorted(some) == sorted(needed),
        f"with generator={config.generator.name} images are drawn by {' and '.join(needed)}; got dp={'+'.join(some)}: "
        f"choose dp={named}",
    )
    require(
        "classifier" not in wanted or bool(some) or config.strategy.traits.draws_images,
        "a classifier that also learns from synthetic images of the same patients, made without noise, has no epsilon: "
        f"choose dp={named}+classifier, or replay=none",
    )
    if some:
        require(not config.generator.dp_fault, config.generator.dp_fault)
        require(
            not config.generator.checkpoint,
            "a trained generator of generator.checkpoint has no epsilon: leave it out, or choose dp=none",
        )
        require(
            bool(config.generator.classes),
            "which classes an institution has depends on its examples; under DP it draws those that it declares: set "
            "generator.classes=[all], or name them by institution, ['0 1','2 3']",
        )


def _check_replay(config: RunConfig, wanted: Container[str]) -> None:
    """Refuse mechanisms that do not fit the replay of codes."""
    replay, summed = config.replay.name, config.replay.name == "statistics"
    require(
        "generator" not in wanted or replay != "none",
        f"dp=generator needs a generator; got replay={replay}: choose replay=vqvae2 or pixelcnn",
    )
    require("generator" not in wanted or not config.generator.dp_fault, config.generator.dp_fault)
    require(
        "prior" not in wanted or replay == "pixelcnn",
        f"dp=prior needs a prior; got replay={replay}: choose replay=pixelcnn",
    )
    require(
        "classifier" not in wanted or replay == "none" or "prior" in wanted or ON_SUMS[0] in wanted,
        "a classifier that also learns replays of the same patients, made without noise, has no epsilon; got "
        f"replay={replay}: choose replay=none or dp={'statistics+classifier' * summed or 'end-to-end'}",
    )
    require(
        "proxy" not in wanted or not summed or ON_SUMS[0] in wanted,
        "beside proxies with an epsilon, sums of the same patients would leave without noise; got replay=statistics: "
        "choose dp=statistics+proxy, or replay=none",
    )


def _check_end_to_end(config: RunConfig) -> None:
    require(
        config.replay.name == "pixelcnn" or config.draws_images,
        f"dp=end-to-end lets no codes leave; got replay={config.replay.name}: choose replay=pixelcnn",
    )
    require(
        config.task.kind == "classification",
        f"dp=end-to-end does not cover the sums of labels that task={config.task.name} needs: choose a classification",
    )
    require(not config.forgetting, "dp=end-to-end does not cover metrics on training examples: leave forgetting out")
    require(
        not config.external,
        "external=true tests on examples of the classes that an institution trains on, and dp=end-to-end does not "
        "cover which these are: leave external out",
    )
