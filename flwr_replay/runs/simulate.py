"""Runs that the command line starts: in this process, or on Flower's Ray simulation."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr_replay.config.compose import compose, load_strategy
from flwr_replay.config.sections import RunConfig
from flwr_replay.errors import PrivacyError, RunError
from flwr_replay.files.atomic import home, write_json
from flwr_replay.report.progress import Display
from flwr_replay.runs.directory import resumable
from flwr_replay.runs.opening import default_name, read_result, read_run_id
from flwr_replay.runs.superlink import flwr_run, superlink

if TYPE_CHECKING:
    from flwr_replay.data import Partition
    from flwr_replay.privacy.plan import PrivacyPlan

__all__ = ["check_run", "run_inline", "run_ray"]

FAILED = re.compile(r"\W*(?:\[\d+m)?ERROR\W.*?: +error: (.*)")  # how Flower shows what the ServerApp logs in the end


def check_run(config: RunConfig) -> Partition:
    """Refuse, before anything runs, what a simulated run's data, model and institutions do not allow.

    Returns
    -------
    Partition
        Who has which examples.
    """
    from flwr_replay.data.dealt import dealt
    from flwr_replay.runs.execute import settings_of

    part = dealt(config.task, config.partition, config.nodes, config.seed)
    settings = settings_of(config)
    load_strategy(config.strategy.name)[0].check(config.strategy, settings, part.names)
    if plan := settings.privacy:
        sizes = [len(own) for own in part.train]
        _refuse_poor(plan, [sum(sizes)] if plan.pooled else sizes)
    return part


def _refuse_poor(plan: PrivacyPlan, sizes: Sequence[int]) -> None:
    """Refuse a run whose every institution would refuse; the roll call leaves out a few that would."""
    faults: list[PrivacyError] = []
    for examples in dict.fromkeys(sizes):
        try:
            plan.check_first_passes(examples)
        except PrivacyError as fault:
            faults.append(fault)
        else:
            return
    raise faults[0]


def run_inline(overrides: Sequence[str], display: Display) -> tuple[dict[str, Any], Path]:
    """Run in this process, one institution after another."""
    from flwr_replay.client_app import app
    from flwr_replay.runs.engine import InlineGrid
    from flwr_replay.runs.execute import execute

    config = compose(overrides)
    part = check_run(config)
    grid = InlineGrid.simulated(app, {"overrides": shlex.join(overrides)}, config.nodes)
    result, folder = execute(grid, config, display)
    return _with_skew(result, folder, part)


def run_ray(overrides: Sequence[str]) -> tuple[dict[str, Any], Path]:
    """Run on Flower's Ray simulation: a SuperLink of this run's own on a free port, then `flwr run`.

    Raises
    ------
    RunError
        If the run does not end well; Flower's log has gone to the error stream.
    """
    config = compose(overrides)
    part = check_run(config)
    if config.resume:
        folder = Path(config.resume)
    else:
        name = config.run_name or f"{default_name(config)}-ray-{os.getpid()}"
        overrides = [*overrides, f"run_name={name}"]
        folder = Path(config.runs_dir) / name
    cpus = os.cpu_count() or 1
    resources: dict[str, float] = {"num-supernodes": config.nodes}
    resources["client-resources-num-cpus"] = min(config.threads, cpus)
    if gpus := _gpus(config.device):
        resources["client-resources-num-gpus"] = round(gpus / min(config.nodes, cpus), 3)
    federation = " ".join(f"{key}={value}" for key, value in resources.items())
    reason = f"the simulation ended without a result; its log is above: flwr-replay run --resume {folder} goes on"
    scratch = tempfile.TemporaryDirectory(prefix="flwr-replay-")
    with resumable(folder), scratch, superlink(Path(scratch.name)) as link:
        for line in flwr_run(link, overrides, "--federation-config", federation):
            print(line, end="", file=sys.stderr, flush=True)
            if said := FAILED.match(line):
                reason = said[1]
    if not (folder / "result.json").exists():
        raise RunError(reason)
    return _with_skew(read_result(folder), folder, part)


def _with_skew(result: dict[str, Any], folder: Path, part: Partition) -> tuple[dict[str, Any], Path]:
    """Add to a simulated run how skewed its institutions were, and their pictures; a deployment cannot know either."""
    from flwr_replay.institution.pictures import gather
    from flwr_replay.institution.state import RUNS

    run_id = read_run_id(folder)
    gather({name: home() / "state" / "simulation" / name / RUNS / run_id for name in part.names}, folder)
    result = {**result, "skew": part.skew}
    write_json(folder / "result.json", result, indent=2)
    return result, folder


def _gpus(device: str) -> int:
    import torch

    return torch.cuda.device_count() if device == "auto" or device.startswith("cuda") else 0
