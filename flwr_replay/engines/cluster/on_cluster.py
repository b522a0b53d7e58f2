"""Runs on a Ray cluster: join it, ship the code, look at its machines, place the institutions, run, and collect.

If every machine sees this one's state directory, they share it. Otherwise each has one of its own, and an institution's
state lies where it was first served: a resumed run finds it there.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flwr_replay
from flwr_replay.config.run import RunConfig
from flwr_replay.engines.simulate import Simulation, named, with_skew
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.files.atomic import write_atomic
from flwr_replay.report.progress import Display
from flwr_replay.report.run_files import FORMS, read_run_id
from flwr_replay.runs.execute import run_job
from flwr_replay.runs.opening import resuming
from flwr_replay.state.store import RUNS
from flwr_replay.wire.ledger import LEDGER, ledger_lines

if TYPE_CHECKING:
    from flwr_replay.engines.cluster.grid import ClusterGrid
    from flwr_replay.engines.cluster.machines import Equipment, Machine

__all__ = ["run_on_cluster", "ship"]

BESIDE = ("strategies", "clients", "simulations", "conf")  # inside the package in a wheel, beside it in a checkout
CODE = (".py", ".toml", ".md", ".yaml", ".json")  # as in a bundle of `flwr run`
LARGEST = 10**7  # bytes


def run_on_cluster(
    address: str, simulation: Simulation, overrides: Sequence[str], display: Display
) -> tuple[dict[str, Any], Path]:
    """Run in this process, with workers on the machines of a running Ray cluster; the results have the same bits.

    Parameters
    ----------
    address : str
        `auto`, or host:port of the cluster's head.
    simulation, overrides, display
        As `flwr_replay.engines.simulate.simulate` has them.

    Raises
    ------
    RunError, ConfigError
        If the cluster cannot be joined, cannot give what the options say, or lacks an institution's state.
    """
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # else `uv run` here means `uv run` on every machine
    from flwr_replay.engines.cluster.grid import ClusterGrid
    from flwr_replay.engines.cluster.machines import connected, living, look, place, share

    config, names = simulation.job.config, simulation.partition.names
    files = _files(config)
    folder, overrides = named(config, overrides)
    simulation = replace(simulation, job=replace(simulation.job, config=replace(config, run_name=folder.name)))
    with tempfile.TemporaryDirectory(prefix="flwr-replay-") as scratch:
        with connected(address, ship(Path(scratch), own=bool(config.own_code))):
            wanted = share(config, living())
            machines = {machine.id: machine for machine in living() if wanted.fits(machine)}
            run_id = read_run_id(folder) if config.resume else ""
            equipped = look(list(machines.values()), names, run_id, files)
            pinned = not all(equipment.shares for equipment in equipped.values())
            kept = _kept(equipped, machines, names, folder) if run_id else {}
            fitting = {key: wanted.fits(machine) for key, machine in machines.items()}
            places = place(len(names), fitting, kept if pinned else {})
            engine = f"--engine ray --ray-address {shlex.quote(address)}"
            grid = ClusterGrid(
                {"overrides": shlex.join(overrides)},
                names,
                [machines[key] for key in places],
                wanted,
                own_code=config.own_code,
                wait=config.wait,
                pinned=pinned,
                engine=engine,
                advice=f"to continue: {resuming(folder, config.rounds, engine)}",
            )
            with grid:
                result, folder = run_job(grid, simulation.job, display)
                states = _collected(grid, read_run_id(folder), Path(scratch) / "states") if pinned else None
        return with_skew(result, folder, simulation, states)


def _files(config: RunConfig) -> list[str]:
    """Return what every machine must have; refuse a relative path: the machines do not work in this folder."""
    own = [config.generator.checkpoint, getattr(config.generator, "perceptual_weights", "")]
    paths = [path for path in (config.task.data_dir, *own) if path]
    for path in paths:
        if not Path(path).is_absolute():
            raise ConfigError(f"on a Ray cluster every machine reads {path}: give its absolute path")
    return paths


def _kept(
    equipped: dict[str, Equipment], machines: dict[str, Machine], names: Sequence[str], folder: Path
) -> dict[int, str]:
    """Return a machine that has an institution's state in the run that is resumed, by partition.

    An institution that has taken part, and whose state is on no living machine, ends the run.
    """
    kept = {k: key for k, name in enumerate(names) for key, equipment in equipped.items() if name in equipment.kept}
    answered = {line["institution"] for line in ledger_lines(folder, FORMS[LEDGER]) if line["direction"] == "up"}
    if lost := [name for k, name in enumerate(names) if name in answered and k not in kept]:
        there = ", ".join(machine.address for machine in machines.values())
        raise RunError(
            f"the state of {', '.join(lost)} in this run must lie on a machine of the cluster; none of {there} has it: "
            "start Ray on the machine that served them, and resume again"
        )
    return kept


def _collected(grid: ClusterGrid, run_id: str, states: Path) -> Path:
    """Copy here what a run's page and its attacks need of the institutions' state: pictures, digests of data."""
    for name, files in grid.shown(run_id).items():
        for path, content in files.items():
            target = states / name / RUNS / run_id / path
            target.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(target, content)
    return states


def ship(scratch: Path, own: bool) -> dict[str, object]:
    """Copy into an empty folder what must travel; return it as entries of Ray's runtime environment.

    The folder must stay until Ray has uploaded it. If the run names code of the user's `own`, the code in the working
    directory travels, too, unless it is too large.
    """
    package = Path(flwr_replay.__file__).parent
    copy, skipped = scratch / "flwr_replay", shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, copy, ignore=skipped)
    for name in BESIDE:
        if not (copy / name).exists():
            shutil.copytree(package.parent / name, copy / name, ignore=skipped)
    environment: dict[str, object] = {"py_modules": [str(copy)]}
    if own:
        _copy_code(Path.cwd(), scratch / "own")
        environment["working_dir"] = str(scratch / "own")
    return environment


def _copy_code(folder: Path, to: Path) -> None:
    """Copy a folder's code; not hidden folders, virtual environments and run directories."""
    size = 0
    for place, folders, names in os.walk(folder):
        if Path(place) != folder and {"pyvenv.cfg", "run-id"} & set(names):
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        for path in (Path(place, name) for name in names if name.endswith(CODE)):
            size += path.stat().st_size
            if size > LARGEST:
                raise ConfigError(
                    f"the code in the working directory travels to the cluster, {', '.join(CODE)} of at most "
                    f"{LARGEST // 10**6} MB; {folder} has more: start in a folder that holds your code alone"
                )
            target = to / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
