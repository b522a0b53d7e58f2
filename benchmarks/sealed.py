"""What sealing and masking cost: seconds and bytes of one parcel, and of a whole round, for a model of 10 MB.

    python benchmarks/sealed.py
    python benchmarks/sealed.py --megabytes 85 --institutions 4

First a parcel alone: an institution seals its model for all, and another opens it. Medians of `--times`. Encoding the
arrays as Flower's records is not counted, since unsealed runs do that too. Seconds are the process's own on the CPU, so
that other work on the machine counts less. Then rounds in process on digits, of AvgPush sealed and of FedAvg masked,
with a wide MLP and one small batch for each institution, so that messages make most of the time: runs with and without
take turns, and the median of the paired differences counts. Bytes are those of the ledgers. The same of FedSGD with
shared noise, whose sums need all institutions, or from which some may be missing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from flwr_replay.ciphers.seal import simulated
from flwr_replay.engines.simulate import run_inline
from flwr_replay.report.progress import Display
from flwr_replay.wire.records import array_record
from flwr_replay.wire.sealed import SEALED_NAME

ARRAYS = 20  # arrays of the parcel's model
SHARED = ["masked=true", "noise=shared", "dp=gradient", "privacy.sigma=2", "delta=0.001"]
JOB = ["task=digits", "model=mlp", "device=cpu", "batch_size=8", "evaluate_every=100"]


class Clock(Display):
    """Notes the process's seconds when exchanges end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def exchange(self, exchange: int, metrics: dict[str, float], total_bytes: int, seconds: float) -> None:
        """Note them."""
        self.ends.append(time.process_time())


def parcel(megabytes: float, institutions: int, times: int, root: Path) -> None:
    """Print seconds to seal and to open one parcel, and the bytes that it has more than the model."""
    names = [f"institution-{k}" for k in range(1, institutions + 1)]
    seals = [simulated(root, names, name) for name in names[:2]]
    size = int(megabytes * 1e6 / 4 / ARRAYS)
    rng = np.random.default_rng(0)
    model = array_record({f"layer-{i}": rng.normal(size=size).astype(np.float32) for i in range(ARRAYS)})
    taken: dict[str, list[float]] = {"seal": [], "open": []}
    for _ in range(times):
        began = time.process_time()
        record = seals[0].close(model, "run", "0" * 64, "model", 1, 1.0)
        taken["seal"].append(time.process_time() - began)
        began = time.process_time()
        opened = seals[1].open(record[SEALED_NAME])
        taken["open"].append(time.process_time() - began)
    if opened.arrays["layer-0"].data != model["layer-0"].data:
        raise AssertionError("what was opened is not what was sealed")
    plain, whole = (sum(len(a.data) + len(name) for name, a in arrays.items()) for arrays in (model, record))
    shown = ", ".join(f"{name} {1000 * statistics.median(seconds):.0f} ms" for name, seconds in taken.items())
    print(f"a parcel of {plain / 1e6:.1f} MB for {institutions} institutions: {shown}; {whole - plain:,} bytes more")


def rounds(strategy: str, options: tuple[str, str], width: int, institutions: int, number: int, root: Path) -> None:
    """Print seconds and bytes of a round with one option, and with another; the first round of a run is left out."""
    spent: dict[bool, list[float]] = {False: [], True: []}
    sizes: dict[bool, int] = {}
    for pair in range(3):
        for hidden in (False, True):
            clock, name = Clock(), f"{institutions}-{strategy}-{pair}-{hidden}"
            job = [
                *JOB,
                f"strategy={strategy}",
                f"nodes={institutions}",
                f"model.width={width}",
                "partition.size=8",
                f"rounds={number}",
            ]
            place = [f"runs_dir='{root}'", f"run_name={name}", options[hidden]]
            result, _ = run_inline([*job, *place, *(SHARED if strategy == "fedsgd" else [])], clock)
            spent[hidden] += [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
            sizes[hidden] = result["bytes"]["up"] + result["bytes"]["down"]
    more = statistics.median(s - p for p, s in zip(spent[False], spent[True], strict=True))
    plain = statistics.median(spent[False])
    print(
        f"a round of {strategy}, {institutions} institutions: {plain:.3f} s, {options[1]} {more:.3f} s more; "
        f"{sizes[False] / number / 1e6:.1f} MB, {options[1]} {(sizes[True] - sizes[False]) / number:,.0f} bytes more"
    )


def main() -> None:
    """Measure all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=10.0, help="of the parcel's model")
    parser.add_argument("--width", type=int, default=1550, help="of the round's MLP; 1550: 10 MB")
    parser.add_argument("--institutions", type=int, default=4)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=4)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FLWR_REPLAY_HOME"] = folder
        parcel(asked.megabytes, asked.institutions, asked.times, Path(folder))
        parcel(asked.megabytes, 100, asked.times, Path(folder))
        for strategy, option in (("avgpush", "sealed"), ("fedavg", "masked")):
            pair = f"{option}=false", f"{option}=true"
            rounds(strategy, pair, asked.width, asked.institutions, asked.rounds, Path(folder))
        for institutions, missing in ((8, 1), (100, 7)):
            pair = "dropouts=0", f"dropouts={missing}"
            rounds("fedsgd", pair, asked.width // 50, institutions, asked.rounds, Path(folder))


if __name__ == "__main__":
    main()
