"""The machines of a Ray cluster: what they offer, and which institution is served where.

A machine is what Ray calls a node; a node is Flower's, an institution.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil, floor, inf

import grpc
import ray

from flwr_replay.config.run import RunConfig
from flwr_replay.errors import ConfigError, RunError

__all__ = ["Machine", "Share", "answers", "connected", "first_line", "living", "place", "share"]

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
        if self.gpus <= 1:  # no worker gets parts of two GPUs
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


def answers(address: str) -> bool:
    """Say whether something accepts connections at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
    except OSError:
        return False
    return True


def first_line(error: Exception) -> str:
    """Return what an error of Ray's says, without its traceback."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[-1] if any(line.startswith("Traceback") for line in lines) else " ".join(lines)
    return said[:300] or type(error).__name__


def living() -> list[Machine]:
    """Return the cluster's living machines, ordered by address."""
    found = [
        Machine(
            one["NodeID"], one["NodeManagerAddress"], one["Resources"].get("CPU", 0), one["Resources"].get("GPU", 0)
        )
        for one in ray.nodes()  # type: ignore[no-untyped-call]
        if one["Alive"]
    ]
    return sorted(found, key=lambda machine: (machine.address, machine.id))


def share(config: RunConfig, machines: Sequence[Machine]) -> Share:
    """Return what each worker gets: what the options say, else `threads` cores and an equal part of the GPUs.

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
        offers = ", ".join(f"{one.address} ({one.cpus:g} CPUs, {one.gpus:g} GPUs)" for one in machines)
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
    found = []
    for k in range(nodes):
        if (machine := fixed.get(k, "")) == "":
            machine = min(load, key=lambda one: (load[one] + 1) / fitting[one])
            load[machine] += 1
        found.append(machine)
    return found
