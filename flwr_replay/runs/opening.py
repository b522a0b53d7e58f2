"""Make a run directory, or find the one to resume."""

import errno
import json
import os
import re
import secrets
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from flwr_replay.config.binding import FREE, flat, plain
from flwr_replay.config.compose import to_yaml
from flwr_replay.config.quoting import quoted, toml_text
from flwr_replay.config.run import RunConfig
from flwr_replay.errors import FlwrReplayError, RunError
from flwr_replay.files.atomic import DAY, NAME, alone, home, make_folder, private_folder, sync, write_atomic
from flwr_replay.files.disk import folder_locked, looked, there
from flwr_replay.report.run_files import BOUND, CONFIG, RUN_ID, SUMS, mark_of, options_of, read_run_id
from flwr_replay.terminal import command

__all__ = [
    "ENDED",
    "RESUME",
    "check_unchanged",
    "default_name",
    "new_run_id",
    "open_run",
    "refuse_fewer",
    "resumable",
    "resuming",
    "saved_options",
    "write_resume",
]

ENDED = "ended.txt"  # why a run without a result ended, where it was not killed
RESUME = "resume.toml"  # in a deployment: Flower's run config, to resume the run by
UNBORN = re.compile(r"\.\w[\w .-]*\.[0-9a-f]{8}\.new")  # a run directory that is not yet complete


@contextmanager
def resumable(folder: Path, rounds: int, *, deployed: bool = False, engine: str = "") -> Iterator[None]:
    """Keep why a run of so many rounds ended before its time; say how to resume one that is interrupted."""
    with suppress(OSError):  # of an attempt before
        (folder / ENDED).unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        with suppress(RunError):
            write_atomic(folder / ENDED, f"failed: {error if isinstance(error, FlwrReplayError) else repr(error)}\n")
        raise
    except (KeyboardInterrupt, SystemExit):  # the command line turns SIGTERM into SystemExit
        with suppress(RunError):
            write_atomic(folder / ENDED, "interrupted\n")
        file = shlex.quote(str(folder / RESUME))
        by = f"flwr run … --run-config {file}" if deployed else resuming(folder, rounds, engine)
        print(f"interrupted; to continue: {by}", file=sys.stderr)
        raise


def write_resume(folder: Path, run_config: Mapping[str, Any]) -> None:
    """Keep Flower's run config in a run directory, as a file for `flwr run --run-config` that resumes the run."""
    values, going_on = dict(run_config), f"resume={quoted(folder)}"
    if "resume" in values:
        values["resume"] = str(folder)
    elif going_on not in shlex.split(str(values.get("overrides", ""))):  # the study has no key of its own for it
        values["overrides"] = f"{values.get('overrides', '')} {shlex.quote(going_on)}".strip()
    lines = [
        f"{toml_text(key)} = {toml_text(value) if isinstance(value, str) else json.dumps(value)}\n"
        for key, value in values.items()
    ]
    write_atomic(folder / RESUME, "".join(lines))


def resuming(folder: Path, rounds: int, engine: str = "") -> str:
    """Write the command that continues a run, by an engine; with its rounds if it did not begin with so many."""
    begun_with = saved_options(folder)["rounds"] if there(folder / CONFIG) else rounds
    more = f" rounds={rounds}" if rounds != begun_with else ""
    return f"{command()} run {engine and engine + ' '}--resume {shlex.quote(str(folder))}{more}"


def refuse_fewer(folder: Path, rounds: int, done: int) -> None:
    """Refuse to end a resumed run before the last whole round that it has done."""
    if rounds < done:
        raise RunError(
            f"a run is not made shorter; {folder} has done {done} rounds, now rounds={rounds}: give rounds={done} or "
            "more, or leave rounds out"
        )


