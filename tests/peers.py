"""Runs of methods with models that live at institutions: small hospitals of equal size."""

from functools import partial

import harness
import numpy as np
from harness import SHARDS, node_configs, write_shards

from flwr_replay.files.tensors import unnested
from flwr_replay.institution.peer import unpack_state
from flwr_replay.state.store import StateStore

B, N = 16, 40
NAMES = "abcd"
BEFORE = 2  # looks at who is there before the first exchange
TASK = [*SHARDS, "classes=3", "model=mlp", "model.width=6"]
JOB = [*TASK, f"batch_size={B}", "lr=0.05", "device=cpu", "rounds=2"]


def hospitals(folder, names=NAMES, n=N):
    """Write equal shards; return the training examples."""
    return write_shards(folder, dict.fromkeys(names, n))


class Ran(harness.Ran):
    """What a run left, and the models at its institutions."""

    def kept(self, key, name, exchange):
        bound = (self.state(name) / "options.json").read_text()
        return StateStore(type("Owner", (), {"state": self.root / "state" / name})(), bound).at(key, self.run, exchange)

    def private(self, name, exchange):
        """Return φ."""
        return unnested(self.kept("pair", name, exchange))["model"]

    def model(self, name, exchange, key="mixed"):
        """Return θ and w."""
        return unpack_state(self.kept(key, name, exchange))[:2]


def run(folder, *options, names=NAMES, own=None, away=(), **more):
    """Run a job on the hospitals of a folder.

    `own` is what single institutions' configurations have, by name. `away` names who is not there, with the exchange.
    """
    if away:
        more["there"] = lambda grid: [
            node for node in grid.contexts if (grid.name_of(node), grid.looks - BEFORE) not in away
        ]
    nodes = [node | (own or {}).get(node["name"], {}) for node in node_configs(folder, folder / "state", names)]
    return harness.run(folder, [*JOB, *options], nodes, ran=Ran, **more)


broken = partial(harness.broken, run)


def weighted_total(models):
    """Return Σ w θ and Σ w."""
    weighted = [{name: array.astype(np.float64) * w for name, array in theta.items()} for theta, w in models]
    return {name: sum(arrays[name] for arrays in weighted) for name in weighted[0]}, sum(w for _, w in models)
