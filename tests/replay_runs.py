"""Runs that the tests of replay share: unequal small hospitals, a small generator and prior."""

from functools import partial
from typing import Any

import harness
from harness import SHARDS, node_configs
from safetensors.numpy import load_file

from flwr_replay.generators.codes import unpack_codes
from flwr_replay.wire.records import StateDict

B = 16
SIZES = {"a": 70, "b": 33, "c": 5}  # 4, 2 and 1 batches
N, K = 5, 8  # codes of an image, and of the codebook
GENERATOR = ["generator.width=4", f"generator.codes={K}", "generator.dim=4", f"generator.batch_size={B}"]
PRIOR = ["prior.width=4", "prior.layers=1", "prior.epochs=2", f"prior.batch_size={B}"]
FEW = ["rounds=1", "generator.epochs=1", "prior.epochs=1"]
TASK = [*SHARDS, "classes=3", "model=cnn", "model.width=4"]
JOB = [*TASK, *GENERATOR, *PRIOR, "generator.epochs=2", f"batch_size={B}", "lr=0.05", "device=cpu", "rounds=2"]


class Ran(harness.Ran):
    """What a run left, and what of it lies with the generator."""

    @property
    def weights(self) -> StateDict:
        return load_file(self.folder / "models" / "global.safetensors")

    def visit(self, what: str, number: int) -> StateDict:
        return load_file(self.folder / "replay" / f"{what}-{number:03d}.safetensors")

    def codes(self, number: int, size: int = K) -> Any:
        return unpack_codes(self.visit("codes", number)["codes"], N, size)


def run(folder, *options, nodes=None, **more):
    """Run the small job on the hospitals of a folder."""
    return harness.run(folder, [*JOB, *options], nodes or node_configs(folder, folder / "state"), ran=Ran, **more)


def simulated(folder, *options, nodes=2):
    """Run a job on parts of one data set, each with a state directory in the folder."""
    overrides = [*GENERATOR, *PRIOR, *FEW, "strategy=cwt", "device=cpu", f"nodes={nodes}", *options]
    partitions = [{"partition-id": k, "num-partitions": nodes, "state": str(folder / "state")} for k in range(nodes)]
    return harness.run(folder, overrides, partitions, ran=Ran)


broken = partial(harness.broken, run)
