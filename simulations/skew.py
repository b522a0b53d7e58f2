"""Studies of label skew: the tables of docs/results.md, as commands that can be repeated and resumed.

    uv run python -m flwr_replay.simulations.skew mnist-sorted --data ../shared/data/mnist

Source: Qu et al. 2022, section 4.2 (accuracy of each method as the label skew grows), on small public data.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flwr_replay.compare import compare_strategies

__all__ = ["STUDIES", "main"]

MNIST = ["task=mnist", "model=resnet18", "stem=small", "width=16", "partition=ks"]
PNEUMONIA = ["task=medmnist", "partition=ks", "ks=0.6", "drop=true"]
METHODS = ["central", "fedreplay", "fedreplay:cut=layer2", "fedavg", "cwt", "local"]

# name: (strategies, options, metric; empty: the task's leading one)
STUDIES: dict[str, tuple[list[str], list[str], str]] = {
    "digits": (
        ["fedavg", "fedavg:optimizer-state=keep", "cwt", "cwt:optimizer-state=keep", "local", "central", "fedreplay"],
        ["seeds=5"],
        "",
    ),
    "mnist-sorted": (METHODS, [*MNIST, "ks=0.93", "rounds=5", "seeds=3"], ""),
    "mnist-momentum": (
        ["fedavg:optimizer-state=keep", "cwt:optimizer-state=keep", "fedavg", "cwt", "fedreplay"],
        [*MNIST, "ks=0.93", "rounds=5", "seeds=3"],
        "",
    ),
    "mnist-longer": (
        ["fedavg:rounds=10", "cwt:rounds=10", "fedreplay"],
        [*MNIST, "ks=0.93", "rounds=5", "seeds=3"],
        "",
    ),
    "mnist-severe": (METHODS, [*MNIST, "ks=0.9", "rounds=5", "seeds=3"], ""),
    "mnist-mild": (METHODS, [*MNIST, "ks=0.66", "rounds=5", "seeds=3"], ""),
    "pneumonia": (
        ["central", "fedreplay", "fedreplay:encoder=random", "fedavg", "cwt", "local"],
        [*PNEUMONIA, "rounds=20", "seeds=5"],
        "balanced-accuracy",
    ),
}


def main() -> None:
    """Run one study; finished cells are not repeated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--data", default="", help="where the data lie: a folder, or an .npz file")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"))
    given = parser.parse_args()
    strategies, options, metric = STUDIES[given.study]
    data = [f"task.data-dir={given.data}"] if given.data else []
    table, _ = compare_strategies(strategies, [*options, *data], "fedreplay", given.jobs, given.runs_dir, metric)
    print(table)


if __name__ == "__main__":
    main()
