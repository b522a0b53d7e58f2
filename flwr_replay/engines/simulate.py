"""Runs that the command line starts: in this process, or on Flower's Ray simulation."""

import logging
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import torch
from flwr.clientapp import ClientApp

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose
from flwr_replay.config.halves import load_strategy
from flwr_replay.config.run import RunConfig
from flwr_replay.data import Partition
from flwr_replay.data.dealt import dealt, loaded
from flwr_replay.data.skew import is_continuous, label_histogram
from flwr_replay.engines.inline import InlineGrid, partitions
from flwr_replay.engines.superlink import flwr_run, superlink
from flwr_replay.engines.workers import LocalGrid
from flwr_replay.errors import ConfigError, PrivacyError, RunError
from flwr_replay.files.atomic import home, read_text, write_atomic
from flwr_replay.generators.pictures import gather
from flwr_replay.privacy.account import Account
from flwr_replay.privacy.plan import PrivacyPlan
from flwr_replay.report.metrics import ALIKE, OWN_MIX
from flwr_replay.report.progress import Display, shown_bytes
from flwr_replay.report.run_files import read_result, read_run_id, write_result
from flwr_replay.report.run_page import PAGE, write_run_page
from flwr_replay.report.templates import spared
from flwr_replay.runs.execute import Job, run_job
from flwr_replay.runs.opening import default_name, resumable, resuming
from flwr_replay.state.store import DATA, RUNS
from flwr_replay.wire.recording import FOLDER

__all__ = ["Simulation", "named", "refuse_resources", "run_inline", "run_ray", "simulate", "simulate_by", "with_skew"]

FAILED = re.compile(r"\W*(?:\[\d+m)?ERROR\W.*?: +error: (.*)")  # how Flower prints the ServerApp's last error
LEAST = 3 * 10**8  # bytes of a worker; PyTorch and this package alone took 580 MB of its own
NOTHING = "the simulation ended without a result; see its log above"


