"""Priors over a VQ-VAE-2's codes: images a second, memory, and what a classifier learns from drawn images.

    python benchmarks/priors.py speed --sizes 32 64 128 256
    python benchmarks/priors.py quality task=mnist task.data-dir=DIR --images 2000 --seeds 0 1

`speed` measures on codes that are noise, which takes the same work, each prior and size in a process of its own. Memory
is the most that the process has needed, beyond what it had before it trained; on a GPU that of PyTorch's tensors.
Seconds are those of the processor, with one thread; on a GPU those of the clock.

`quality` trains a VQ-VAE-2, then each prior on its codes. TSTR: balanced accuracy of a small network trained on as many
drawn images as there are real ones, with labels that are uniform, and tested on real test images. The same network
trained on real images stands beside it, and on their reconstructions, with the same labels. Diversity: mean distance of
two images of a class, pixels, over that of reconstructions.

Options are those of `flwr-replay run`. Each of `--priors` is a prior with options of its own, as one text.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import shlex
import time

import numpy as np
import torch
from image_generators import balanced_accuracy

from flwr_replay.config.compose import compose
from flwr_replay.data.dealt import loaded
from flwr_replay.generators.autoencoder import build_generator
from flwr_replay.generators.base import ImageForm
from flwr_replay.generators.priors import build_prior
from flwr_replay.generators.vqvae2 import VQVAE2Images
from flwr_replay.learning.training import select_device, torch_rng
from flwr_replay.models.layers import as_input, step


def speed(chosen, size, args):
    """Print a row of the table: one prior at one size."""
    torch.set_num_threads(1)
    config = compose([*args.options, *shlex.split(chosen)])
    device, draws = select_device(args.device), torch_rng("benchmark")
    generator = build_generator(config.generator, 1, size, 0)
    prior = build_prior(config.prior, generator, 2, 0).to(device)
    optimizer = torch.optim.Adam(prior.parameters(), config.prior.lr)
    shape = args.batch, generator.codes_per_image
    codes = torch.randint(generator.codebook_size, shape, generator=draws).to(device)
    labels = (torch.arange(args.batch) % 2).to(device)
    uniform = prior.uniform(args.batch, draws).to(device)
    before = memory(device)
    training = rate(lambda: step(prior, optimizer, prior.loss(codes, labels, uniform)), args.batch, args.steps, device)
    trained = memory(device) - before
    begun = clock(device)
    prior.eval().sample(labels, draws)
    drawing = args.batch / (clock(device) - begun)
    print(
        f"| {size} | {chosen} | {training:.1f} | {drawing:.2f} | {trained / 1e9:.2f} | "
        f"{(memory(device) - before) / 1e9:.2f} |",
        flush=True,
    )


def rate(work, images, repeats, device):
    """Return images a second of some work, after one warm-up call."""
    work()
    begun = clock(device)
    for _ in range(repeats):
        work()
    return images * repeats / (clock(device) - begun)


def clock(device):
    """Return seconds: of this process's processor, which other programs do not slow down; with a GPU the time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def memory(device):
    """Return the most bytes so far."""
    on_gpu = device.type == "cuda"
    return (
        torch.cuda.max_memory_allocated(device) if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )


def quality(args):
    """Print a row for each seed and prior."""
    torch.set_num_threads(1)
    head = ["seed", "prior", "TSTR", "of real", "of reconstructions", "diversity", "s to train", "images/s drawn"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head), flush=True)
    for seed in args.seeds:
        trained = None
        for chosen in args.priors:
            config = compose([*args.options, *shlex.split(chosen), f"seed={seed}"])
            task, device = config.task, select_device(args.device)
            data, rng = loaded(task), np.random.default_rng(seed)
            kept = rng.permutation(len(data.train))[: args.images]
            x, y = torch.from_numpy(data.train.x[kept]), torch.from_numpy(data.train.y[kept])
            test = torch.from_numpy(data.test.x), torch.from_numpy(data.test.y)
            form = ImageForm(task.channels, task.size, task.classes)
            made = VQVAE2Images(config.generator, config.prior, form, seed, device)
            middle = made.mechanisms(len(y))["generator"]
            if trained is None:
                made.train(x, y, range(middle))
                trained = made.generator.state_dict()
                rows = torch.cat(
                    [
                        torch.from_numpy(rng.choice(np.flatnonzero(y == k), len(y) // task.classes))
                        for k in range(task.classes)
                    ]
                )
                again = made.closest(as_input(x[rows]), y[rows], None)
                real, reconstructed = (
                    balanced_accuracy(config, images, y[rows], test, seed) for images in (x[rows], again)
                )
            made.generator.load_state_dict(trained)
            begun = clock(device)
            made.train(x, y, range(middle, made.steps(len(y))))
            seconds, begun = clock(device) - begun, clock(device)
            drawn = made.sample(y[rows], torch_rng(seed, "drawn"))
            drawing = len(rows) / (clock(device) - begun)
            tstr = balanced_accuracy(config, drawn, y[rows], test, seed)
            spread = distance(drawn, y[rows]) / distance(again, y[rows])
            print(
                f"| {seed} | {chosen} | {tstr:.3f} | {real:.3f} | {reconstructed:.3f} | {spread:.2f} | {seconds:.0f} | "
                f"{drawing:.1f} |",
                flush=True,
            )


def distance(x, y):
    """Return the mean distance of two images of a class, over at most 100 of each."""
    flat = [x[y == k][:100].flatten(1) for k in y.unique()]
    return float(np.mean([float(torch.pdist(own).mean()) for own in flat]))


def main():
    """Measure, and print rows of a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "quality"])
    parser.add_argument("options", nargs="*", help="as of flwr-replay run")
    parser.add_argument("--priors", nargs="+", default=["prior=pixelcnn", "prior=maskgit"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--device", default="auto")
    args = parser.parse_intermixed_args()
    if args.what == "quality":
        return quality(args)
    head = ["pixels", "prior", "images/s trained", "images/s drawn", "GB to train", "GB, both"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head), flush=True)
    for size in args.sizes:
        for chosen in args.priors:
            process = multiprocessing.get_context("spawn").Process(target=speed, args=(chosen, size, args))
            process.start()
            process.join()
    return None


if __name__ == "__main__":
    main()
