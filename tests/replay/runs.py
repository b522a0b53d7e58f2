"""Runs that the tests of replay share: small hospitals, nodes that fail, runs that break off and go on."""

import json
import shlex
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import Error, Message
from hospitals import node_configs
from safetensors.numpy import load_file

from flwr_replay.client_app import app
from flwr_replay.config.compose import compose, overrides_of
from flwr_replay.generators.codes import unpack_codes
from flwr_replay.report.progress import Display
from flwr_replay.runs.engine import InlineGrid
from flwr_replay.runs.execute import execute
from flwr_replay.wire.records import StateDict, config_in

B = 16
SIZES = {"a": 70, "b": 33, "c": 5}  # 4, 2 and 1 batches
N, K = 5, 8  # codes of an image, and of the codebook
GENERATOR = ["generator.width=4", f"generator.codes={K}", "generator.dim=4", f"generator.batch_size={B}"]
PRIOR = ["prior.width=4", "prior.layers=1", "prior.epochs=2", f"prior.batch_size={B}"]
FEW = ["rounds=1", "generator.epochs=1", "prior.epochs=1"]
TASK = ["task=medmnist", "task.size=8", "classes=3", "model=cnn", "model.width=4"]
JOB = [*TASK, *GENERATOR, *PRIOR, "generator.epochs=2", f"batch_size={B}", "lr=0.05", "device=cpu", "rounds=2"]


class Watched(InlineGrid):
    """Notes what is asked of whom; some requests fail, and one breaks the run off once it is answered."""

    asked: tuple[tuple[str, str], ...] = ()  # (stage, institution), in order
    failing: tuple[tuple[str, str], ...] = ()
    failing_first: tuple[tuple[str, str], ...] = ()  # once for every time that it stands here
    breaking: tuple[str, str] | None = None
    late: str = ""  # joins after the first round's training

    def get_node_ids(self):
        trained = any(stage == "train" for stage, _ in self.asked)
        return [node for node in super().get_node_ids() if trained or self.name_of(node) != self.late]

    def name_of(self, node):
        config = self.contexts[node].node_config
        return config["name"] if "name" in config else f"institution-{config['partition-id'] + 1}"

    def before(self, stage, name):
        """Do something to an institution before it answers."""

    def _answer(self, message):
        asked = config_in(message.content)["stage"], self.name_of(message.metadata.dst_node_id)
        self.asked += (asked,)
        if asked in self.failing or self.asked.count(asked) <= self.failing_first.count(asked):
            return Message(Error(2, "made to fail"), reply_to=message)
        self.before(*asked)
        reply = super()._answer(message)
        if asked == self.breaking:
            raise KeyboardInterrupt
        return reply


class Stopping(Display):
    """Breaks a run off after its n-th checkpoint; checkpoints of the generator's visits count too."""

    def __init__(self, after=None):
        self.left = after

    def exchange(self, *progress):
        if self.left is not None:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt


@dataclass
class Ran:
    """What a run left."""

    result: dict[str, Any]
    folder: Path
    grid: Watched
    root: Path

    @property
    def weights(self) -> StateDict:
        return load_file(self.folder / "models" / "global.safetensors")

    def visit(self, what: str, number: int) -> StateDict:
        return load_file(self.folder / "replay" / f"{what}-{number:03d}.safetensors")

    def codes(self, number: int, size: int = K) -> Any:
        return unpack_codes(self.visit("codes", number)["codes"], N, size)

    def state(self, name: str) -> Path:
        return self.root / "state" / name / "runs" / (self.folder / "run-id").read_text().strip()

    @property
    def ledger(self) -> list[dict[str, Any]]:
        return lines(self.folder / "ledger.jsonl")

    def own_ledger(self, name: str) -> list[dict[str, Any]]:
        run = (self.folder / "run-id").read_text().strip()
        return [entry for entry in lines(self.root / "state" / name / "ledger.jsonl") if entry["run"] == run]

    def charges(self, name: str) -> list[dict[str, Any]]:
        return lines(self.state(name) / "privacy.jsonl")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(folder, *options, name="", stop_after=None, grid_type=Watched, nodes=None, resume="", **watched):
    """Run the small job on the hospitals of a folder."""
    grid = grid_type(app, {"overrides": shlex.join([*JOB, *options])}, nodes or node_configs(folder, folder / "state"))
    vars(grid).update(watched)
    place = {"runs_dir": str(folder / "runs"), "run_name": name, "resume": resume}
    return Ran(*execute(grid, replace(compose([*JOB, *options]), **place), Stopping(stop_after)), grid, folder)


def simulated(folder, *options, nodes=2):
    """Run a job on parts of one data set, each with a state directory in the folder."""
    overrides = [*GENERATOR, *PRIOR, *FEW, "strategy=cwt", "device=cpu", f"nodes={nodes}", *options]
    state = str(folder / "state")
    grid = Watched.simulated(app, {"overrides": shlex.join(overrides)}, nodes, state=state)
    return Ran(*execute(grid, replace(compose(overrides), runs_dir=str(folder / "runs")), Display()), grid, folder)


def broken(folder, *options, typed=False, **watched):
    """Break a run off and go on with it; `typed`: by what the command line reads in its run directory."""
    name = f"broken-{len(list(folder.glob('runs/broken-*')))}"
    with suppress(KeyboardInterrupt):
        run(folder, *options, name=name, **watched)
        raise AssertionError("the run must break off")
    stopped = folder / "runs" / name
    assert not (stopped / "result.json").exists()
    options = overrides_of(stopped / "config.yaml") if typed else options
    return run(folder, *options, resume=str(stopped))


def same(one, other):
    """Say whether two state dicts have the same bits."""
    return one.keys() == other.keys() and all(one[name].tobytes() == other[name].tobytes() for name in one)
