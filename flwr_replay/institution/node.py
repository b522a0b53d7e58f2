"""From a node's own configuration, or a partition in a simulation, to its institution."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from flwr.app import Context

from flwr_replay.ciphers.seal import KEY, Seal, make_key, read_pins, simulated
from flwr_replay.config.catalogue import code_of
from flwr_replay.config.compose import from_run_config, named_code, overrides_in
from flwr_replay.config.own_code import VARIABLE, allow, allowed, check_allowed
from flwr_replay.config.quoting import digits
from flwr_replay.config.renamed import told
from flwr_replay.config.run import RECORD, RunConfig
from flwr_replay.config.sections import BATCH, Range, TaskConfig
from flwr_replay.data import Dataset, load
from flwr_replay.data.datasets import bounded, dataset_of
from flwr_replay.data.dealt import dealt, loaded, names_of, pooled
from flwr_replay.data.decoded import FOLDER, DecodedImages
from flwr_replay.data.own import raws_of
from flwr_replay.errors import ConfigError, RefusedError, nearest
from flwr_replay.files.atomic import home
from flwr_replay.institution.features import featured
from flwr_replay.institution.owner import Institution
from flwr_replay.institution.policy import read_policy
from flwr_replay.learning.training import select_device
from flwr_replay.memory import remembered
from flwr_replay.models.zoo import encoder_digest, encoder_of
from flwr_replay.processes import end_those_left

__all__ = ["institution_of", "own_task", "take_data"]

CACHE_GB = 20  # the most that decoded images and features may take, unless the node's configuration says otherwise
FILES = {"checkpoint": "generator-checkpoint", "perceptual_weights": "perceptual-weights"}  # options, and a node's keys
NODE_KEYS = (
    "name",
    "data",
    "state",
    "policy",
    "batch-size",
    "classes",
    "private-model",
    "record",
    "record-mb",
    "cache-gb",
    "own-code",
    "seal-key",
    "seal-peers",
    "weights",
    *FILES.values(),
)


def institution_of(context: Context) -> tuple[Institution, RunConfig]:
    """Return this node's institution and the composed configuration; both are kept for later messages."""
    node = tuple(sorted((key, str(value)) for key, value in context.node_config.items()))
    return _institution(tuple(sorted(context.run_config.items())), node)


@remembered(maxsize=64)  # so that of many institutions only some have their examples in memory and a ledger open
def _institution(
    run_config: tuple[tuple[str, Any], ...], node: tuple[tuple[str, str], ...]
) -> tuple[Institution, RunConfig]:
    owned = dict(node)
    if "own-parts" in owned and "own-code" not in owned:
        told("own-parts", "own-code")
        owned["own-code"] = owned.pop("own-parts")
    deployed = "data" in owned or "name" in owned
    if deployed:
        _allow(named_code(overrides_in(dict(run_config))), owned)  # composing imports the strategy
    config = from_run_config(dict(run_config))
    if deployed:
        end_those_left()
        config = _with_own_files(config, owned)
        return _deployed(config, owned), config
    if "partition-id" not in owned:
        raise ConfigError(
            f"a SuperNode must say what it owns; got keys {', '.join(owned) or 'none'}: start it with "
            """--node-config 'name="a" data="/data/a"' (no spaces around =, strings in double quotes)"""
        )
    return _simulated(config, int(owned["partition-id"]), int(owned["num-partitions"]), owned), config


def take_data(context: Context, data: Callable[[Context], Mapping[str, Any]]) -> None:
    """Have this node's institution read its examples by a function of the user's app; `task` says their form."""
    institution, config = institution_of(context)

    def own(task: TaskConfig) -> Dataset:
        return dataset_of(raws_of(data(context), task, "the app's data"), task)

    institution.read = partial(_own, own, config.task, DecodedImages(institution.state / FOLDER, 0), config)


def own_task(task: TaskConfig, data: str) -> TaskConfig:
    """Return a run's task on an institution's own data, all of them.

    A server must not make a node download data, nor choose by a column or by sizes who is trained or tested on.
    """
    own = replace(task, data_dir=data, download=False, site_column="site")
    return replace(own, train_size=0, val_size=0, test_size=0)


