"""Recall of rare classes, and accuracy at each institution's own label mix, from a comparison's runs.

    python benchmarks/by_class.py runs/compare-… [--against METHOD]

`rare` is the recall of the classes that nobody majors in (partition=majority), each alike, mean over institutions.
`own mix` weights each institution's recall of a class by that class's share of its own training examples: what its own
patients would see, if their labels stay as they are. Both come from `confusion.json`. Differences are paired by seed.

Legend: K institutions, C classes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from flwr_replay.files.atomic import read_json
from flwr_replay.report.comparison import paired_difference
from flwr_replay.report.summary import confusion_of


def measured(folder: Path) -> dict[str, float]:
    """Return both figures of a run, and its smallest institution's accuracy."""
    result = read_json(folder / "result.json")
    names = sorted(result["final"]["institutions"])
    labels = result["skew"]["labels"]["institutions"]
    counts_KC = np.array([labels[name] for name in names], float)
    C = counts_KC.shape[1]
    confusion = confusion_of(folder)
    tested_KCC = np.array([confusion[name] for name in names], float).reshape(len(names), C, C)
    recall_KC = tested_KCC.diagonal(axis1=1, axis2=2) / tested_KCC.sum(2).clip(min=1)
    rare_C = np.ones(C, bool)
    rare_C[counts_KC.argmax(1)] = False
    shares_KC = counts_KC / counts_KC.sum(1, keepdims=True)
    return {
        **({"rare": float(recall_KC[:, rare_C].mean())} if rare_C.any() else {}),
        "own mix": float((shares_KC * recall_KC).sum(1).mean()),
        "own mix, worst institution": float((shares_KC * recall_KC).sum(1).min()),
    }


def main() -> None:
    """Print a line for each method and figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--against", default="")
    given = parser.parse_args()
    methods: dict[str, dict[int, dict[str, float]]] = {}
    for file in sorted(given.folder.glob("*-seed*/result.json")):
        name, _, seed = file.parent.name.rpartition("-seed")
        methods.setdefault(name, {})[int(seed)] = measured(file.parent)
    for name, runs in methods.items():
        for figure in next(iter(runs.values())):
            values = {seed: figures[figure] for seed, figures in runs.items()}
            spread = f" ± {stdev(values.values()):.3f}" if len(values) > 1 else ""
            line = f"{name}  {figure}: {fmean(values.values()):.3f}{spread}"
            if given.against and name != given.against:
                other = {seed: figures[figure] for seed, figures in methods[given.against].items()}
                if difference := paired_difference(values, other):
                    ends = difference["interval"]
                    line += f"  less {given.against}: {difference['mean']:+.3f}"
                    line += f" [{ends[0]:+.3f}, {ends[1]:+.3f}]" if ends else ""
            print(line)


if __name__ == "__main__":
    main()
