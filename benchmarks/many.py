"""What many institutions cost in one process: seconds a round, memory, files, by their number.

    python benchmarks/many.py --data ../shared/data/mnist-full [--nodes 10 100 1000] [--strategies fedavg cwt]
        [--rounds 4] [--options fraction=0.1] [--json many.json] [--plot many.png]

Every institution has 20 digits for training and an equal part of the test images; the model is an MLP of width 32. A
round of a head under shared noise: --strategies fedsgd --nodes 8 --rounds 16 --model 'model=gabor model.train=head'
--options partition.size=1000 evaluate_every=99.
Every run is a process of its own with an empty state directory. A cycle of CWT is a round. `first` is all up to
the end of the first round: the roll call, and what a method does once. `round` is the median of the later rounds, `end`
what follows the last: models, `result.json`, the page. For FedAvg and CWT `plain` is the median round of a loop in the
same process that takes the same steps and tests the same shards, without messages, ledgers, policies or files. Seconds
are wall time, and the processor's beside it, which other work changes less. Memory is the process's
peak during the run, and before it (libraries, data). Files are those of the run directory, and of all states. A second
table has what single parts of a run take for an institution, by the processor's time; a test of a model contains its
lines of the ledger and its notes of state.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine import evaluate, sequential, shards, visit

from flwr_replay.config.compose import compose
from flwr_replay.config.run import RunConfig
from flwr_replay.engines.simulate import Simulation, simulate
from flwr_replay.institution.client import InstitutionClient
from flwr_replay.institution.owner import Institution
from flwr_replay.learning.tasks import make_task
from flwr_replay.models.zoo import backbone
from flwr_replay.movements.evaluating import Evaluations
from flwr_replay.report.progress import Display
from flwr_replay.rng import derived_seed
from flwr_replay.runs.directory import RunDirectory
from flwr_replay.server.roll import Roll
from flwr_replay.state.store import StateStore
from flwr_replay.wire.weights import to_arrays

JOB = "task=mnist partition=iid partition.size=20 batch_size=10 device=cpu threads=1"
MODEL = "model=mlp model.width=32"
METHODS = {
    "fedavg": "",
    "cwt": "",
    "fedreplay": "encoder_epochs=2",
    "proxyfl": "",
    "fedsgd": "masked=true noise=shared dp=gradient target_epsilon=8 delta=1e-5",
}
PLAIN = ("fedavg", "cwt")
TIMED = {
    "roll call, once": ((Roll, "call"),),
    "ledgers, a round": ((Institution, "record_release"), (RunDirectory, "travelled"), (RunDirectory, "flush")),
    "state, a round": tuple((StateStore, name) for name in ("bind", "note_data", "count_test", "save", "load", "take")),
    "test, a round": ((Evaluations, "if_due"),),
    "of it the model": ((InstitutionClient, "evaluated"),),
}
MB = 1e6


class Timer:
    """Adds up the processor's seconds within some methods."""

    def __init__(self, *methods: tuple[type, str]) -> None:
        self.seconds = 0.0
        for owner, name in methods:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - begun

        return timed


class Clock(Display):
    """A display that only notes when exchanges end, in seconds of wall and of processor time."""

    def __init__(self) -> None:
        self.wall, self.cpu = [time.perf_counter()], [time.process_time()]

    def exchange(self, exchange: int, metrics: object, total_bytes: int, seconds: float) -> None:
        """Note the times."""
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())


def cycle(config: RunConfig, owned: Sequence[Any]) -> Iterator[None]:
    """Run CWT without Flower; each step of the iterator is a cycle with an evaluation."""
    model = backbone(config.model, config.task)(derived_seed(config.seed, "model"))
    arrays = to_arrays(model)
    for number in range(config.rounds):
        for k, (train, _) in enumerate(owned):
            arrays, _ = visit(model, train, arrays, config, 1, f"institution-{k + 1}", number * len(owned) + k + 1)
        make_task(config.task).pool([evaluate(model, test, arrays, config) for _, test in owned])
        yield


def files_below(folder: Path) -> tuple[int, int]:
    """Return number and bytes of the files below a folder."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)


def memory(key: str) -> float:
    """Return what Linux says of this process's memory, MB: VmRSS is what it has, VmHWM the most it has had."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{key}:")[2].split()[0]) * 1024 / MB


