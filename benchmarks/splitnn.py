"""The cost of SplitNN's messages: batches per second, and the share of time outside PyTorch.

    python benchmarks/splitnn.py inline --data ../shared/data/mnist
    python benchmarks/splitnn.py ray --data ../shared/data/mnist

Four institutions x 640 MNIST images, a CNN cut after conv1, batch 32: 20 batches and 21 messages each way in a visit.
The plain loop takes the steps of both parts with PyTorch, including the institution's second forward pass, on the same
tensors and in the same order, without messages, files or ledgers. In process the two alternate visit by visit, and the
median of the paired ratios counts; `--profile` splits the remaining time. On Ray the plain loop runs separately. The
time of a visit runs from the end of the previous visit. Visits with an evaluation or start-up are left out.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import json
import pstats
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from flwr_replay.config.compose import compose
from flwr_replay.config.run import RunConfig
from flwr_replay.data.dealt import dealt, loaded
from flwr_replay.engines.simulate import Simulation, run_inline, run_ray
from flwr_replay.institution.owner import Shard
from flwr_replay.learning.tasks import make_task
from flwr_replay.learning.training import batches, make_optimizer, torch_rng
from flwr_replay.models import split
from flwr_replay.models.zoo import backbone
from flwr_replay.report.progress import Display
from flwr_replay.rng import derived_seed

NODES, EXAMPLES, BATCH = 4, 640, 32
BATCHES = EXAMPLES // BATCH  # in a visit
WHERE = {  # what the profile adds up, by file and function, with all that these call
    "part saved and loaded": [("splitnn.py", "save_part"), ("splitnn.py", "load_part")],
    "payloads to records": [("payload.py", "encode"), ("serve.py", "_metrics"), ("records.py", "record")],
    "records to payloads": [("payload.py", "decode"), ("serve.py", "_received")],
    "ledgers": [("directory.py", "travelled"), ("directory.py", "flush"), ("owner.py", "record_release")],
}


class Pairing(Display):
    """A display that times each visit of a run, and after it one visit of the plain loop."""

    def __init__(self, plain: Iterator[None]) -> None:
        self.plain = plain
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self.profile = cProfile.Profile()
        self.profiled = False

    def begin(self, progress: object) -> None:
        """Start the clock."""
        self.start = time.perf_counter()

    def exchange(self, exchange: int, metrics: object, total_bytes: int, seconds: float) -> None:
        """Stop the clock, run a plain visit, start the clock."""
        middle = time.perf_counter()
        self.profile.disable()
        before = time.perf_counter()
        next(self.plain)
        self.theirs.append(time.perf_counter() - before)
        self.ours.append(middle - self.start)
        if self.profiled:
            self.profile.enable()
        self.start = time.perf_counter()


def plain_visits(config: RunConfig) -> Iterator[None]:
    """Run the visits of a run with plain PyTorch; each step of the iterator is one visit."""
    dealing, task = dealt(config.task, config.partition, config.nodes, config.seed), make_task(config.task)
    shards = [
        Shard.of(dealing.examples(loaded(config.task), k).train, torch.device("cpu")) for k in range(config.nodes)
    ]
    model = backbone(config.model, config.task)(derived_seed(config.seed, "model"))
    encoder, server = split(model, config.strategy.cut)
    for number in range(1, config.rounds * config.nodes + 1):
        k = (number - 1) % config.nodes
        steps = [make_optimizer(half, config.training, config.training.lr) for half in (encoder, server)]
        shuffle = torch_rng(config.seed, f"institution-{k + 1}", number)
        for x_B, y_B in batches(shards[k].x, shards[k].y, BATCH, shuffle):
            with torch.no_grad():
                a_B = encoder(x_B)  # the activations that are uploaded
            a_B.requires_grad_()
            task.loss(server(a_B), y_B).backward()
            encoder(x_B).backward(a_B.grad)
            for step in steps:
                step.step()
                step.zero_grad()
        yield


def inline(config: RunConfig, overrides: list[str], profiled: bool) -> tuple[list[float], list[float]]:
    """Return seconds per visit of the plain loop and of the in-process engine; optionally print a profile."""
    pairing = Pairing(plain_visits(config))
    pairing.profiled = profiled
    run_inline(overrides, pairing)
    if profiled:
        functions = pstats.Stats(pairing.profile).stats.items()  # type: ignore[attr-defined]
        whole = sum(pairing.ours[1:])  # the profile begins with the second visit
        for what, where in WHERE.items():
            spent = sum(value[3] for (file, _, name), value in functions if (Path(file).name, name) in where)
            per_batch = 1000 * spent / (len(pairing.ours) - 1) / BATCHES
            print(f"{what:28} {per_batch:6.2f} ms a batch, {100 * spent / whole:4.1f} %")
    return pairing.theirs[1:-1], pairing.ours[1:-1]


def ray(config: RunConfig, overrides: list[str]) -> tuple[list[float], list[float]]:
    """Return seconds per visit of the plain loop and of a Ray simulation, from its run directory."""
    _, folder = run_ray(Simulation.of(compose(overrides)), overrides)
    stamps = [json.loads(line)["seconds"] for line in (folder / "timings.jsonl").read_text().splitlines()]
    plain, theirs = plain_visits(config), []
    for _ in range(config.rounds * config.nodes):
        start = time.perf_counter()
        next(plain)
        theirs.append(time.perf_counter() - start)
    return theirs[1:-1], [after - before for before, after in itertools.pairwise(stamps)][:-1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=["inline", "ray"])
    parser.add_argument("--data", required=True, help="folder with MNIST's idx files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=16, help="maps of conv1")
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument(
        "--profile", action="store_true", help="in process: profile where the time goes, which slows it down"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        overrides = ["strategy=splitnn", "task=mnist", "partition=iid", f"partition.size={EXAMPLES}", "model=cnn"]
        overrides += [f"model.width={given.width}", f"nodes={NODES}", f"batch_size={BATCH}", f"rounds={given.rounds}"]
        overrides += [f"task.data_dir={Path(given.data).resolve()}", "threads=1", "device=cpu", f"runs_dir={runs}"]
        overrides += [f"micro_batches={given.micro_batches}", f"evaluate_every={given.rounds}"]
        config = compose(overrides)
        torch.set_num_threads(config.threads)
        theirs, ours = inline(config, overrides, given.profile) if given.engine == "inline" else ray(config, overrides)
    for what, seconds in (("plain loop", theirs), (given.engine, ours)):
        per_batch = statistics.median(seconds) / BATCHES
        print(f"{what:12} {1 / per_batch:7.1f} batches/s   {1000 * per_batch:7.2f} ms a batch   n {len(seconds)}")
    if given.engine == "inline":
        outside = 1 - statistics.median(plain / own for plain, own in zip(theirs, ours, strict=True))
        print(f"outside PyTorch {100 * outside:.0f} % (median of paired ratios)")
    else:
        print(f"outside PyTorch {100 * (1 - statistics.median(theirs) / statistics.median(ours)):.0f} % (of medians)")


if __name__ == "__main__":
    main()
