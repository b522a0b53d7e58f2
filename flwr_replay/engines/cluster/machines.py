"""The machines of a Ray cluster: what they offer and have, and which institution is served where.

A machine is what Ray calls a node; a node is Flower's, an institution.
"""

import logging
import os
import secrets
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, floor, inf
from pathlib import Path
from typing import Any

import grpc
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flwr_replay.config.run import RunConfig
from flwr_replay.errors import ConfigError, RunError
from flwr_replay.files.atomic import home, make_folder
from flwr_replay.runs.environment import versions

__all__ = [
    "Equipment",
    "Machine",
    "Share",
    "connected",
    "first_line",
    "living",
    "look",
    "place",
    "settle",
    "share",
    "states",
]

BITS = ("python", "torch", "torchvision", "numpy")  # other versions of these may give other bits
PATIENCE = 5  # seconds that an address may take to answer
STEP = 10_000  # Ray counts resources in ten-thousandths


@dataclass(frozen=True)
class Machine:
    """A living machine of the cluster, and what Ray may use of it."""

    id: str  # new whenever Ray is started there
    address: str
    cpus: float
    gpus: float


@dataclass(frozen=True)
class Share:
    """What one worker gets."""

    cpus: float
    gpus: float

    def fits(self, machine: Machine) -> int:
        """Return how many workers fit on a machine."""
        cpus = machine.cpus / self.cpus if self.cpus else inf
        if self.gpus <= 1:  # no worker gets shares of two GPUs
            gpus = floor(machine.gpus) * floor(1 / self.gpus) if self.gpus else inf
        else:
            gpus = machine.gpus / self.gpus
        return floor(min(cpus, gpus) + 1 / STEP)


@contextmanager
def connected(address: str, environment: Mapping[str, object]) -> Iterator[None]:
    """Join a running Ray cluster; leave it afterwards, which ends what was started on it.

    Parameters
    ----------
    address : str
        `auto`, or host:port of its head.
    environment : Mapping[str, object]
        Ray's runtime environment of all that is started on it.

    Raises
    ------
    RunError
        If it cannot be joined.
    """
    if ray.is_initialized():
        raise RunError("--ray-address joins a Ray cluster; this process has joined one already: call ray.shutdown()")
    _check_answers(address)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of what Ray will do some day
            ray.init(address, runtime_env=dict(environment), log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray's, of many kinds
        raise RunError(
            f"--ray-address must be that of a running Ray cluster to which this machine belongs; {address} cannot be "
            f"joined: {first_line(error)}: run `ray start --address HOST:PORT` here first"
        ) from None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray has set its own
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Refuse an address that is none, or where nobody answers; Ray would try for a minute, then end the process."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdecimal()):
        raise ConfigError(
            f"--ray-address, else RAY_ADDRESS, is auto or HOST:PORT; got {address!r}: `ray start --head` says it"
        )
    try:
        socket.create_connection((host, int(port)), timeout=PATIENCE).close()
    except (OSError, OverflowError) as error:
        raise RunError(f"a Ray cluster must run at {address}; it does not answer: {error}") from None
    if os.environ.get("RAY_USE_TLS", "0") == "0":
        _check_speaks(address)


def _check_speaks(address: str) -> None:
    """Refuse an address where something else than gRPC answers, such as Ray's dashboard."""
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            grpc.channel_ready_future(channel).result(PATIENCE)
        except grpc.FutureTimeoutError:
            raise RunError(
                f"a Ray cluster must run at {address}; something else answers there: `ray start --head` says the "
                "address, and 8265 is the port of its dashboard"
            ) from None


def first_line(error: Exception) -> str:
    """Return what an error of Ray's says, without its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[-1] if any(line.startswith("Traceback") for line in lines) else " ".join(lines)
    return text[:300] or type(error).__name__


def living() -> list[Machine]:
    """Return the cluster's living machines, ordered by address."""
    machines = [
        Machine(
            node["NodeID"], node["NodeManagerAddress"], node["Resources"].get("CPU", 0), node["Resources"].get("GPU", 0)
        )
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    ]
    return sorted(machines, key=lambda machine: (machine.address, machine.id))


def share(config: RunConfig, machines: Sequence[Machine]) -> Share:
    """Return what each worker gets: what the options say, else `threads` cores and an equal share of the GPUs.

    Raises
    ------
    ConfigError
        If no machine has as much, or the options do not fit each other.
    """
    device, gpus = config.device, config.client_gpus
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"on a Ray cluster a worker sees its own GPUs only, so device is auto, cpu or cuda; got {device}"
        )
    if device == "cpu" and gpus:
        raise ConfigError(f"client-gpus must be 0 with device=cpu; got {gpus:g}: leave one of the two out")
    cpus = config.client_cpus or float(config.threads)
    if device != "cpu" and not gpus:
        having = [machine for machine in machines if machine.gpus >= 1]
        there = sum(floor(machine.gpus) for machine in having)
        served = min(config.nodes, sum(Share(cpus, 0).fits(machine) for machine in having))
        gpus = floor(STEP / ceil(served / there)) / STEP if there and served else 0.0
    wanted = Share(cpus, gpus)
    if not any(wanted.fits(machine) for machine in machines):
        offers = ", ".join(f"{machine.address} ({machine.cpus:g} CPUs, {machine.gpus:g} GPUs)" for machine in machines)
        raise ConfigError(
            f"a machine of the cluster must have client-cpus={cpus:g} and client-gpus={gpus:g}; there are {offers}: "
            "ask for less, or start Ray there with --num-cpus and --num-gpus"
        )
    if device == "cuda" and not gpus:
        raise ConfigError("device=cuda needs machines with GPUs; the cluster has none: device=auto takes what there is")
    return wanted