@dataclass(frozen=True)
class Simulation:
    """A simulated and planned run, with the examples of each institution."""

    job: Job
    partition: Partition

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Split a simulated run's data and plan the run.

        Raises
        ------
        FlwrReplayError
            If data, model and institutions do not fit each other; nothing has run or been written by then.
        """
        partition = dealt(config.task, config.partition, config.nodes, config.seed)
        job = Job.of(config, partition.names)
        if plan := job.settings.privacy:
            sizes = [len(indices) for indices in partition.train]
            _refuse_poor(plan, [sum(sizes)] if plan.pooled else sizes)
        if (synthesis := job.settings.synthesis) and "train-piece" in job.strategy("").all_stages():
            labels = loaded(config.task).train.y
            synthesis.check_labels([labels[indices] for indices in partition.train])
        return cls(job, partition)

    def accounts(self, folder: Path) -> dict[str, Account]:
        """Return the accounts of a run of these institutions on this machine, by name; none without DP."""
        plan, states, run = self.job.settings.privacy, home() / "state" / "simulation", read_run_id(folder)
        own = dict(zip(self.partition.names, map(len, self.partition.train), strict=True)) if plan else {}
        return {
            name: Account(
                states / name / RUNS / run, delta=plan.config.delta_for(sum(own.values()) if plan.pooled else n)
            )
            for name, n in own.items()
            if plan
        }


def _refuse_poor(plan: PrivacyPlan, sizes: Sequence[int]) -> None:
    """Refuse a run that every institution would refuse; if only some would, the roll call leaves those out."""
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
    """Compose and plan a run, then run it in this process."""
    return simulate(Simulation.of(compose(overrides)), overrides, display)


def simulate(
    simulation: Simulation, overrides: Sequence[str], display: Display, served_by: ClientApp = app
) -> tuple[dict[str, Any], Path]:
    """Run in this process, one institution after another.

    Parameters
    ----------
    simulation : Simulation
        Planned from the overrides.
    overrides : Sequence[str]
        Every institution composes its options from them, as in a deployment.
    display : Display
        Shows the progress.
    served_by : ClientApp
        The institutions' half: the one that is deployed, or an audit's.
    """
    refuse_resources(simulation.job.config)
    grid = InlineGrid.simulated(served_by, {"overrides": shlex.join(overrides)}, simulation.job.config.nodes)
    return with_skew(*run_job(grid, simulation.job, display), simulation)


def simulate_by(
    workers: int, simulation: Simulation, overrides: Sequence[str], display: Display
) -> tuple[dict[str, Any], Path]:
    """Run in this process, with several worker processes for the institutions; the results have the same bits."""
    config = simulation.job.config
    refuse_resources(config)
    if min(workers, config.nodes) * LEAST > (free := psutil.virtual_memory().available):
        raise ConfigError(
            f"--workers must fit into memory; got {workers}, each takes {shown_bytes(LEAST)} and more, and "
            f"{shown_bytes(free)} are free: give fewer"
        )
    if (wanted := workers * config.threads) > (cores := os.cpu_count() or 1):
        logging.getLogger("flwr").warning("workers x threads are %s, cores %s: fewer may be faster", wanted, cores)
    with LocalGrid({"overrides": shlex.join(overrides)}, partitions(config.nodes), workers) as grid:
        return with_skew(*run_job(grid, simulation.job, display), simulation)


def refuse_resources(config: RunConfig) -> None:
    """Refuse what only Ray gives; a run that was begun on Ray may be resumed without it."""
    if (config.client_cpus or config.client_gpus) and not config.resume:
        raise ConfigError(
            f"client-cpus and client-gpus belong to --engine ray; got client-cpus={config.client_cpus:g} and "
            f"client-gpus={config.client_gpus:g}: leave them out (`flwr run` has --federation-config "
            "'client-resources-num-cpus=1 client-resources-num-gpus=0.5')"
        )


def run_ray(simulation: Simulation, overrides: Sequence[str]) -> tuple[dict[str, Any], Path]:
    """Run on Flower's Ray simulation: start a SuperLink for this run on a free port, then `flwr run`.

    The parameters are those of `simulate`. The ServerApp runs in its own process and plans the run again.

    Raises
    ------
    RunError
        If the run fails; Flower's log is on stderr.
    """
    config = simulation.job.config
    folder, overrides = named(config, overrides)
    overrides = [word for word in overrides if not word.replace("-", "_").startswith(("client_cpus=", "client_gpus="))]
    sees_gpus = config.device == "auto" or config.device.startswith("cuda")
    cpus, gpus = os.cpu_count() or 1, torch.cuda.device_count() if sees_gpus else 0
    if config.client_cpus > cpus or config.client_gpus > gpus:
        raise ConfigError(
            f"this machine must have client-cpus={config.client_cpus:g} and client-gpus={config.client_gpus:g} for "
            f"device={config.device}; it has {cpus} cores and {gpus} GPUs: ask for less, or name a Ray cluster by "
            "--ray-address"
        )
    if not config.client_cpus.is_integer():
        raise ConfigError(
            f"client-cpus must be whole on this machine, since Flower's simulation counts whole cores; got "
            f"{config.client_cpus:g}: a share needs a Ray cluster, see --ray-address"
        )
    resources: dict[str, float] = {"num-supernodes": config.nodes}
    resources["client-resources-num-cpus"] = int(config.client_cpus) or min(config.threads, cpus)
    if gpus:
        resources["client-resources-num-gpus"] = config.client_gpus or round(gpus / min(config.nodes, cpus), 3)
    federation = " ".join(f"{key}={value}" for key, value in resources.items())
    reason = ""
    scratch = tempfile.TemporaryDirectory(prefix="flwr-replay-")
    with resumable(folder, config.rounds), scratch, superlink(Path(scratch.name)) as link:
        for line in flwr_run(link, overrides, "--federation-config", federation):
            print(line, end="", file=sys.stderr, flush=True)
            if error := FAILED.match(line):
                reason = error[1]
    # a run that was to become longer has the result of its fewer rounds
    if not (folder / "result.json").exists() or (result := read_result(folder))["rounds"] < config.rounds:
        if not folder.exists():
            raise RunError(reason or f"{NOTHING}; it had not begun: repeat the command")
        diverged = "finite" in reason  # it would diverge again
        raise RunError(reason if diverged else f"{reason or NOTHING}; to continue: {resuming(folder, config.rounds)}")
    return with_skew(result, folder, simulation)


def named(config: RunConfig, overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """Return a run's directory, and the overrides that name it."""
    if config.resume:
        return Path(config.resume), list(overrides)
    name = config.run_name or f"{default_name(config)}-ray-{os.getpid()}"
    return Path(config.runs_dir) / name, [*overrides, f"run_name={name}"]


def with_skew(
    result: dict[str, Any], folder: Path, simulation: Simulation, states: Path | None = None
) -> tuple[dict[str, Any], Path]:
    """Add what a deployment's server does not know of its institutions: skew, pictures, digests of recorded data.

    `states` holds a state directory for each institution; None: those of this machine's simulations.
    """
    run_id, partition = read_run_id(folder), simulation.partition
    names = partition.names
    root = states or home() / "state" / "simulation"
    states_of = {name: root / name / RUNS / run_id for name in names}
    with spared(folder / "pictures"):
        gather(states_of, folder)
    for name, state in states_of.items():
        if (state / DATA).exists() and (folder / FOLDER).is_dir():  # not where somebody has removed the messages
            write_atomic(folder / FOLDER / f"{name}.sha256", read_text(state / DATA))
    labels = loaded(simulation.job.config.task).train.labels
    values, counts_KC = label_histogram([labels[indices] for indices in partition.train])
    named = [f">= {value:.3g}" if is_continuous(labels) else str(value) for value in values]
    counts = {"values": named, "institutions": dict(zip(names, counts_KC.tolist(), strict=True))}
    result = {**result, "skew": {**partition.skew, "labels": counts}, "privacy": _placed(result["privacy"], names)}
    result["final"] = {**result["final"], "institutions": _placed(result["final"]["institutions"], names)}
    dealing = simulation.job.config.partition
    private = load_strategy(result["strategy"])[0].traits().private_key
    mix = ALIKE if dealing.test == "iid" and dealing.name != "natural" else OWN_MIX
    if private and mix not in result["metrics-note"]:
        result["metrics-note"] += f" {mix}"
    write_result(folder, result)
    with spared(folder / PAGE):
        write_run_page(folder)
    return result, folder


def _placed(own: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return what institutions have in the order in which the data name these, as tables show them."""
    return {name: own[name] for name in (*names, *own) if name in own}
