"""Stage 3 of FedReplay at the server: batches read ahead, several processes, recorded messages.

    python benchmarks/server.py ahead [--rows 4096] [--repeats 7] [--device cpu]
    python benchmarks/server.py processes [--rows 4096] [--repeats 7] [--device cpu] [--count 2]
    python benchmarks/server.py record [--repeats 7]

The first two compare two ways in turn in one process, and print medians and the median of the paired ratios. `ahead`:
an epoch in which a thread reads each batch while the last one trains, beside one that reads and trains in turn; `warm`,
and with the latents' pages dropped from the system's cache before every epoch (`cold`). `processes`: an epoch in
several processes that have started, beside one in this process. `record`: what the server's ledger and recorded
messages cost in a round with an evaluation, beside stage 3 in the same run.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from flwr_replay.config.compose import compose
from flwr_replay.config.run import RunConfig
from flwr_replay.engines.simulate import run_inline
from flwr_replay.learning.latents import LatentStore, on_device, prefetched
from flwr_replay.learning.ranks import Ranks
from flwr_replay.learning.tasks import make_task
from flwr_replay.learning.training import make_optimizer, select_device, torch_rng
from flwr_replay.models import placed, split
from flwr_replay.models.zoo import backbone
from flwr_replay.payloads.fedreplay import Latents
from flwr_replay.report.progress import Display
from flwr_replay.runs.directory import RunDirectory
from flwr_replay.strategies.fedreplay import FedReplay, descend

JOBS = {  # from training that takes all of the time to reading that does
    "cnn, conv1": "task=mnist model=cnn model.width=16 model.norm=group",
    "cnn, conv1, int8": "task=mnist model=cnn model.width=16 model.norm=group strategy.latent_dtype=int8",
    "resnet18, layer1": "task=cifar10 model=resnet18 model.width=32 model.norm=group strategy.cut=layer1",
    "resnet18, layer4": "task=cifar10 model=resnet18 model.width=64 model.norm=group strategy.cut=layer4",
}
ROUNDS = 8
RUN = "strategy=fedreplay task=digits partition=iid nodes=4 model=cnn model.width=16 encoder=random device=cpu"


def stored(config: RunConfig, rows: int, folder: Path) -> LatentStore:
    """Write the latents of two institutions; their values do not matter, their shape does."""
    encoder, _ = split(backbone(config.model, config.task)(0), config.strategy.cut)
    with torch.inference_mode():
        shape = encoder.eval()(torch.zeros(1, config.task.channels, config.task.size, config.task.size)).shape[1:]
    store, draw, n = LatentStore(folder), np.random.default_rng(0), rows // 2
    for name in "ab":
        labels = draw.integers(0, config.task.classes, n)
        values, scales = draw.normal(size=(n, *shape)).astype(np.float32), None
        if config.strategy.latent_dtype == "int8":
            values, scales = (20 * values).clip(-127, 127).astype(np.int8), np.ones(n, np.float32)
        latents = Latents(latents=values, labels=labels, scales=scales, num_examples=n, first=0, total=n, raw_bytes=1)
        store.add(name, latents)
    return store


def dropped(folder: Path) -> None:
    """Drop the files below a folder from the system's cache."""
    for path in folder.rglob("*.npy"):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


class Primary:
    """The part after the cut, with its optimizer and an epoch's batches."""

    def __init__(self, config: RunConfig, store: LatentStore, device: torch.device) -> None:
        self.config, self.store, self.device = config, store, device
        self.loss = make_task(config.task).loss
        self.module: nn.Module = split(placed(backbone(config.model, config.task)(0), device), config.strategy.cut)[1]
        self.optimizer = make_optimizer(self.module, config.training, config.training.lr)
        self.e = partial(store.batches, config.training.batch_size, torch_rng(0))

    def plain(self) -> None:
        """Read and train in turn."""
        moved: Iterator[tuple[Tensor, Tensor]] = ((x.to(self.device), y.to(self.device)) for x, y in self.e())
        torch.stack(descend(self.module, self.optimizer, self.loss, moved)).mean().item()

    def ahead(self) -> None:
        """Read each batch while the last one trains."""
        e = on_device(self.e(), self.device) if self.device.type == "cuda" else prefetched(self.e())
        torch.stack(descend(self.module, self.optimizer, self.loss, e)).mean().item()

    def by(self, ranks: Ranks) -> None:
        """Train in several processes."""
        size = min(self.config.training.batch_size, len(self.store))
        ranks.train(descend, self.module, self.optimizer, self.config.training, self.loss, self.e, size)