def _deployed(config: RunConfig, owned: Mapping[str, str]) -> Institution:
    for key in owned:
        if key not in NODE_KEYS:  # a mistyped `policy` must not mean no policy
            raise ConfigError(f"unknown key {key!r} in --node-config: {nearest(key, NODE_KEYS)}")
    for key in ("name", "data"):
        if not owned.get(key):
            raise ConfigError(
                f"a SuperNode must have both name and data; {key} is missing: start it with "
                """--node-config 'name="a" data="/data/a"' (no spaces around =, strings in double quotes)"""
            )
    _allow((*config.own_code, *code_of(owned.get("private-model", ""), "model")), owned)
    task = own_task(config.task, owned["data"])
    # Flower silently drops a key with spaces around =, so the SuperNode's log shows the policy in force.
    rules = owned.get("policy") or "none: everything may leave"
    logging.getLogger("flwr").info("%s: data %s, policy %s", owned["name"], owned["data"], rules)
    root = _root(owned)
    cache = _most(owned, "cache-gb", CACHE_GB, Range(0, inf, "must be a number of GB, 0 for no cache"))
    kept = DecodedImages(root / owned["name"] / FOLDER, cache * 1e9)
    return Institution(
        name=owned["name"],
        read=partial(_own, partial(load, kept=kept), task, kept, config, private=bool(owned.get("private-model"))),
        device=select_device(config.device),
        policy=read_policy(Path(owned["policy"]) if owned.get("policy") else None),
        state_root=root,
        tests_external=config.external,
        validates=config.split == "validation",
        tests_training=config.forgetting,
        batch_size=_batch_size(config, owned),
        classes=_classes(config, owned),
        private_model=_private_model(config, owned),
        frozen=partial(encoder_digest, config.model, config.task),
        read_seal=_seal(owned),
        record=_record(owned),
        digested=_record(owned) != "none",
        record_mb=_most(owned, "record-mb", 1000, Range(0, inf, "must be a positive number of MB", "(]")),
        reports_losses=not config.hiding.sums_only,
        durable=True,
    )


def _allow(names: tuple[str, ...], owned: Mapping[str, str]) -> None:
    """Refuse what the institution's own configuration does not allow; let this process import the rest."""
    check_allowed(names, owned.get("own-code", ""), f"""--node-config '… own-code="{" ".join(names)}"'""")
    allow(names)


def _named(options: str, number: int, own: object, example: str) -> None:
    """Refuse options of which a SuperNode must name its own, if it does not."""
    if number > 1 and not own:
        raise ConfigError(
            f"{options} are dealt in turn in a simulation; a SuperNode names its own: start it with --node-config "
            f"'… {example}'"
        )


def _batch_size(config: RunConfig, owned: Mapping[str, str]) -> int:
    sizes, own = config.training.batch_sizes, owned.get("batch-size", "")
    _named(f"training.batch-sizes={list(sizes)}", len(sizes), own, "batch-size=8")
    if own and not (own.isascii() and own.isdecimal() and 1 <= int(own) <= BATCH):
        raise ConfigError(f"batch-size in --node-config must be a whole number from 1 to {BATCH:,}; got {own!r}")
    if own and not sizes:
        return 0  # the run says it
    return int(own or 0) or (sizes[0] if sizes else 0)


def _record(owned: Mapping[str, str]) -> str:
    """Return which of its messages the institution keeps; `true` means its own uploads."""
    directions = {"true": "up", "false": "none"}.get(owned.get("record", "none").lower(), owned.get("record", "none"))
    if directions not in RECORD:
        raise ConfigError(f"record in --node-config must be true (its own uploads), all or none; got {directions!r}")
    return directions


def _root(owned: Mapping[str, str], default: str = "state") -> Path:
    return Path(owned["state"]) if owned.get("state") else home() / default


def _seal(owned: Mapping[str, str]) -> Callable[[], Seal] | None:
    """Return what reads the institution's key and those that it has pinned; None if its node config names none."""
    name, peers, key = owned["name"], owned.get("seal-peers", ""), owned.get("seal-key", "")
    if not peers:
        if "seal-peers" in owned or key:
            raise ConfigError("seal-key in --node-config goes with seal-peers, the file of pinned keys; it is missing")
        return None
    file = Path(key) if key else _root(owned) / name / KEY
    return lambda: Seal(name, make_key(file)[0], read_pins(Path(peers)))


def _most(owned: Mapping[str, str], key: str, usual: int, allowed: Range) -> float:
    """Return how much of the disk something may take, by its key in the node's configuration."""
    text = owned.get(key, str(usual))
    with suppress(ValueError):
        if (most := float(digits(text))) in allowed:
            return most
    raise ConfigError(f"{key} in --node-config {allowed.rule}; got {text!r}")


