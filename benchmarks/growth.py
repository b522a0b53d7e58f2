"""What a round leaves on the disk, at the coordinator and at an institution, and what that makes in a week.

    python benchmarks/growth.py

Every method runs twice in one process, with few rounds and with many. What differs is divided by the rounds between.
Files that do not grow are summed. A week is a round a minute. All institutions are tested in every round, which is the
most that a run writes. The bytes of a ledger's line hardly depend on the size of models and data.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from collections import Counter
from pathlib import Path

from flwr_replay.engines.simulate import run_inline
from flwr_replay.report.progress import Display, shown_bytes
from flwr_replay.runs.opening import read_run_id

WEEK = 7 * 24 * 60  # rounds
SMALL = ["task=digits", "model=mlp", "model.width=8", "partition.size=60", "device=cpu", "evaluate_every=1"]
METHODS = {
    "fedavg": ["strategy=fedavg"],
    "fedreplay": ["strategy=fedreplay", "encoder=random", "cut=hidden1"],
    "proxyfl": ["strategy=proxyfl", "noise=seeded", "epsilon=1e6", "delta=1e-3"],
}


def left(options: list[str], rounds: int, nodes: int) -> Counter[tuple[str, str]]:
    """Return the bytes that a run has left, by place and file; numbered files of one kind are one entry."""
    with tempfile.TemporaryDirectory() as home:
        os.environ["FLWR_REPLAY_HOME"] = home
        _, run = run_inline(
            [*SMALL, *options, f"rounds={rounds}", f"nodes={nodes}", f"runs_dir={home}/runs"], Display()
        )
        own = Path(home) / "state" / "simulation" / "institution-1"
        sizes = Counter[tuple[str, str]]()
        for place, folder in (("coordinator", run), ("institution", own)):
            for file in (file for file in folder.rglob("*") if file.is_file()):
                name = str(file.relative_to(folder)).replace(read_run_id(run), "RUN")
                sizes[place, re.sub(r"[0-9]{6}", "N", name)] += file.stat().st_size
        return sizes


def main() -> None:
    """Print a row for every file that grows, and one for all others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, nargs=2, default=[10, 40], metavar=("FEW", "MANY"))
    parser.add_argument("--nodes", type=int, default=3)
    asked = parser.parse_args()
    few, many = asked.rounds
    print(f"| method | place | file | bytes a round, {asked.nodes} institutions | a week |")
    print("|---|---|---|---|---|")
    for method, options in METHODS.items():
        before, after = (left(options, rounds, asked.nodes) for rounds in (few, many))
        steady, week = Counter[str](), Counter[str]()
        for (place, file), size in sorted(after.items()):
            rate = (size - before[place, file]) / (many - few)
            if rate < 1:
                steady[place] += size
                continue
            week[place] += round(WEEK * rate)
            print(f"| {method} | {place} | {file} | {rate:.0f} | {shown_bytes(WEEK * rate)} |")
        for place, size in steady.items():
            print(f"| {method} | {place} | all others | 0 ({shown_bytes(size)}) | |")
            print(f"| {method} | {place} | **together** | | **{shown_bytes(week[place] + size)}** |")


if __name__ == "__main__":
    main()