def open_run(config: RunConfig) -> tuple[RunConfig, str]:
    """Make a new run directory, or find the one to resume.

    Returns
    -------
    config : RunConfig
        With `runs_dir` and `run_name` set.
    run_id : str
        The run's id at the institutions, unique whatever its directory is called.

    Raises
    ------
    RunError
        If the folder cannot be written, if it exists already, or if it holds no run to resume.
    """
    if config.resume:
        folder = Path(config.resume).expanduser().absolute()
        check_unchanged(folder)
        _same_options(config, folder)
        return replace(config, runs_dir=str(folder.parent), run_name=folder.name), read_run_id(folder)
    if config.run_name and not NAME.fullmatch(config.run_name):
        raise RunError(
            "run-name must have letters, digits, spaces, dots, hyphens and underscores only, a letter or digit first; "
            f"got {config.run_name!r}"
        )
    root = make_folder(Path(config.runs_dir or home() / "runs").expanduser().absolute(), "runs-dir")
    _sweep_unborn(root)
    stem, run_id = default_name(config), new_run_id(config)
    name, number = config.run_name or stem, 1
    while True:
        opened = replace(config, runs_dir=str(root), run_name=name)
        if _born(root / name, {CONFIG: BOUND + to_yaml(opened), RUN_ID: run_id + "\n"}):
            return opened, run_id
        if config.run_name:
            raise RunError(f"run-name must be new; {root / name} exists: resume it or choose another")
        number += 1
        name = f"{stem}-{number}"


def _born(folder: Path, texts: Mapping[str, str]) -> bool:
    """Make a run directory with its first files, completely or not at all; return False if the name is taken."""
    unborn = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.new")
    with folder_locked(folder.parent), alone(private_folder(unborn)):
        for name, text in texts.items():
            write_atomic(unborn / name, text)
        sums = "".join(f"{sha256(text.encode()).hexdigest()}  {name}\n" for name, text in texts.items())
        write_atomic(unborn / SUMS, sums)
        try:
            os.rename(unborn, folder)  # replaces an empty folder, which is no run
        except OSError as error:
            shutil.rmtree(unborn, ignore_errors=True)  # if this fails too, `_sweep_unborn` removes it one day
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                return False
            raise RunError(f"{folder} must be a new folder; {error.strerror}: choose another --runs-dir") from None
    sync(folder.parent)
    return True


def _sweep_unborn(root: Path) -> None:
    """Remove the incomplete run directories of killed processes; without locks of folders, those older than a day."""
    with folder_locked(root) as held:  # else one may be met that has no lock of its own yet
        for folder, status in looked(root.glob(".*.new")).items():
            if UNBORN.fullmatch(folder.name) and (held or time.time() - status.st_mtime > DAY):
                with suppress(RunError), alone(folder):
                    shutil.rmtree(folder, ignore_errors=True)


def check_unchanged(folder: Path) -> None:
    """Refuse, by a RunError, a folder without a run, or with one whose options or id were changed."""
    if not there(folder / CONFIG):
        fault = "has none" if folder.exists() else "does not exist"
        raise RunError(
            f"resume must be a run directory with a config.yaml; {folder.absolute()} {fault}: `flwr-replay runs list` "
            "names the runs"
        )
    read_run_id(folder)
    mark_of(folder)


def _same_options(config: RunConfig, folder: Path) -> None:
    """Refuse to resume a run with other options; rounds, folders, device and waiting times may differ."""
    saved = saved_options(folder)
    now = flat(plain(config))
    differing = sorted(key for key in saved.keys() | now.keys() if saved.get(key) != now.get(key) and key not in FREE)
    if differing and not any(key in saved and key in now for key in differing):
        age, has = ("an older", "no") if differing[0] in now else ("a newer", "an")
        raise RunError(
            f"a run goes on with the version that began it; {folder} is of {age} version of flwr-replay, which has "
            f"{has} option {differing[0]}: begin a new run, or take that version"
        )
    if differing:
        key = next(key for key in differing if key in saved and key in now)
        raise RunError(
            f"a resumed run keeps its options; {key} was {saved.get(key)!r}, now {now.get(key)!r}: leave it out"
        )


def saved_options(folder: Path) -> dict[str, Any]:
    """Return a run's options, by their full names; errors as of `options_of`."""
    return flat(options_of(folder))


def default_name(config: RunConfig) -> str:
    """Name a run by date, strategy, task and seed."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{config.strategy.name}-{config.task.name}-{config.seed}"


def new_run_id(config: RunConfig) -> str:
    """Make an id for a run: its default name and eight random hexadecimal digits."""
    return f"{default_name(config)}-{secrets.token_hex(4)}"
