"""Making a run directory, or finding the one to resume."""

from __future__ import annotations

import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr_replay.compose import to_yaml
from flwr_replay.config import RunConfig
from flwr_replay.errors import RunError
from flwr_replay.files import NAME, home, make_folder, write_atomic

__all__ = ["default_name", "new_run_id", "open_run"]


def open_run(config: RunConfig) -> tuple[RunConfig, str]:
    """Make a new run directory, or find the one to resume.

    Returns
    -------
    config : RunConfig
        With `runs_dir` and `run_name` set.
    run_id : str
        What the institutions know the run by; no other run has it, whatever its directory is called.

    Raises
    ------
    RunError
        If the folder cannot be written, exists already, or holds no run to resume.
    """
    if config.resume:
        folder = Path(config.resume).expanduser().absolute()
        if not (folder / "config.yaml").exists():
            raise RunError(f"resume must be a run directory with a config.yaml; got {folder}")
        _same_options(config, folder / "config.yaml")
        run_id = (folder / "run-id").read_text(encoding="utf-8").strip() if (folder / "run-id").exists() else ""
        if not NAME.fullmatch(run_id):
            raise RunError(f"{folder / 'run-id'} must hold the run's id; got {run_id!r}: begin a new run")
        return replace(config, runs_dir=str(folder.parent), run_name=folder.name), run_id
    if config.run_name and not NAME.fullmatch(config.run_name):
        raise RunError(
            "run-name has letters, digits, spaces, dots, hyphens and underscores and begins with a letter or digit; "
            f"got {config.run_name!r}"
        )
    root = make_folder(Path(config.runs_dir or home() / "runs").expanduser().absolute(), "runs-dir")
    stem = default_name(config)
    name, number = config.run_name or stem, 1
    while True:
        try:
            (root / name).mkdir()
            break
        except FileExistsError:
            if config.run_name:
                raise RunError(f"run-name must be new; {root / name} exists: resume it or choose another") from None
            number += 1
            name = f"{stem}-{number}"
    opened = replace(config, runs_dir=str(root), run_name=name)
    run_id = new_run_id(config)
    write_atomic(root / name / "run-id", run_id + "\n")
    write_atomic(root / name / "config.yaml", to_yaml(opened))  # last: with it the folder is a run
    return opened, run_id


def _same_options(config: RunConfig, file: Path) -> None:
    """Refuse a resumption under other options; more rounds, other places and waiting times are no such difference."""
    import yaml

    try:
        saved = _flat(yaml.safe_load(file.read_text(encoding="utf-8")))
    except (yaml.YAMLError, AttributeError) as error:
        raise RunError(
            f"the run's config.yaml must be readable; {file} is not: {' '.join(str(error).split())}"
        ) from None
    now = _flat(yaml.safe_load(to_yaml(config)))
    free = ["runs_dir", "run_name", "resume", "rounds", "nodes", "timeout", "wait", "device", "task.data_dir"]
    free += ["replay.missing"]
    differing = sorted(key for key in saved.keys() | now.keys() if saved.get(key) != now.get(key) and key not in free)
    if differing:
        key = differing[0]
        raise RunError(
            f"a resumed run keeps its options; {key} was {saved.get(key)!r}, now {now.get(key)!r}: leave it out"
        )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def default_name(config: RunConfig) -> str:
    """Name a run by date, strategy, task and seed."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{config.strategy.name}-{config.task.name}-{config.seed}"


def new_run_id(config: RunConfig) -> str:
    """Make an id for a run: its default name and eight random hexadecimal digits."""
    return f"{default_name(config)}-{secrets.token_hex(4)}"