def measured(overrides: list[str]) -> dict[str, Any]:
    """Run once in this process; return what it cost."""
    config = compose(overrides)
    simulation, clock = Simulation.of(config), Clock()
    timers = {name: Timer(*methods) for name, methods in TIMED.items()}
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # from here on VmHWM is the most of the run, not of reading the data
    _, folder = simulate(simulation, overrides, clock)
    clock.exchange(0, {}, 0, 0.0)  # the end
    figures: dict[str, Any] = {"memory": memory("VmHWM"), "memory-before": before}
    figures["parts"] = {
        name: 1000 * timer.seconds / config.nodes / (1 if "once" in name else config.rounds)
        for name, timer in timers.items()
    }
    for name, stamps in {"": clock.wall, "cpu-": clock.cpu}.items():
        ends = stamps[: -1 : (len(stamps) - 2) // config.rounds]  # of rounds, after the beginning
        later = [after - earlier for earlier, after in pairwise(ends[1:])]
        figures[f"{name}first"], figures[f"{name}rounds"] = ends[1] - ends[0], later
        figures[f"{name}round"], figures[f"{name}end"] = statistics.median(later), stamps[-1] - stamps[-2]
    figures |= dict(zip(("run-files", "run-bytes"), files_below(folder), strict=True))
    figures |= dict(zip(("state-files", "state-bytes"), files_below(Path(os.environ["FLWR_REPLAY_HOME"])), strict=True))
    if config.strategy.name in PLAIN:
        owned = shards(config)
        loop = sequential(config, owned) if config.strategy.name == "fedavg" else cycle(config, owned)
        plain = Clock()
        for number, _ in enumerate(loop, 1):
            plain.exchange(number, {}, 0, 0.0)
        figures["plain"] = statistics.median(after - earlier for earlier, after in pairwise(plain.wall[1:]))
        figures["cpu-plain"] = statistics.median(after - earlier for earlier, after in pairwise(plain.cpu[1:]))
    return figures


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the figures as a table in Markdown; of seconds, wall time and in brackets the processor's."""
    heads = ["method", "institutions", "first, s", "a round, s", "of one, ms", "plain, s", "end, s", "peak, MB"]
    lines = [[*heads, "before, MB", "files of the run, MB", "of states, MB"], ["---"] * (len(heads) + 3)]
    for row in rows:
        first, each, plain, end = (
            f"{row[key]:.3g} ({row[f'cpu-{key}']:.3g})" if key in row else ""
            for key in ("first", "round", "plain", "end")
        )
        of_one = f"{1000 * row['round'] / row['nodes']:.3g} ({1000 * row['cpu-round'] / row['nodes']:.3g})"
        memory = [f"{row[key]:,.0f}" for key in ("memory", "memory-before")]
        files = [f"{row[f'{of}-files']:,}, {row[f'{of}-bytes'] / MB:.1f}" for of in ("run", "state")]
        lines.append([row["method"], f"{row['nodes']:,}", first, each, of_one, plain, end, *memory, *files])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_function(rows: Sequence[dict[str, Any]]) -> str:
    """Return what parts take for an institution, ms of the processor, as a table in Markdown."""
    lines = [["method", "institutions", *TIMED], ["---"] * (len(TIMED) + 2)]
    lines += [[row["method"], f"{row['nodes']:,}", *(f"{ms:.2g}" for ms in row["parts"].values())] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw the processor's seconds a round, peak memory and files by the number of institutions."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    wanted = {
        "processor seconds a round": lambda row: row["cpu-round"],
        "peak memory, MB": lambda row: row["memory"],
        "files": lambda row: row["run-files"] + row["state-files"],
    }
    figure, axes = plt.subplots(1, len(wanted), figsize=(11, 3.2), layout="constrained")
    for axis, (name, value) in zip(axes, wanted.items(), strict=True):
        for method in dict.fromkeys(row["method"] for row in rows):
            own = [row for row in rows if row["method"] == method]
            axis.plot([row["nodes"] for row in own], [value(row) for row in own], marker="o", label=method)
        axis.set(xscale="log", yscale="linear" if "MB" in name else "log", xlabel="institutions", ylabel=name)
        axis.set_ylim(bottom=0 if "MB" in name else None)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(file, dpi=110)


def main() -> None:
    """Measure each method with each number of institutions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, help="folder with MNIST's idx files")
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--strategies", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--options", nargs="*", default=[], help="further options of every run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)  # in a child: the run's options
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measured(given.one)))
        return
    rows: list[dict[str, Any]] = []
    for method in given.strategies:
        for nodes in given.nodes:
            with tempfile.TemporaryDirectory() as folder:
                options = [f"strategy={method}", f"nodes={nodes}", f"rounds={given.rounds}", f"runs_dir={folder}/runs"]
                options += [
                    f"task.data_dir={given.data.resolve()}",
                    *JOB.split(),
                    *given.model.split(),
                    *METHODS[method].split(),
                    *given.options,
                ]
                command = [sys.executable, __file__, "--data", str(given.data), "--one", *options]
                environment = {**os.environ, "FLWR_REPLAY_HOME": f"{folder}/home", "OMP_NUM_THREADS": "1"}
                child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            rows.append({"method": method, "nodes": nodes, **json.loads(child.stdout.splitlines()[-1])})
            print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(rows), by_function(rows), sep="\n\n")
    versions = {name: version(name) for name in ("flwr", "torch")}
    if given.json:
        text = json.dumps(
            {"versions": versions, "options": [JOB, given.model, METHODS, given.options], "rows": rows}, indent=2
        )
        given.json.write_text(text + "\n")
    if given.plot:
        plot(rows, given.plot)
    print(", ".join(f"{name} {number}" for name, number in versions.items()))


if __name__ == "__main__":
    main()