def _classes(config: RunConfig, owned: Mapping[str, str]) -> str:
    declared, own = config.generator.classes, owned.get("classes", "")
    _named(f"generator.classes={list(declared)}", len(declared), own, 'classes="0 1"')
    if own and config.draws_images:  # the same rules
        config.generator.check_classes(own, config.task.classes, "classes in --node-config")
    return own or (declared[0] if declared else "")


def _own(
    read: Callable[[TaskConfig], Dataset],
    task: TaskConfig,
    kept: DecodedImages,
    config: RunConfig,
    private: bool = False,
) -> Dataset:
    """Read an institution's own data."""
    return _featured(bounded(read, task) if config.end_to_end else read(task), config, task, kept, private)


def _featured(
    dataset: Dataset, config: RunConfig, task: TaskConfig, kept: DecodedImages, private: bool = False
) -> Dataset:
    """Return a data set as the run's models see it: images, or their features, if nothing else is needed of them.

    A `private` model that an institution has chosen itself needs images.
    """
    encoder = encoder_of(config.model, config.task) if config.features_once and not private else None
    return featured(dataset, task, encoder, select_device(config.device), kept) if encoder else dataset


@remembered(maxsize=2)
def _inputs(config: RunConfig) -> Dataset:
    """Return a simulation's data set as its models see it; features are computed once for all institutions."""
    return _featured(loaded(config.task), config, config.task, DecodedImages(home() / FOLDER, CACHE_GB * 1e9))


def _share(config: RunConfig, nodes: int, k: int) -> Dataset:
    """Return what a simulated institution owns; if messages are recorded, with the digest of its images."""
    partition = dealt(config.task, config.partition, nodes, config.seed)
    own = partition.examples(_inputs(config), k)
    if config.record == "none" or not config.features_once:
        return own
    return replace(own, train=replace(own.train, images=partition.examples(loaded(config.task), k).train))


def _with_own_files(config: RunConfig, owned: Mapping[str, str]) -> RunConfig:
    """Put the institution's own files into the options of model and generator; a server must not name any."""
    if config.model.copy:
        if not owned.get("weights"):
            raise RefusedError(
                f"with model.train={config.model.train} the encoder does not travel, and every institution has its own "
                f"""copy: start the SuperNode with --node-config '… weights="FILE"', a copy of {config.model.weights}"""
            )
        config = replace(config, model=replace(config.model, weights=owned["weights"]))
    if not config.draws_images:
        return config
    options = [option.name for option in fields(config.generator) if option.name in FILES]
    for option in options:
        if getattr(config.generator, option):
            raise ConfigError(
                f"generator.{option.replace('_', '-')} is an institution's own file: leave it out; start the SuperNode "
                f"""with --node-config '… {FILES[option]}="FILE"'"""
            )
    files: dict[str, Any] = {option: owned.get(FILES[option], "") for option in options}
    return replace(config, generator=replace(config.generator, **files))


def _private_model(config: RunConfig, owned: Mapping[str, str]) -> str:
    names = config.strategy.private_models
    _named(f"private-models={','.join(names)}", len(names), "private-model" in owned, 'private-model="NAME"')
    return owned.get("private-model", names[0] if names else "")


def _simulated(config: RunConfig, k: int, nodes: int, owned: Mapping[str, str]) -> Institution:
    check_allowed(config.own_code, allowed(), f"export {VARIABLE}='package.module:function'")
    root, all_names = _root(owned, "state/simulation"), names_of(config.task, config.partition, nodes, config.seed)
    private, sizes, classes = config.strategy.private_models, config.training.batch_sizes, config.generator.classes
    return Institution(
        name=all_names[k],
        read=partial(_share, config, nodes, k),
        read_pooled=lambda: pooled(config.task, config.partition, nodes, config.seed, _inputs(config)),
        read_external=lambda: dealt(config.task, config.partition, nodes, config.seed).external(_inputs(config), k),
        device=select_device(config.device),
        policy=read_policy(Path(owned["policy"]) if owned.get("policy") else None),
        state_root=root,
        read_seal=partial(simulated, root, all_names, all_names[k]) if config.hiding.pinned else None,
        tests_external=config.external,
        validates=config.split == "validation",
        tests_training=config.forgetting,
        batch_size=sizes[k % len(sizes)] if sizes else 0,
        classes=classes[k % len(classes)] if classes else "",
        private_model=private[k % len(private)] if private else "",
        frozen=partial(encoder_digest, config.model, config.task),
        digested=config.record != "none",
        reports_losses=not config.hiding.sums_only,
    )
