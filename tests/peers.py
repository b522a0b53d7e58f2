"""Runs of methods with models that live at institutions: small hospitals of equal size, in process."""

import json
import shlex
from contextlib import suppress
from dataclasses import replace

import numpy as np
from flwr.app import Error, Message
from hospitals import node_configs, write_shards

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose
from flwr_replay.files.tensors import unnested
from flwr_replay.institution.peer import unpack_state
from flwr_replay.institution.state import StateStore
from flwr_replay.memory import forget
from flwr_replay.report.progress import Display
from flwr_replay.runs.engine import InlineGrid
from flwr_replay.runs.execute import execute
from flwr_replay.wire.records import config_in

B, N = 16, 40
NAMES = "abcd"
TASK = ["task=medmnist", "task.size=8", "classes=3", "model=mlp", "model.width=6"]
JOB = [*TASK, f"batch_size={B}", "lr=0.05", "device=cpu", "rounds=2"]


def hospitals(folder, names=NAMES, n=N):
    """Write equal shards; return the training examples."""
    return write_shards(folder, dict.fromkeys(names, n))


class Grid(InlineGrid):
    """Fails where told, loses answers, hides institutions, breaks a run off."""

    failing = losing = breaking = ()  # (stage, name, exchange)
    away = ()  # (name, exchange): is not there from the roll call of this exchange on, for one exchange
    exchange = 0
    asked = ()

    def name_of(self, node):
        return self.contexts[node].node_config["name"]

    def get_node_ids(self):
        self.exchange += 1  # the first two calls are before the first exchange
        hidden = {name for name, at in self.away if at == self.exchange - 2}
        return [node for node in super().get_node_ids() if self.name_of(node) not in hidden]

    def _answer(self, message):
        config = config_in(message.content)
        asked = config["stage"], self.name_of(message.metadata.dst_node_id), config["server-round"]
        self.asked += (asked,)
        if asked in self.failing:
            return Message(Error(2, "made to fail"), reply_to=message)
        reply = super()._answer(message)
        if asked in self.breaking:
            raise KeyboardInterrupt
        return Message(Error(2, "lost on its way"), reply_to=message) if asked in self.losing else reply


class Ran:
    """What a run left."""

    def __init__(self, result, folder, grid, root):
        self.result, self.folder, self.grid = result, folder, grid
        self.stores = root / "state"
        self.run = (folder / "run-id").read_text().strip()

    def state(self, name):
        return self.stores / name / "runs" / self.run

    def kept(self, key, name, exchange):
        bound = (self.state(name) / "options.json").read_text()
        return StateStore(type("Owner", (), {"state": self.stores / name})(), bound).at(key, self.run, exchange)

    def private(self, name, exchange):
        """Return φ."""
        return unnested(self.kept("pair", name, exchange))["model"]

    def model(self, name, exchange, key="mixed"):
        """Return θ and w."""
        return unpack_state(self.kept(key, name, exchange))[:2]

    @property
    def ledger(self):
        return [json.loads(line) for line in (self.folder / "ledger.jsonl").read_text().splitlines()]

    def charges(self, name):
        return [json.loads(line) for line in (self.state(name) / "privacy.jsonl").read_text().splitlines()]


def run(folder, *options, names=NAMES, resume="", name="", grid_type=Grid, **watched):
    """Run a job on the hospitals of a folder."""
    overrides = [*JOB, *options]
    grid = grid_type(app, {"overrides": shlex.join(overrides)}, node_configs(folder, folder / "state", names))
    vars(grid).update(watched)
    place = {"runs_dir": str(folder / "runs"), "run_name": name, "resume": resume}
    return Ran(*execute(grid, replace(compose(overrides), **place), Display()), grid, folder)


def broken(folder, *options, **watched):
    """Break a run off and go on with it, with nothing in memory."""
    name = f"broken-{len(list(folder.glob('runs/broken-*')))}"
    with suppress(KeyboardInterrupt):
        run(folder, *options, name=name, **watched)
        raise AssertionError("the run must break off")
    forget()
    return run(folder, *options, resume=str(folder / "runs" / name))


def same(one, other):
    """Say whether two state dicts have the same bits."""
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)


def total(models):
    """Return Σ w θ and Σ w."""
    weighted = [{name: array.astype(np.float64) * w for name, array in theta.items()} for theta, w in models]
    return {name: sum(one[name] for one in weighted) for name in weighted[0]}, sum(w for _, w in models)
