"""The cost of features that are computed once: beside plain PyTorch, the pass that computes them, and rounds on them.

    python benchmarks/features.py pass --data ../shared/data/cifar10-8k.npz --size 96 --images 256 --repeats 15
    python benchmarks/features.py answer --data ../shared/data/cifar10-8k.npz --size 96 --images 500 --repeats 5
    python benchmarks/features.py rounds --data ../shared/data/cifar10-8k.npz --size 32 --rounds 51

The encoder is EfficientNet-Lite0 with its ImageNet weights, on one thread of a CPU. `pass` computes and keeps features
with nothing kept before, and in turn passes the same images through the same encoder, in batches of as many and in
batches of 64, without digests and files. `answer` adds FedStats' sums, products and noise to that. `rounds` is FedAvg
on 8 institutions, model.train=head, one pass and one test a round, in process; its features are there. In turn the loop
of engine.py takes the same batches and steps of the head alone on the same features, and tests on as many; after it
Flower's own FedAvg does so with a plain ClientApp. Medians of the paired ratios count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from engine import Pairing, flower, sequential
from numpy.typing import NDArray

from flwr_replay.clients.fedstats import FedStatsClient
from flwr_replay.config.compose import compose
from flwr_replay.config.run import RunConfig
from flwr_replay.data import Dataset, Examples
from flwr_replay.data.dealt import dealt, loaded
from flwr_replay.data.decoded import FOLDER, DecodedImages
from flwr_replay.engines.simulate import run_inline
from flwr_replay.files.atomic import home
from flwr_replay.institution.features import FeatureSource, featured
from flwr_replay.institution.owner import Shard
from flwr_replay.models.frozen import Frozen
from flwr_replay.models.layers import as_input
from flwr_replay.models.zoo import encoder_of
from flwr_replay.payloads.fedstats import ClassSums, Summarise
from flwr_replay.report.progress import Display

CPU = torch.device("cpu")


def plain(encoder: Frozen, x: NDArray[np.uint8], together: int) -> float:
    """Return the seconds of a plain pass."""
    begun = time.perf_counter()
    made = np.empty((len(x), *encoder.shape), np.float32)
    with torch.inference_mode():
        for first in range(0, len(x), together):
            made[first : first + together] = encoder.stages(as_input(torch.from_numpy(x[first : first + together])))
    return time.perf_counter() - begun


def ours(dataset: Dataset, config: RunConfig, encoder: Frozen, place: Path) -> float:
    """Return the seconds of computing the features and keeping them."""
    begun = time.perf_counter()
    featured(dataset, config.task, encoder, CPU, DecodedImages(place, 1e10))
    return time.perf_counter() - begun


def passes(config: RunConfig, encoder: Frozen, images: int, repeats: int) -> None:
    """Print what the pass takes beside plain ones."""
    few, none = (loaded(config.task).train.take(np.arange(count)) for count in (images, 0))
    source = FeatureSource(config.task, {"train": few}, encoder, CPU)
    sizes, seconds = (source.together, 64), []
    plain(encoder, few.x[:64], 64)  # PyTorch's own first time
    for repeat in range(repeats):
        mine = ours(Dataset("few", few, none), config, encoder, home() / str(repeat))
        seconds.append((mine, *(plain(encoder, few.x, size) for size in sizes)))
    for place, size in enumerate(sizes, 1):
        theirs = [pair[place] for pair in seconds]
        report(f"plain pass, batches of {size}", theirs, "pass", [pair[0] for pair in seconds])


def answers(config: RunConfig, overrides: list[str], encoder: Frozen, images: int, repeats: int) -> None:
    """Print what FedStats' answer of one institution takes, its features computed anew, beside a plain pass."""
    file, took, summarise = home() / "few.npz", list[float](), FedStatsClient.summarise
    few, none = (loaded(config.task).train.take(np.arange(count)) for count in (images, 0))
    with np.load(config.task.data_dir) as arrays:
        np.savez(file, **{name: array[: images if "train" in name else 9] for name, array in arrays.items()})
    job = [*overrides, "strategy=fedstats", "head=lda", "dp=statistics", "target_epsilon=8", "delta=1e-5", "nodes=1"]
    job += [f"task.data_dir={file}", f"partition.size={images}", "rounds=1", "split=test", f"runs_dir={home()}"]

    def timed(client: FedStatsClient, request: Summarise) -> ClassSums:
        begun = time.perf_counter()
        made = summarise(client, request)
        took.append(time.perf_counter() - begun)
        return made

    theirs, mine = list[float](), list[float]()
    size = FeatureSource(config.task, {"train": few}, encoder, CPU).together
    with patch.object(FedStatsClient, "summarise", timed):
        for repeat in range(repeats):
            run_inline([*job, f"seed={repeat}"], Display())
            mine.append(took[-1] + ours(Dataset("few", few, none), config, encoder, home() / str(repeat)))
            theirs.append(plain(encoder, few.x, size))
    report(f"plain pass, batches of {size}", theirs, "FedStats' answer", mine)
    print(f"of which sums and noise {statistics.median(took):.4f} s")


