"""Memory and time of an institution's messages with many images, with and without decoded images on its disk.

    python benchmarks/decoded.py --images 50000 --size 224 --folder EMPTY [--cache-gb 20 0] [--limit-gb 4]

It writes colour JPEGs of their own into the folder, a manifest, and a state directory; all of it goes at the end. Each
message is answered by a process of its own, as a SuperNode does: roll call, FedAvg's training for one pass, a test, and
with a cache these once more. Printed are the process's seconds on the wall and of processor time, and its most memory:
anonymous pages, of which the system can drop none, and all resident pages, with the map's, which it can drop. With
--limit-gb the system refuses the process more private memory than that (RLIMIT_DATA).
"""

from __future__ import annotations

import argparse
import io
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
from flwr.app import Message
from PIL import Image

DISTINCT = 64  # pictures; each file has its own number behind the picture's last byte
STAGES = ("roll-call", "train", "evaluate")


def write_folder(folder: Path, images: int, size: int) -> None:
    """Write JPEGs of smooth random colours, with a manifest of two classes; one in ten is for testing."""
    rng, pictures = np.random.default_rng(0), []
    for _ in range(DISTINCT):
        file = io.BytesIO()
        small = Image.fromarray(rng.integers(0, 256, (14, 14, 3), np.uint8))
        small.resize((size, size), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
        pictures.append(file.getvalue())
    (folder / "images").mkdir(parents=True)
    rows = ["image,label,split"]
    for n in range(images):
        (folder / "images" / f"{n:06d}.jpg").write_bytes(pictures[n % DISTINCT] + n.to_bytes(8, "big"))
        rows.append(f"images/{n:06d}.jpg,{n % 2},{'train' if n % 10 else 'test'}")
    (folder / "manifest.csv").write_text("\n".join(rows) + "\n")


def answer(stage: str, folder: Path, size: int, cache_gb: float) -> None:
    """Answer one message, as the process that a SuperNode starts."""
    from flwr_replay.client_app import app
    from flwr_replay.config.compose import compose
    from flwr_replay.engines.inline import InlineGrid
    from flwr_replay.models.zoo import backbone
    from flwr_replay.payloads.common import Evaluate, RollCall, Train
    from flwr_replay.wire.records import array_record
    from flwr_replay.wire.weights import to_arrays

    words = f"strategy=fedavg task=folder task.channels=3 task.size={size} classes=2 model=mlp model.width=4 threads=1"
    config = compose(words.split())
    arrays = array_record(to_arrays(backbone(config.model, config.task)(0)))
    asked = {
        "roll-call": lambda: RollCall(exchange=0, run="benchmark", strategy="fedavg"),
        "train": lambda: Train(exchange=1, arrays=arrays, run="benchmark", lr=0.001),
        "evaluate": lambda: Evaluate(exchange=1, arrays=arrays, run="benchmark"),
    }[stage]()
    node = {"name": "a", "data": str(folder / "data"), "state": str(folder / "state"), "cache-gb": f"{cache_gb:g}"}
    grid = InlineGrid(app, {"overrides": words}, [node])
    [reply] = grid.send_and_receive([Message(asked.encode(), 2, asked.message_type, ttl=86_400)])
    if reply.has_error():
        raise SystemExit(reply.error.reason)
    asked.answer.decode(reply.content)  # raises if the institution has refused


def measured(stage: str, asked: argparse.Namespace, cache_gb: float) -> tuple[float, float, float, float]:
    """Return seconds, processor seconds, and the most anonymous and resident memory, MB, of a message's process."""

    def limited() -> None:
        if asked.limit_gb:
            resource.setrlimit(resource.RLIMIT_DATA, (int(asked.limit_gb * 1e9),) * 2)

    began, used, most, peak = time.monotonic(), processor_time(), 0.0, 0.0
    words = ["--stage", stage, "--cache-gb", str(cache_gb), "--folder", asked.folder, "--size", str(asked.size)]
    process = subprocess.Popen([sys.executable, __file__, *words], preexec_fn=limited)
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            fields = {line.partition(":")[0]: line.split() for line in status.splitlines()}
            most, peak = max(most, int(fields["RssAnon"][1]) / 1000), max(peak, int(fields["VmHWM"][1]) / 1000)
        except (OSError, KeyError):  # it has just ended
            pass
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{stage} with cache-gb={cache_gb:g} ended with {process.returncode}")
    return time.monotonic() - began, processor_time() - used, most, peak


def processor_time() -> float:
    """Return the seconds that processes took which have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Print a row for every message."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--cache-gb", type=float, nargs="+", default=[20.0, 0.0])
    parser.add_argument("--limit-gb", type=float, default=0.0)
    parser.add_argument("--stage", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    folder = Path(asked.folder)
    if asked.stage:
        answer(asked.stage, folder, asked.size, *asked.cache_gb)
        return
    print(
        f"{asked.images:,} images, {asked.size} x {asked.size}; {psutil.virtual_memory().total / 1e9:.0f} GB of memory"
    )
    try:
        write_folder(folder / "data", asked.images, asked.size)
        print("| cache-gb | message | s | processor, s | anonymous, MB | resident, MB |\n|---|---|---|---|---|---|")
        for cache_gb in asked.cache_gb:
            for stage in STAGES * (2 if cache_gb else 1):
                seconds, used, most, peak = measured(stage, asked, cache_gb)
                row = (f"{cache_gb:g}", stage, f"{seconds:.1f}", f"{used:.1f}", f"{most:.0f}", f"{peak:.0f}")
                print("", *row, "", sep=" | ", flush=True)
            shutil.rmtree(folder / "state")
    finally:
        shutil.rmtree(folder / "data", ignore_errors=True)
        shutil.rmtree(folder / "state", ignore_errors=True)


if __name__ == "__main__":
    main()
