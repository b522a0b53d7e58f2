"""Images per second of what is trained at clinical size, with one and with several institutions on a device.

    python benchmarks/throughput.py [--device auto] [--institutions 1 2 4] [--seconds 20] [--batch 16] [--only resnet34]

`resnet34`: the classifier of 224 x 224 RGB images, SGD. `vqvae2`: the paper's generator of 256 x 256 RGB images, Adam.
Both have the published width, and steps of the package's own training. Institutions are processes that begin their
steps at the same time. On a CPU they share out the cores; on a GPU all of them use the one. Images are noise, which
takes the same work. Memory is an institution's peak: PyTorch's tensors on a GPU, the whole process on a CPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
from generators import now
from torch import multiprocessing

from flwr_replay.config.compose import compose
from flwr_replay.generators.autoencoder import VQVAE2Config, build_generator
from flwr_replay.learning.tasks import make_task
from flwr_replay.learning.training import make_optimizer, select_device, torch_rng
from flwr_replay.models.layers import step
from flwr_replay.models.zoo import backbone

CLASSIFIER = ["task=folder", "task.channels=3", "task.size=224", "task.classes=2", "model=resnet34", "model.width=64"]
# The paper's, as in preset=paper.
GENERATOR = {"codes": 512, "dim": 64, "width": 128, "blocks": 2, "residual_width": 64}


def classifier(batch: int, device: torch.device) -> Callable[[], object]:
    """Return a function that takes a step of ResNet-34."""
    config = compose(CLASSIFIER)
    model = backbone(config.model, config.task)(0).to(device).train()
    optimizer, loss = make_optimizer(model, config.training, config.training.lr), make_task(config.task).loss
    x = torch.rand(batch, 3, config.task.size, config.task.size, generator=torch_rng("benchmark")).to(device)
    y = torch.arange(batch, device=device) % config.task.classes
    return lambda: step(model, optimizer, loss(model(x), y))


def generator(batch: int, device: torch.device) -> Callable[[], object]:
    """Return a function that takes a step of VQ-VAE-2."""
    config, draws = VQVAE2Config(name="vqvae2", batch_size=batch, **GENERATOR), torch_rng("benchmark")
    model = build_generator(config, 3, 256, seed=0).to(device)
    optimizer = torch.optim.Adam(model.parameters(), config.lr)
    x = torch.rand(batch, 3, 256, 256, generator=draws).to(device)
    return lambda: step(model, optimizer, model.loss(x, draws)[0])


WORK = {"resnet34": classifier, "vqvae2": generator}


def institution(what: str, args: argparse.Namespace, together: int, begin: Barrier, rates: Any) -> None:
    """Take steps for some seconds, beside the others."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // together))
    device = select_device(args.device)
    work = WORK[what](args.batch, device)
    work()  # what is done once: memory, the choice of algorithms
    begin.wait()
    steps, began = 0, now(device)
    while (spent := now(device) - began) < args.seconds:
        work()
        steps += 1
    on_gpu = device.type == "cuda"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rates.put((steps * args.batch / spent, torch.cuda.max_memory_allocated(device) if on_gpu else peak))


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--institutions", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--only", choices=list(WORK), nargs="+", default=list(WORK))
    args = parser.parse_args()
    device = select_device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{os.cpu_count()} cores"
    print(f"{name}, torch {torch.__version__}, Python {platform.python_version()}, batches of {args.batch}\n")
    print("| | institutions | images a second, all | of one | memory of one, GB |\n|---|---|---|---|---|")
    spawn = multiprocessing.get_context("spawn")
    for what in args.only:
        for together in args.institutions:
            begin, rates = spawn.Barrier(together), spawn.Queue()
            arguments = (what, args, together, begin, rates)
            ones = [spawn.Process(target=institution, args=arguments) for _ in range(together)]
            for process in ones:
                process.start()
            results = [rates.get() for _ in ones]
            for process in ones:
                process.join()
            total, most = sum(rate for rate, _ in results), max(peak for _, peak in results)
            print(f"| {what} | {together} | {total:.1f} | {total / together:.1f} | {most / 1e9:.2f} |", flush=True)


if __name__ == "__main__":
    main()