def flat(examples: Examples) -> Shard:
    """Return features as a linear layer takes them."""
    return Shard(torch.from_numpy(examples.x.reshape(len(examples), -1)), torch.from_numpy(examples.y), 0)


def rounds(config: RunConfig, overrides: list[str], encoder: Frozen) -> None:
    """Print what rounds take beside the plain loop's."""
    features = featured(loaded(config.task), config.task, encoder, CPU, DecodedImages(home() / FOLDER, 1e10))
    dealing = dealt(config.task, config.partition, config.nodes, config.seed)
    owned = [dealing.examples(features, k) for k in range(config.nodes)]
    shards = [(flat(own.train), flat(own.test)) for own in owned]
    head = slice(-1, None)
    pairing = Pairing(sequential(config, shards, head))
    run_inline(overrides, pairing)
    report("plain loop, a round", pairing.theirs, "in process", pairing.ours)
    flowers = flower(config, shards, head)
    report("plain loop, a round", flowers.theirs, "Flower's FedAvg", flowers.ours)


def report(name: str, theirs: Sequence[float], own: str, mine: Sequence[float]) -> None:
    """Print medians and the median ratio."""
    for what, seconds in ((name, theirs), (own, mine)):
        print(f"{what:30} median {statistics.median(seconds):.4f} s   min {min(seconds):.4f}   max {max(seconds):.4f}")
    ratios = [first / other for first, other in zip(mine, theirs, strict=True)]
    print(f"ratio  {statistics.median(ratios):.3f} (median of {len(ratios)} pairs)")


def main() -> None:
    """Measure and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pass", "answer", "rounds"])
    parser.add_argument("--data", required=True, help="CIFAR-10 in MedMNIST's layout")
    parser.add_argument("--size", type=int, default=96, help="pixels to which images are brought")
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--examples", type=int, default=500, help="at each institution")
    parser.add_argument("--rounds", type=int, default=51)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FLWR_REPLAY_HOME"] = folder
        overrides = [
            "strategy=fedavg",
            "task=medmnist",
            "channels=3",
            "task.size=32",
            "task.classes=10",
            "partition=iid",
        ]
        overrides += [f"task.data_dir={Path(given.data).resolve()}", "nodes=8", "model=lite0"]
        overrides += [f"model.size={given.size}", "model.train=head", "device=cpu", "threads=1"]
        overrides += [f"rounds={given.rounds}", f"partition.size={given.examples}"]
        config = compose(overrides)
        encoder = encoder_of(config.model, config.task)
        assert encoder is not None
        if given.what == "pass":
            passes(config, encoder, given.images, given.repeats)
        elif given.what == "answer":
            answers(config, overrides, encoder, given.images, given.repeats)
        else:
            rounds(config, overrides, encoder)


if __name__ == "__main__":
    main()
