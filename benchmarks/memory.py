"""Peak memory of FedReplay's server while institutions upload, by their number and `strategy.chunk-mb`.

python benchmarks/memory.py [--institutions 2 4 8] [--chunk-mb 64 8] [--views 200]

It uses Flower's simulation. Its main process holds the ServerApp and the messages on their way; the processes of the
institutions are not counted. Every institution uploads the given number of views of 175 digits after conv1 of a cnn of
width 16; 200 views are 143 MB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

JOB = (
    "strategy=fedreplay task=digits partition=iid partition.size=175 model=cnn model.width=16 encoder=random rounds=1 "
    "batch-size=4096 device=cpu"
)


def peak(institutions: int, chunk_mb: float, views: int) -> float:
    """Return the peak memory of the server's process, MB, without pages of files, which the system can drop."""
    command = [sys.executable, "-c", "from flwr_replay.cli.main import main; main()", "run", "--engine", "ray"]
    options = [f"nodes={institutions}", f"chunk-mb={chunk_mb:g}", f"upload-views={views}"]
    most = 0.0
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.Popen(
            [*command, *JOB.split(), *options, "--runs-dir", folder],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while run.poll() is None:
            for process in psutil.Process(run.pid).children(recursive=True):
                with suppress(psutil.Error, OSError, IndexError):  # it has just ended
                    if process.name().startswith("flwr-simulation"):
                        status = Path(f"/proc/{process.pid}/status").read_text()
                        most = max(most, int(status.partition("RssAnon:")[2].split()[0]) / 1000)
            time.sleep(0.02)
    return most


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--institutions", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--chunk-mb", type=float, nargs="+", default=[64.0, 8.0])
    parser.add_argument("--views", type=int, default=200)
    asked = parser.parse_args()
    for chunk_mb in asked.chunk_mb:
        for institutions in asked.institutions:
            most = peak(institutions, chunk_mb, asked.views)
            print(f"{institutions} institutions, chunk-mb={chunk_mb:g}: {most:.0f} MB", flush=True)
