"""Small honest runs in process: hospitals on the disk, a grid, what a run left, runs that break off and go on."""

import json
import os
import shlex
import shutil
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from grid import Grid

from flwr_replay.cli.main import main
from flwr_replay.client_app import app
from flwr_replay.config.compose import compose, overrides_of
from flwr_replay.files.tensors import OF_RUN, read_with_texts, write_tensors
from flwr_replay.memory import forget
from flwr_replay.models.zoo import backbone
from flwr_replay.report.progress import Display
from flwr_replay.report.run_files import BOUND, FILES
from flwr_replay.rng import derived_seed
from flwr_replay.runs.execute import execute
from flwr_replay.server.recorder import Recorder
from flwr_replay.wire.records import array_record
from flwr_replay.wire.weights import to_arrays

SHARDS = ["task=medmnist", "split=test", "task.size=8"]  # hospitals of `write_shards`, which train on all they have


def forked(work, *arguments):
    """Let a forked process do some work; return its id. It ends there: else two processes would run the tests."""
    child = os.fork()
    if not child:
        try:
            work(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def checkout(folder):
    """Copy this checkout without its environment, in which `flwr run .` would look at every file; return the folder."""

    def left_out(place, names):
        return [name for name in names if name == "__pycache__" or (name[0] == "." and name != ".gitignore")]

    return shutil.copytree(Path(__file__).parents[1], folder, ignore=left_out)


def write_shards(folder, sizes):
    """Write an .npz of 8 x 8 images for each hospital; return its training examples, as numbers in [0, 1]."""
    rng = np.random.default_rng(0)
    data = {}
    for name, n in sizes.items():
        x, y = rng.integers(0, 256, (n + 9, 8, 8), np.uint8), rng.integers(0, 3, n + 9)
        arrays = {"train_images": x[:n], "train_labels": y[:n], "test_images": x[n:], "test_labels": y[n:]}
        np.savez(folder / f"{name}.npz", **arrays)
        data[name] = torch.from_numpy(x[:n, None]) / 255, torch.from_numpy(y[:n])
    return data


def node_configs(folder, state, names="cab"):
    """Return the SuperNodes' configurations; their order is not that of the names."""
    return [{"name": name, "data": str(folder / f"{name}.npz"), "state": str(state)} for name in names]


def fresh(config, purpose="model"):
    """Encode the backbone's fresh weights, as the server does."""
    return array_record(to_arrays(backbone(config.model, config.task)(derived_seed(0, purpose))))


class Seen(Recorder):
    """Counts the examples used; keeps the metrics of the last evaluation."""

    examples = 0

    def saw(self, examples):
        self.examples += examples

    def evaluated(self, exchange, pooled, own):
        self.last = pooled, own


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
    grid: Grid
    root: Path

    @property
    def run(self):
        return (self.folder / "run-id").read_text().strip()

    @property
    def ledger(self):
        return json_lines(self.folder / "ledger.jsonl")

    def state(self, name):
        return self.root / "state" / name / "runs" / self.run

    def own_ledger(self, name):
        return [entry for entry in json_lines(self.root / "state" / name / "ledger.jsonl") if entry["run"] == self.run]

    def charges(self, name):
        return json_lines(self.state(name) / "privacy.jsonl")


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(folder, overrides, nodes, name="", resume="", stop_after=None, ran=Ran, **script):
    """Run a job on the hospitals of a folder; the script is the grid's."""
    grid = Grid(app, {"overrides": shlex.join(overrides)}, nodes)
    vars(grid).update(script)
    place = {"runs_dir": str(folder / "runs"), "run_name": name, "resume": resume}
    return ran(*execute(grid, replace(compose(overrides), **place), Stopping(stop_after)), grid, folder)


def command(patch, *words):
    """Run the command line; return its exit code."""
    patch.setattr("sys.argv", ["flwr-replay", *words])
    try:
        main()
    except SystemExit as ended:
        return ended.code or 0
    return 0


def broken(run, folder, *options, typed=False, **script):
    """Break a run off and go on with it, with nothing in memory; `typed`: by what its run directory says."""
    name = f"broken-{len(list(folder.glob('runs/broken-*')))}"
    with suppress(KeyboardInterrupt):
        run(folder, *options, name=name, **script)
        raise AssertionError("the run must break off")
    stopped = folder / "runs" / name
    assert not (stopped / "result.json").exists()
    forget()
    return run(folder, *(overrides_of(stopped / "config.yaml") if typed else options), resume=str(stopped))


def same(left, right):
    """Say whether two state dicts have the same bits."""
    return left.keys() == right.keys() and all(left[name].tobytes() == right[name].tobytes() for name in left)


def older(folder):
    """Make of a run one of an older version, which vouches for nothing."""
    (folder / "SHA256SUMS").unlink()
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text().removeprefix(BOUND))
    for file in folder.glob("*.json"):
        values = json.loads(file.read_text())
        file.write_text(json.dumps({key: values[key] for key in values if key not in (OF_RUN, FILES, "crc32")}))
    for file in (*folder.glob("checkpoints/*.safetensors"), *folder.glob("messages/*.safetensors")):
        arrays, texts = read_with_texts(file)
        if "about" in texts:
            texts["about"] = json.dumps({**json.loads(texts["about"]), OF_RUN: ""})
        write_tensors(file, arrays, {key: texts[key] for key in texts if key not in (OF_RUN, "crc32")})
