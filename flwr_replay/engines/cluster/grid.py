"""The grid of a Ray cluster: actors on its machines serve the nodes, see `workers.py`.

An institution stays on its machine. Where all machines share the state directory, the institutions of a machine that
dies go to others, and what was asked of them is asked again: a repeated message gives the same bits. Where each machine
has a state directory of its own, the run ends, and a resumed run finds every institution where its state lies.

The actors are this process's: Ray ends them when it ends, for whatever reason.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

import ray
from flwr.app import Message
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from flwr_replay.client_app import app
from flwr_replay.config.own_code import allow
from flwr_replay.engines.cluster.machines import Machine, Share, first_line, living, settle, states
from flwr_replay.engines.inline import InlineGrid, partitions
from flwr_replay.engines.superlink import answers
from flwr_replay.engines.workers import TRIES, Worker, WorkerGrid, died
from flwr_replay.errors import RunError
from flwr_replay.files.atomic import home, read_bytes
from flwr_replay.state.store import DATA, RUNS

__all__ = ["ClusterGrid"]

LOOK = 2.0  # seconds between two looks at the head
SILENT = 30.0  # seconds without the head that end the run; after 60 Ray ends this process, without a line of ours


class ClusterGrid(WorkerGrid):
    """A simulation's institutions, served by actors on a cluster's machines; use it as a context.

    Parameters
    ----------
    run_config : Mapping[str, Any]
        Flower's run config, which every node gets.
    names : Sequence[str]
        The institutions' names, by partition.
    places : Sequence[Machine]
        The machine of each.
    wanted : Share
        What an actor gets.
    own_code : Sequence[str]
        Code of the user's own that the actors may import.
    wait : float
        Seconds that an actor may take to start.
    pinned : bool
        Whether each machine has a state directory of its own, so that an institution is pinned to its machine.
    engine : str
        The options of `flwr-replay run` that name this cluster.
    advice : str
        What to do if the run ends.
    """

    def __init__(
        self,
        run_config: Mapping[str, Any],
        names: Sequence[str],
        places: Sequence[Machine],
        wanted: Share,
        *,
        own_code: Sequence[str],
        wait: float,
        pinned: bool,
        engine: str,
        advice: str,
    ) -> None:
        super().__init__(run_config, partitions(len(names)))
        self.names = dict(zip(self.contexts, names, strict=True))
        self.wanted, self.wait, self.pinned, self.engine, self.advice = wanted, wait, pinned, engine, advice
        self.addresses = {machine.address for machine in places}
        self.headless, self.over = False, threading.Event()
        served = (run_config, len(names), str(home()), tuple(own_code))
        crews: dict[str, list[_Actor]] = {}
        for node_id, machine in zip(self.contexts, places, strict=True):
            crew = crews.setdefault(machine.id, [])
            if len(crew) < wanted.fits(machine):
                crew.append(_Actor(self, machine, served))
            else:
                crew.append(crew.pop(0))  # the next in turn
            self.serving[node_id] = crew[-1]
        self.workers = self.actors = [actor for crew in crews.values() for actor in crew]

    def __enter__(self) -> Self:
        threading.Thread(target=self.watch, args=(ray.get_runtime_context().gcs_address,), daemon=True).start()
        return super().__enter__()

    def __exit__(self, *raised: object) -> None:
        self.over.set()
        super().__exit__(*raised)

    def watch(self, head: str) -> None:
        """End the run where the head of the cluster answers no more."""
        heard = time.monotonic()
        while not self.over.wait(LOOK):
            if answers(head):
                heard = time.monotonic()
            elif time.monotonic() - heard > SILENT:
                self.headless = True
                self.broken(f"the head of the Ray cluster must live; {head} has not answered for {SILENT:g} s")
                return

    def broken(self, reason: str) -> None:
        """Note why the run cannot go on, which ends it."""
        super().broken(f"{reason}; {self.advice}")

    def shown(self, run_id: str) -> dict[str, dict[str, bytes]]:
        """Return the files of each institution's state that a run's page and its attacks need, by path."""
        pending = [actor.actor.shown.remote(actor.names, run_id) for actor in self.actors]
        try:
            return {name: files for shown in ray.get(pending) for name, files in shown.items()}
        except RayError as error:
            raise RunError(
                f"every machine must live until its files are copied: {first_line(error)}; {self.advice}"
            ) from None

    def moved(self, actor: _Actor, message: Message) -> bool:
        """Give an actor whose machine has died another machine, or its institutions and messages to other actors.

        Returns
        -------
        bool
            Whether the actor has another machine.
        """
        with self._changed:
            machines = {machine.id: machine for machine in living() if machine.address in self.addresses}
            if self.pinned:
                names = ", ".join(actor.names)
                self.broken(f"machine {actor.machine.address}, which has the state of {names}, must live; it has died")
                return False
            taken = Counter(other.machine.id for other in self.actors if not other.closed)
            free = {key: self.wanted.fits(machine) - taken[key] for key, machine in machines.items()}
            if roomy := [key for key, room in free.items() if room > 0]:
                actor.machine = machines[max(roomy, key=lambda key: free[key])]
                return True
            actor.closed = True
            others = [other for other in self.actors if not other.closed and other.machine.id in machines]
            if not others:
                self.broken("the cluster must have a machine with room for a worker; all have died")
                return False
            for node_id in [node_id for node_id, server in self.serving.items() if server is actor]:
                load = Counter(self.serving.values())
                self.serving[node_id] = min(others, key=lambda other: load[other])
            waiting: list[Message | None] = [message]
            while not actor.queue.empty():
                waiting.append(actor.queue.get())
            for unanswered in filter(None, waiting):
                self.serving[unanswered.metadata.dst_node_id].queue.put(unanswered)
            return False


class _Actor(Worker):
    """A Ray actor on one machine."""

    faults = (RayError,)

    def __init__(self, grid: ClusterGrid, machine: Machine, served: tuple[Any, ...]) -> None:
        super().__init__(grid)
        self.cluster, self.machine, self.served = grid, machine, served
        self.closed = False  # it serves no institution any more

    @property
    def names(self) -> list[str]:
        """The institutions that it serves."""
        return [name for node_id, name in self.cluster.names.items() if self.cluster.serving[node_id] is self]

    def start(self) -> None:
        here = NodeAffinitySchedulingStrategy(self.machine.id, soft=False)
        wanted = self.cluster.wanted
        options = {"num_cpus": wanted.cpus, "num_gpus": wanted.gpus, "scheduling_strategy": here}
        self.actor: Any = ray.remote(_Served).options(**options).remote(*self.served)  # type: ignore[attr-defined]
        self.ready = False

    def ask(self, message: Message) -> Message:
        if not self.ready:
            gpus = ray.get(self.actor.gpus.remote(), timeout=self.cluster.wait)
            self.ready = True
            names, where = ", ".join(self.names), f"{self.machine.address}, GPUs {gpus or 'none'}"
            logging.getLogger("flwr").info("%s: %s", names, where)
        reply: Message = ray.get(self.actor.answer.remote(message))
        return reply

    def lost(self, message: Message, fault: Exception) -> Message | None:
        tries = 1
        while True:
            self.kill()
            if isinstance(fault, GetTimeoutError):
                self.cluster.broken(
                    f"a worker must start within wait={self.cluster.wait:g} s; the one on {self.machine.address} has "
                    "not: others may use the machine, or it is slow and wait too short"
                )
                return None
            dead = self.machine.id not in {machine.id for machine in living()}
            if dead and not self.cluster.moved(self, message):
                return None
            if not dead and not self.ready and tries > TRIES:
                self.cluster.broken(f"a worker must start on {self.machine.address}; it ended: {first_line(fault)}")
                return None
            ready = self.ready
            self.start()
            if not dead and ready and tries > TRIES:
                return died(message, first_line(fault))
            tries += not dead
            try:
                return self.ask(message)
            except RayError as error:
                if self.ending:
                    return None
                fault = error

    def end(self, at_once: bool) -> None:
        if self.cluster.headless:  # nobody can be asked to end it; it ends with this process
            self.ending = True
        else:
            super().end(at_once)

    def kill(self) -> None:
        ray.kill(self.actor)


class _Served:
    """What a machine's actor runs."""

    def __init__(self, run_config: Mapping[str, Any], nodes: int, folder: str, own_code: Sequence[str]) -> None:
        settle(folder)
        allow(own_code)
        self.nodes = InlineGrid(app, run_config, partitions(nodes))

    def gpus(self) -> str:
        """Return the GPUs that this process sees."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def answer(self, message: Message) -> Message:
        """Answer a message to one of the nodes."""
        return self.nodes.answer(message)

    def shown(self, names: Sequence[str], run_id: str) -> dict[str, dict[str, bytes]]:
        """Return institutions' pictures in a run, and the digests of their data, by name and path."""
        folders = {name: states() / name / RUNS / run_id for name in names}
        paths = {name: [*folder.glob("pictures/*.png"), *folder.glob(DATA)] for name, folder in folders.items()}
        return {
            name: {str(path.relative_to(folders[name])): read_bytes(path) for path in files}
            for name, files in paths.items()
        }