def place(nodes: int, fitting: Mapping[str, int], fixed: Mapping[int, str]) -> list[str]:
    """Say on which machine each institution is served, so that they are evenly loaded.

    Parameters
    ----------
    nodes : int
        How many institutions.
    fitting : Mapping[str, int]
        For each machine's id, how many workers fit there.
    fixed : Mapping[int, str]
        Institutions that have their place already.

    Returns
    -------
    list of str
        A machine's id for each institution.

    Examples
    --------
    >>> place(5, {"a": 2, "b": 1, "c": 0}, {0: "b"})
    ['b', 'a', 'a', 'a', 'a']
    """
    load = {machine: 0 for machine, most in fitting.items() if most}
    for machine in fixed.values():
        load[machine] += 1
    places = []
    for k in range(nodes):
        if (machine := fixed.get(k, "")) == "":
            machine = min(load, key=lambda key: (load[key] + 1) / fitting[key])
            load[machine] += 1
        places.append(machine)
    return places


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
    """Ask every machine what it has, by its id; refuse one that cannot run this package or lacks one of the files.

    `names` are the institutions'; `run_id` is that of a run that is resumed, empty for a new one.
    """
    token = make_folder(home(), "FLWR_REPLAY_HOME") / f".cluster-{secrets.token_hex(8)}.tmp"
    token.touch()
    try:
        pending = {}
        for machine in machines:
            here = NodeAffinitySchedulingStrategy(machine.id, soft=False)
            task: Any = ray.remote(_look).options(num_cpus=0, max_retries=0, scheduling_strategy=here)
            pending[machine.id] = task.remote(str(home()), token.name, tuple(names), run_id, tuple(files))
        return {machine.id: _checked(machine, pending[machine.id]) for machine in machines}
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


def _checked(machine: Machine, pending: Any) -> Equipment:
    try:
        facts: Equipment = ray.get(pending)
    except RayError as error:
        raise RunError(
            f"every machine of the cluster must run flwr-replay; {machine.address}: {first_line(error)}"
        ) from None
    if facts.missing:
        raise RunError(f"every machine of the cluster must have {facts.missing[0]}; {machine.address} has not: copy it")
    for name, ours in versions().items():
        theirs = facts.versions[name]
        if theirs == "absent" and name != "flwr-replay":  # which travels
            raise RunError(f"every machine of the cluster must have {name}; {machine.address} has not: install {ours}")
        if name in BITS and theirs != ours:
            logging.getLogger("flwr").warning(
                "%s has %s %s, this machine %s: bits may differ", machine.address, name, theirs, ours
            )
    return facts
