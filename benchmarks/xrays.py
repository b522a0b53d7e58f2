"""Methods on real X-rays at clinical size: quality, bytes, seconds, and the memory of server and institutions.

    python benchmarks/xrays.py ../shared/data/covid-cxr [--partitions natural dirichlet] [--size 128] [--width 16]
        [--rounds 10] [--seed 0] [--only fedavg …] [--jobs 2] [--runs-dir runs] [[METHOD:]OPTION=VALUE …]

The folder has a manifest.csv with the columns image, label and site. Every run has a process for the server and two
that serve the institutions, each with one thread; `--jobs` runs at a time share out the cores. Memory is the most that
a process has had (VmHWM: with what it has mapped of files; on a GPU what nvidia-smi says, twice a second). Quality is
that of the last round on test examples. A run that fails has a row that says so; the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

METHODS = {
    "fedavg": ["strategy=fedavg"],
    "cwt": ["strategy=cwt"],
    "fedreplay": ["strategy=fedreplay", "encoder_epochs=10"],
    "cwt-codes": ["strategy=cwt", "replay=vqvae2"],
    "cwt-prior": ["strategy=cwt", "replay=pixelcnn", "prior=maskgit"],
    "central": ["strategy=central"],
    "local": ["strategy=local"],
}
DEALT = {"natural": ["partition=natural"], "dirichlet": ["partition=dirichlet", "partition.alpha=0.5", "nodes=3"]}


def most_memory(pid: int) -> int:
    """Return the most memory that a process has had so far, in bytes; 0 once it has ended."""
    with suppress(OSError, IndexError):
        return 1024 * int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0])
    return 0


def on_gpu() -> dict[int, int]:
    """Return the bytes of GPU memory that each process has, by its number; nothing where there is no GPU."""
    if not shutil.which("nvidia-smi"):
        return {}
    asked = ["nvidia-smi", "--query-compute-apps=pid,used_gpu_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()
    return {int(pid): int(mib) << 20 for pid, mib in (line.split(",") for line in lines)}


def given(method: str, options: list[str]) -> list[str]:
    """Return the options of all methods and the method's own ones."""
    named = [text.partition(":") for text in options]
    own = [option for of, _, option in named if of == method]
    return [text for text, (of, _, _) in zip(options, named, strict=True) if of not in METHODS] + own


def measured(method: str, partition: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Run a method; return its result with the memory of its processes and the seconds that it took."""
    name = f"{method}-{partition}-{asked.size}-seed{asked.seed}"
    job = [
        "task=folder", f"task.data-dir={asked.data}", "task.channels=1", f"task.size={asked.size}", "model=resnet34",
        f"model.width={asked.width}", f"rounds={asked.rounds}", f"seed={asked.seed}", "threads=1", f"run-name={name}",
        *DEALT[partition], *METHODS[method], *given(method, asked.options),
    ]  # fmt: skip
    command = [str(Path(sys.executable).with_name("flwr-replay")), "run", *job, "--engine", "inline", "--workers", "2"]
    log = Path(asked.runs_dir, f"{name}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    server = institutions = gpu = 0
    began = time.monotonic()
    with log.open("w") as lines:
        run = subprocess.Popen(
            [*command, "--runs-dir", asked.runs_dir],
            stdout=lines,
            stderr=lines,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        while run.poll() is None:
            server = max(server, most_memory(run.pid))
            with suppress(psutil.Error):
                inside = [child.pid for child in psutil.Process(run.pid).children(recursive=True)]
                institutions = max(institutions, *map(most_memory, inside), 0)
                used = on_gpu()
                gpu = max(gpu, *(used.get(pid, 0) for pid in [run.pid, *inside]))
            time.sleep(0.5)
    if run.returncode:
        raise RuntimeError(f"exit code {run.returncode}; see {log}")
    result = json.loads(Path(asked.runs_dir, name, "result.json").read_text())
    return result | {"server": server, "institutions": institutions, "gpu": gpu, "wall": time.monotonic() - began}


def row(method: str, partition: str, result: dict[str, Any]) -> str:
    """Write a run as a line of a Markdown table."""
    metrics = result["final"]["global"]
    return (
        f"| {partition} | {method} | {metrics['accuracy']:.3f} | {metrics['balanced-accuracy']:.3f} | "
        f"{result['bytes']['up'] / 1e6:.1f} | {result['bytes']['down'] / 1e6:.1f} | {result['wall']:.0f} | "
        f"{result['server'] / 1e6:.0f} | {result['institutions'] / 1e6:.0f} | {result['gpu'] / 1e6:.0f} |"
    )


def main() -> None:
    """Run every method on every partition; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("options", nargs="*", metavar="OPTION=VALUE")
    parser.add_argument("--partitions", nargs="+", default=list(DEALT), choices=list(DEALT))
    parser.add_argument("--only", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs-dir", default="runs")
    asked = parser.parse_intermixed_args()
    print("| dealt | method | accuracy | balanced | MB up | MB down | seconds | server MB | institution MB | GPU MB |")
    print("|" + "---|" * 10, flush=True)
    with ThreadPoolExecutor(asked.jobs) as pool:
        cells = {
            pool.submit(measured, method, partition, asked): (method, partition)
            for partition in asked.partitions
            for method in asked.only
        }
        for run in as_completed(cells):
            method, partition = cells[run]
            failed = run.exception()
            print(
                f"| {partition} | {method} | {failed} |" if failed else row(method, partition, run.result()), flush=True
            )
    if any(run.exception() for run in cells):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
