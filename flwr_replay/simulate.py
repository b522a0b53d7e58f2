"""Runs that the command line starts: in this process, or on Flower's Ray simulation."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from flwr_replay.compose import COMMAND_LINE, compose, load_strategy, overrides_of
from flwr_replay.config import RunConfig, TaskConfig
from flwr_replay.errors import ConfigError, PrivacyError, RunError
from flwr_replay.family import MARK, family
from flwr_replay.files import home, write_json
from flwr_replay.opening import check_unchanged, default_name, read_result, read_run_id
from flwr_replay.progress import Display
from flwr_replay.run import resumable

if TYPE_CHECKING:
    from flwr_replay.data import Partition
    from flwr_replay.privacy.plan import PrivacyPlan

__all__ = [
    "SuperLink",
    "check_run",
    "flower",
    "flwr_run",
    "free_port",
    "resolve",
    "run_inline",
    "run_ray",
    "streamed",
    "superlink",
]

INLINE_NODES = 4
FAILED = re.compile(r"\W*(?:\[\d+m)?ERROR\W.*?: +error: (.*)")  # how Flower shows what the ServerApp logs in the end
APP = """\
[project]
name = "flwr-replay-run"
version = "1.0.0"
description = "One run of flwr-replay."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "flwr-replay"

[tool.flwr.app.components]
serverapp = "flwr_replay.server_app:app"
clientapp = "flwr_replay.client_app:app"

[tool.flwr.app.config]
overrides = ""
"""


def resolve(options: Sequence[str], runs_dir: str, resume: str) -> tuple[list[str], RunConfig]:
    """Turn a command line into overrides and the configuration they give; a resumed run keeps its own options.

    Raises
    ------
    ConfigError
        For a wrong option, or options that would change a resumed run.
    """
    for option in options:
        if option.partition("=")[0].replace("-", "_") in COMMAND_LINE:
            raise ConfigError(f"runs-dir and resume are given as --runs-dir and --resume; got {option!r}")
    if resume:
        for option in options:
            key = option.partition("=")[0].replace("-", "_")
            if key.removeprefix("task.") not in ("rounds", "timeout", "wait", "device", "data_dir", "replay.missing"):
                raise ConfigError(
                    "a resumed run keeps its options, but for rounds, device, timeout, wait, replay.missing and "
                    f"task.data-dir; got {option!r} beside --resume: leave it out"
                )
        overrides = [*_overrides_of_run(Path(resume).expanduser()), *options]
        overrides.append(f"resume={_quoted(Path(resume).expanduser().absolute())}")
    else:
        overrides = [*options, f"runs_dir={_quoted(Path(runs_dir).expanduser().absolute())}"]
    config = compose(overrides)
    if config.task.data_dir:  # found again from wherever the run is resumed
        place = Path(config.task.data_dir).expanduser().absolute()
        config = replace(config, task=replace(config.task, data_dir=str(place)))
        overrides.append(f"task.data_dir={_quoted(place)}")
    if matrices := getattr(config.strategy, "topology_file", ""):
        overrides.append(f"strategy.topology_file={_quoted(Path(matrices).expanduser().absolute())}")
    if config.model.weights:  # found again from wherever the run is resumed
        overrides.append(f"model.weights={_quoted(Path(config.model.weights).expanduser().absolute())}")
    nodes = config.nodes or (_sites(config.task) if config.partition.name == "natural" else INLINE_NODES)
    overrides.append(f"nodes={nodes}")
    return overrides, compose(overrides)


def _overrides_of_run(folder: Path) -> list[str]:
    file = folder / "config.yaml"
    if not file.exists():
        raise RunError(f"--resume must be a run directory with a config.yaml; got {folder}")
    check_unchanged(folder)
    try:
        return overrides_of(file)
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError, AttributeError) as error:
        detail = " ".join(str(error).split())
        raise RunError(f"a run's config.yaml must be as the run wrote it; {file} is damaged: {detail}") from None


def _sites(task: TaskConfig) -> int:
    from flwr_replay.data import site_names
    from flwr_replay.institution import loaded

    return len(site_names(loaded(task)))


def check_run(config: RunConfig) -> Partition:
    """Refuse, before anything runs, what a simulated run's data, model and institutions do not allow.

    Returns
    -------
    Partition
        Who has which examples.
    """
    from flwr_replay.institution import dealt
    from flwr_replay.server_app import settings_of

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
    from flwr_replay.engine import InlineGrid
    from flwr_replay.server_app import execute

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
    from flwr_replay.replay.pictures import gather
    from flwr_replay.state import RUNS

    run_id = read_run_id(folder)
    gather({name: home() / "state" / "simulation" / name / RUNS / run_id for name in part.names}, folder)
    result = {**result, "skew": part.skew}
    write_json(folder / "result.json", result, indent=2)
    return result, folder


@dataclass(frozen=True)
class SuperLink:
    """A SuperLink of one's own on the loopback."""

    port: int
    folder: Path  # its FLWR_HOME, with config.toml and superlink.log
    environment: dict[str, str]  # reaches it, and finds Flower's programs


@contextmanager
def superlink(scratch: Path, simulation: bool = True) -> Iterator[SuperLink]:
    """Start a SuperLink on the loopback; afterwards, or should this process be killed, all that it started is stopped.

    Parameters
    ----------
    scratch : Path
        An empty folder that becomes FLWR_HOME; its connection `replay` leads to this SuperLink.
    simulation : bool
        Simulate the SuperNodes with Ray; otherwise `flower-supernode` processes join.

    Raises
    ------
    RunError
        If it does not start.
    """
    port = free_port()
    (scratch / "config.toml").write_text(
        f'[superlink]\ndefault = "replay"\n[superlink.replay]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    )
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "FLWR_HOME": str(scratch),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [flower("flower-superlink"), "--insecure", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--simulation"] if simulation else []
    command += ["--control-api-address", f"127.0.0.1:{free_port()}", "--disable-runtime-dependency-installation"]
    with open(scratch / "superlink.log", "w") as log, family() as mark:
        environment[MARK] = mark
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 60
        while not _answers(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RunError(f"the SuperLink must start; it said: {(scratch / 'superlink.log').read_text()[-500:]}")
            time.sleep(0.1)
        yield SuperLink(port, scratch, environment)


def flwr_run(link: SuperLink, overrides: Sequence[str], *arguments: str) -> Iterator[str]:
    """Run this package's apps with `flwr run`; yield its output, line by line.

    The bundle that travels holds no code: the apps are those of the package installed at each place.
    """
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=link.folder))
    (folder / "app").mkdir()
    (folder / "app" / "pyproject.toml").write_text(APP)
    (folder / "run.toml").write_text(f"overrides = {json.dumps(shlex.join(overrides))}\n")
    yield from streamed(link, folder / "app", "--run-config", str(folder / "run.toml"), *arguments)


def streamed(link: SuperLink, app: Path, *arguments: str) -> Iterator[str]:
    """Run an app of anyone's with `flwr run … --stream`; yield its output, line by line."""
    command = [flower("flwr"), "run", str(app), "replay", "--stream", *arguments]
    stream = subprocess.Popen(
        command, env=link.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert stream.stdout is not None
    yield from stream.stdout
    stream.wait()


def free_port() -> int:
    """Return a port of the loopback that nothing uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _gpus(device: str) -> int:
    import torch

    return torch.cuda.device_count() if device == "auto" or device.startswith("cuda") else 0


def flower(name: str) -> str:
    """Find one of Flower's programs beside this interpreter, else on PATH."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "\\'") + "'"
