"""What each machine of a Ray cluster has: versions, files, and the institutions' state."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flwr_replay.engines.cluster.machines import Machine, first_line
from flwr_replay.errors import RunError
from flwr_replay.files.atomic import home, make_folder
from flwr_replay.runs.environment import versions

__all__ = ["Equipment", "look", "settle", "states"]

BITS = ("python", "torch", "torchvision", "numpy")  # other versions of these may give other bits


@dataclass(frozen=True)
class Equipment:
    """What a machine has."""

    versions: dict[str, str]
    missing: tuple[str, ...]  # files
    shares: bool  # the state directory of the machine that asks
    kept: tuple[str, ...]  # institutions whose state in the run lies there


def settle(folder: str) -> None:
    """Let this process use the state directory of its own machine: Ray's, if it was started with one, else `folder`."""
    os.environ.setdefault("FLWR_REPLAY_HOME", folder)


def states() -> Path:
    """Return the folder of simulated institutions' state directories."""
    return home() / "state" / "simulation"


def look(machines: Sequence[Machine], names: Sequence[str], run_id: str, files: Sequence[str]) -> dict[str, Equipment]:
    """Ask every machine what it has.

    Parameters
    ----------
    machines : sequence of Machine
        At least one.
    names : sequence of str
        The institutions.
    run_id : str
        Of a run that is resumed; empty: none.
    files : sequence of str
        Absolute paths that must be there.

    Returns
    -------
    dict of str to Found
        By the machine's id.

    Raises
    ------
    RunError
        If a machine cannot run this package, or lacks a file.
    """
    token = make_folder(home(), "FLWR_REPLAY_HOME") / f".cluster-{secrets.token_hex(8)}.tmp"
    token.touch()
    try:
        asked = {}
        for machine in machines:
            here = NodeAffinitySchedulingStrategy(machine.id, soft=False)
            task: Any = ray.remote(_look).options(num_cpus=0, max_retries=0, scheduling_strategy=here)
            asked[machine.id] = task.remote(str(home()), token.name, tuple(names), run_id, tuple(files))
        return {machine.id: _checked(machine, asked[machine.id]) for machine in machines}
    finally:
        token.unlink()


def _look(folder: str, token: str, names: tuple[str, ...], run_id: str, files: tuple[str, ...]) -> Equipment:
    settle(folder)
    return Equipment(
        versions(),
        tuple(file for file in files if not Path(file).exists()),
        (home() / token).exists(),
        tuple(name for name in names if run_id and (states() / name / "runs" / run_id).is_dir()),
    )


def _checked(machine: Machine, asked: Any) -> Equipment:
    try:
        found: Equipment = ray.get(asked)
    except RayError as error:
        raise RunError(
            f"every machine of the cluster must run flwr-replay; {machine.address}: {first_line(error)}"
        ) from None
    if found.missing:
        raise RunError(f"every machine of the cluster must have {found.missing[0]}; {machine.address} has not: copy it")
    for name, ours in versions().items():
        theirs = found.versions[name]
        if theirs == "absent" and name != "flwr-replay":  # which travels
            raise RunError(f"every machine of the cluster must have {name}; {machine.address} has not: install {ours}")
        if name in BITS and theirs != ours:
            logging.getLogger("flwr").warning(
                "%s has %s %s, this machine %s: bits may differ", machine.address, name, theirs, ours
            )
    return found
