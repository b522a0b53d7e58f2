r"""The cost of a VQ-VAE-2: images per second, memory, bytes of an image's codes.

    python benchmarks/generators.py
    python benchmarks/generators.py --size 256 --channels 3 --codes 512 --dim 64 --width 128 --blocks 2 \
        --residual-width 64 --steps 3

The first command is conf/generator/vqvae2.yaml at MNIST's size, the second is the paper's generator. Images are noise,
which takes the same work. Memory is the peak of PyTorch's tensors on a GPU, and of the whole process on a CPU.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import Any

import torch

from flwr_replay.generators.autoencoder import VQVAE2Config, build_generator
from flwr_replay.generators.codes import pack_codes
from flwr_replay.learning.training import select_device, torch_rng
from flwr_replay.models.layers import step


def rate(work: Callable[[], Any], images: int, repeats: int, device: torch.device) -> float:
    """Return images per second of some work, after one warm-up call."""
    work()
    begin = now(device)
    for _ in range(repeats):
        work()
    return images * repeats / (now(device) - begin)


def now(device: torch.device) -> float:
    """Return the time, in seconds, after waiting for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def main() -> None:
    """Measure and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("size", 28), ("channels", 1), ("codes", 128), ("dim", 16), ("width", 32), ("blocks", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--residual-width", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--codebook", default="ema")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device, draws = select_device(args.device), torch_rng("benchmark")
    options = {name: getattr(args, name) for name in ("codes", "dim", "width", "blocks", "residual_width", "codebook")}
    config = VQVAE2Config(name="vqvae2", batch_size=args.batch, **options)
    model = build_generator(config, args.channels, args.size, seed=0).to(device)
    optimizer = torch.optim.Adam(model.parameters(), config.lr)
    x = torch.rand(args.batch, args.channels, args.size, args.size, generator=draws).to(device)
    training = rate(lambda: step(model, optimizer, model.loss(x, draws)[0]), args.batch, args.steps, device)
    codes = model.encode(x)
    encoding = rate(lambda: model.encode(x), args.batch, args.steps, device)
    decoding = rate(lambda: model.decode(codes), args.batch, args.steps, device)
    on_gpu = device.type == "cuda"
    peak = (
        torch.cuda.max_memory_allocated(device) if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    print(
        f"{args.size}x{args.size}x{args.channels}, {config.codes} codes x {config.dim}, width {config.width}, batch "
        f"{args.batch}, {device}: {training:.3g} images/s trained, {encoding:.3g} encoded, {decoding:.3g} decoded; "
        f"{peak / 2**30:.2f} GiB; {pack_codes(codes.cpu().numpy(), config.codes).shape[1]} bytes of codes an image"
    )


if __name__ == "__main__":
    main()
