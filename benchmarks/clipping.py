"""Time of clipped sums of per-example gradients: ours, Opacus' hooks and torch.func against a plain backward pass.

python benchmarks/clipping.py [--batch 250] [--repeats 15] [--device cpu]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from flwr_replay.config.compose import compose, model_named
from flwr_replay.models import build, placed
from flwr_replay.privacy.dpsgd import clipped_sums
from flwr_replay.privacy.ghost import Ghost

MODELS = {"mlp": "mnist", "lenet5": "mnist", "cnn1": "cifar10", "cnn2": "cifar10"}


def ways(name: str, batch: int, device: str) -> dict[str, Callable[[], object]]:
    """Return the functions to time, by name."""
    task = compose([f"task={MODELS[name]}"]).task
    model = placed(build(model_named(name), task, 0), torch.device(device))
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(batch, task.channels, task.size, task.size, generator=draw).to(device)
    y = torch.randint(task.classes, (batch,), generator=draw).to(device)

    def losses(x_B: Tensor, y_B: Tensor) -> Tensor:
        return functional.cross_entropy(model(x_B), y_B, reduction="none")

    def plain() -> None:
        losses(x, y).mean().backward()
        model.zero_grad()

    def ours() -> None:
        clipped_sums(model, losses, (x, y), 1.0)

    def hooks() -> None:
        with patch.object(Ghost, "serves", lambda module: False):
            clipped_sums(model, losses, (x, y), 1.0)

    def of_one(weights: dict[str, Tensor], x_1: Tensor, y_1: Tensor) -> Tensor:
        return functional.cross_entropy(torch.func.functional_call(model, weights, (x_1[None],)), y_1[None])

    of_all = torch.vmap(torch.func.grad(of_one), in_dims=(None, 0, 0))

    def functorch() -> None:
        gradients = of_all({key: value.detach() for key, value in model.named_parameters()}, x, y)
        norms_B = torch.stack([gradient_B.flatten(1).norm(dim=1) for gradient_B in gradients.values()]).norm(dim=0)
        for gradient_B in gradients.values():
            torch.tensordot((1 / norms_B).clamp(max=1), gradient_B, dims=1)

    return {"plain": plain, "ours": ours, "hooks": hooks, "torch.func": functorch}


def main() -> None:
    """Print medians in milliseconds, and as multiples of the plain pass."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=250)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{asked.batch} examples, {asked.device}, medians of {asked.repeats}; ms, and times the plain pass")
    for name in MODELS:
        seconds: dict[str, list[float]] = {}
        timed = ways(name, asked.batch, asked.device)
        for repeat in range(asked.repeats + 1):
            for way, run in timed.items():
                begun = time.perf_counter()
                run()
                if asked.device != "cpu":
                    torch.cuda.synchronize()
                if repeat:  # the first warms up
                    seconds.setdefault(way, []).append(time.perf_counter() - begun)
        medians = {way: statistics.median(times) for way, times in seconds.items()}
        shown = [f"{way} {1000 * ms:.1f} ({ms / medians['plain']:.1f}x)" for way, ms in medians.items()]
        print(f"{name:8}" + "   ".join(shown))


if __name__ == "__main__":
    main()
