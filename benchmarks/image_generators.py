"""Image generators on real data: steps per second, and what a classifier learns from their images.

    python benchmarks/image_generators.py generator=stylegan2 --data FILE.npz --n 1000 --images 28

TSTR: accuracy of a small network trained on synthetic images (uniform labels) and tested on real ones, beside the same
network trained on as many real ones. Diversity: mean distance of two images of a class, pixels, over the real images'.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from flwr_replay.config.compose import compose
from flwr_replay.data.dealt import loaded
from flwr_replay.generators.perceptual import spread
from flwr_replay.generators.synthesis import SynthesisPlan
from flwr_replay.learning.training import batches, torch_rng
from flwr_replay.models.layers import as_input
from flwr_replay.models.zoo import backbone


def accuracy(config, x, y, test_x, test_y, seed, steps=400):
    """Train the run's model on x and y; return its accuracy on the test examples."""
    model = backbone(config.model, config.task)(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    made = 0
    while made < steps:
        for x_B, y_B in batches(x, y, 32, torch_rng(seed, "tstr", made)):
            optimizer.zero_grad()
            functional.cross_entropy(model(x_B), y_B).backward()
            optimizer.step()
            made += 1
    with torch.no_grad():
        return float((model.eval()(as_input(test_x)).argmax(1) == test_y).float().mean())


def main():
    """Train one generator, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", help="as of flwr-replay run: task=mnist generator=stylegan2 …")
    parser.add_argument("--n", type=int, default=1000, help="real images to learn from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = compose(["strategy=syncentral", "device=cpu", *args.options])
    plan, data = SynthesisPlan.of(config), loaded(config.task)
    rows = np.random.default_rng(args.seed).permutation(len(data.train))[: args.n]
    x, y = torch.from_numpy(data.train.x[rows]), torch.from_numpy(data.train.y[rows])
    test_x, test_y = torch.from_numpy(data.test.x), torch.from_numpy(data.test.y)
    generator, began = plan.fresh(args.seed, torch.device("cpu")), time.perf_counter()
    total = generator.steps(len(y))
    for first in range(0, total, max(1, total // 8)):
        said = generator.train(x, y, range(first, min(total, first + max(1, total // 8))))
        shown = ", ".join(f"{name} {value:.3f}" for name, value in said.items())
        print(f"{time.perf_counter() - began:6.0f} s  {shown}", flush=True)
    seconds = time.perf_counter() - began
    labels = y.unique()[torch.arange(args.n) % len(y.unique())]
    drawn = generator.sample(labels, torch_rng(args.seed, "benchmark")).mul(255).round().byte()
    sampling = time.perf_counter() - began - seconds
    synthetic = accuracy(config, drawn, labels, test_x, test_y, args.seed)
    real = accuracy(config, x, y, test_x, test_y, args.seed)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"{config.generator.name} on {args.n} of {config.task.name}, seed {args.seed}: {total} steps in "
        f"{seconds:.0f} s ({total / seconds:.1f}/s), {args.n / sampling:.0f} images/s, {memory:.1f} GB; "
        f"TSTR {synthetic:.3f}, real {real:.3f}, ratio {synthetic / real:.2f}; "
        f"diversity {spread(drawn, labels) / spread(x, y):.2f}"
    )
    if args.picture:
        from flwr_replay.institution.pictures import draw_grid

        by_class = torch.argsort(labels, stable=True)[:: max(1, args.n // 16)][:16]
        draw_grid(Path(args.picture), {"synthetic": as_input(drawn[by_class]), "real": as_input(x[:16])})


if __name__ == "__main__":
    main()