def compare(name: str, ways: Sequence[Callable[[], object]], repeats: int, before: Callable[[], object]) -> None:
    """Print the medians of two ways, and of the ratios of the second to the first."""
    seconds: list[list[float]] = [[], []]
    for repeat in range(repeats + 1):
        for k in (0, 1) if repeat % 2 else (1, 0):
            before()
            begun = time.perf_counter()
            ways[k]()
            if repeat:  # the first warms up
                seconds[k].append(time.perf_counter() - begun)
    say(name, *seconds)


def say(name: str, first: Sequence[float], second: Sequence[float]) -> None:
    """Print a row of a table."""
    ratios = [b / a for a, b in zip(first, second, strict=True)]
    mine, other = statistics.median(first), statistics.median(second)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"| {name} | {mine:.3f} | {other:.3f} | {statistics.median(ratios):.3f} ({spread}) |", flush=True)


def recorded(repeats: int) -> None:
    """Time stage 3 and what the server writes of its messages, within one run of each kind."""
    print(
        "| record | stage 3, ms a round | ledger and recording, ms a round | calls during stage 3 |\n|---|---|---|---|"
    )
    for record in ("none", "all"):
        stage, written, inside = list[float](), list[float](), 0
        for _ in range(repeats):
            spent, at_work = {"learn": 0.0, "write": 0.0}, False

            def timed(kind: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
                nonlocal at_work, inside
                inside += at_work
                at_work, begun = kind == "learn", time.perf_counter()
                try:
                    return call(*given, **named)
                finally:
                    at_work = False
                    spent[kind] += time.perf_counter() - begun  # noqa: B023

            ways = (
                (FedReplay, "learn", "learn"),
                (RunDirectory, "travelled", "write"),
                (RunDirectory, "flush", "write"),
            )
            with tempfile.TemporaryDirectory() as folder, ExitStack() as patched:
                patched.enter_context(patch.dict(os.environ, FLWR_REPLAY_HOME=folder))
                for owner, name, kind in ways:
                    patched.enter_context(patch.object(owner, name, method_of(timed, kind, getattr(owner, name))))
                run_inline([*RUN.split(), f"rounds={ROUNDS}", f"record={record}", f"runs_dir={folder}"], Display())
            stage.append(1000 * spent["learn"] / ROUNDS)
            written.append(1000 * spent["write"] / ROUNDS)
        print(
            f"| {record} | {statistics.median(stage):.1f} | {statistics.median(written):.1f} | {inside} |", flush=True
        )


def method_of(timed: Callable[..., Any], kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that is timed."""
    return lambda *given, **named: timed(kind, call, *given, **named)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["ahead", "processes", "record"])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--count", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.what == "record":
        recorded(asked.repeats)
        return
    print("| | first, s | second, s | second / first, median (range) |\n|---|---|---|---|")
    device = select_device(asked.device)
    for name, options in JOBS.items():
        with tempfile.TemporaryDirectory() as folder:
            config = compose(["strategy=fedreplay", *options.split()])
            store = stored(config, asked.rows, Path(folder))
            primary, kept = Primary(config, store, device), lambda: None
            if asked.what == "ahead":
                compare(f"{name}, warm", [primary.plain, primary.ahead], asked.repeats, kept)
                cold = partial(dropped, Path(folder))
                compare(f"{name}, cold", [primary.plain, primary.ahead], asked.repeats, cold)
                continue
            with closing(Ranks(asked.count, device)) as ranks:
                compare(
                    name,
                    [primary.ahead if device.type == "cuda" else primary.plain, partial(primary.by, ranks)],
                    asked.repeats,
                    kept,
                )


if __name__ == "__main__":
    main()
